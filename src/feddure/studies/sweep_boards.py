"""The problems of a sweep: accuracies on different data cannot be compared, so each has a leaderboard of its own.

A problem is what the data are: the data set, and every field of the partition but its seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from feddure.studies.sweep import Changes, Point, Sweep
from feddure.studies.sweep_names import combination, part
from feddure.tracking.summary import flat


@dataclass(frozen=True)
class Board:
    """The combinations of a sweep that are measured on the same data, named by what they differ in."""

    title: str  # what the data are; empty where the sweep has a single board
    sweep: Sweep


def divide(sweep: Sweep) -> list[Board]:
    """A board for each problem, in the sweep's order; a single one where no problem has two combinations to rank."""
    groups: dict[str, list[Point]] = {}
    for point in sweep.points:
        groups.setdefault(repr(_problem(point)), []).append(point)
    if len(groups) == 1 or all(len(group) == 1 for group in groups.values()):
        return [Board("", sweep)]
    by_case = _by_case(sweep)
    named = bool(by_case) and _tells_cases_apart(sweep.points, by_case)
    return [_board(sweep, group, by_case, named) for group in groups.values()]


def _board(sweep: Sweep, group: Sequence[Point], by_case: Sequence[str], named: bool) -> Board:
    """`named`: the case says what its data are, so that its name stands in the title rather than in the rows."""
    first = group[0]
    fixed = [key for key in sweep.axes if _is_problem(key) and not _vary(group, key)]
    axes = tuple(key for key in sweep.axes if key not in fixed)
    parts = [part(key, first.values[key]) for key in fixed]
    if named:
        parts.append(first.case)
    else:
        there = {key: _problem(first)[key] for key in by_case}
        parts += [part(key, value) for key, value in there.items() if value is not None]
        parts = parts or [part(key, value) for key, value in there.items()]
    points = []
    for point in group:
        case = "" if named else point.case
        name = combination(case, {key: point.values[key] for key in axes})
        points.append(replace(point, name=name or point.name, case=case))
    return Board(", ".join(parts), replace(sweep, axes=axes, points=tuple(points)))


def _by_case(sweep: Sweep) -> list[str]:
    """Fields of the problem that differ between cases; the grid's are not among them."""
    found = [_fields(point) for point in sweep.points]
    return [key for key in found[0] if key not in sweep.axes and any(one[key] != found[0][key] for one in found)]


def _tells_cases_apart(points: Sequence[Point], fields: Sequence[str]) -> bool:
    cases: dict[str, set[str]] = {}
    for point in points:
        problem = _problem(point)
        cases.setdefault(repr([problem[key] for key in fields]), set()).add(point.case)
    return all(len(names) == 1 for names in cases.values())


def _problem(point: Point) -> Changes:
    """What a combination's data are; without Dirichlet, gamma means nothing."""
    fields = _fields(point)
    return fields if "dir" in fields["partition.setting"] else fields | {"partition.gamma": None}


def _fields(point: Point) -> Changes:
    return {key: value for key, value in flat(point.cells[0].experiment).items() if _is_problem(key)}


def _is_problem(key: str) -> bool:
    return key == "dataset" or (key.startswith("partition.") and key != "partition.seed")


def _vary(group: Sequence[Point], key: str) -> bool:
    return any(point.values[key] != group[0].values[key] for point in group)
