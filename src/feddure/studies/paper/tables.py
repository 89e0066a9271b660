"""The rows of a study as tables: for a terminal, a page, Markdown and CSV, always with the paper's numbers beside ours.

One digit after the point where there is a deviation over seeds, two where there is a single seed.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from feddure.reports.frame import Spread
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.numbers import setting_name
from feddure.studies.paper.rows import Row, axis_text, signed
from feddure.tracking.summary import NOTHING, spoken

NOT_MEASURED, FAILED = "not measured", "failed"

Panel = list[Row]
"""Rows that make one table or one part of a chart."""


class Grid(NamedTuple):
    """A table: methods down, settings or points of an axis across."""

    title: str
    columns: list[str]
    names: list[str]
    entries: list[list[Row | None]]  # [method][column]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """A study's tables: one a data set, or one for each data set and setting where the study has an axis."""
    if not rows:
        return []
    axis = reproduce.STUDIES[rows[0].study].axis
    found = []
    for panel in panels(rows):
        title = spoken(panel[0].dataset) + (f", {setting_name(panel[0].setting)}" if axis else "")
        keys = _in_order((row.value if axis else row.setting) for row in panel)
        if axis:
            keys = sorted(keys)
        methods = _in_order(row.method for row in panel)
        lines = sorted(_in_order((row.method, row.options) for row in panel), key=lambda line: methods.index(line[0]))
        there = {((row.method, row.options), row.value if axis else row.setting): row for row in panel}
        entries = [[there.get((line, key)) for key in keys] for line in lines]
        names = [next(row.name for row in line if row is not None) for line in entries]
        columns = [axis_text(axis, key) if axis else setting_name(key) for key in keys]
        found.append(Grid(title, columns, names, entries))
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Rows by data set, and by setting too where the study has an axis."""
    axis = bool(rows) and bool(reproduce.STUDIES[rows[0].study].axis)
    found: dict[tuple[str, str], Panel] = {}
    for row in rows:
        found.setdefault((row.dataset, row.setting if axis else ""), []).append(row)
    return list(found.values())


def accuracy(row: Row | None, seeds: int = 0) -> str:
    """Ours; where it has fewer than these seeds, it says how many."""
    if row is None:
        return NOTHING
    if row.last10 is None:
        return FAILED if row.failed else NOT_MEASURED
    few = f" n={len(row.seeds)}" if len(row.seeds) < seeds else ""
    return with_deviation(row.last10) + few


def with_deviation(found: Spread | None) -> str:
    """57.7 ± 1.2, or 57.73 of a single seed."""
    if found is None:
        return NOTHING
    if found.sd is None:
        return f"{found.mean:.2f}"
    return f"{found.mean:.1f} ± {found.sd:.1f}"


def paper(row: Row | None) -> str:
    return NOTHING if row is None or row.paper is None else f"{row.paper:.2f}"


def from_paper(row: Row | None) -> str:
    """Ours − the paper's."""
    if row is None or row.from_paper is None:
        return NOTHING
    return signed(row.from_paper, 1 if len(row.seeds) > 1 else 2)


def entry(row: Row | None, seeds: int = 0) -> str:
    """All of a cell in one text: ours ± deviation (paper, difference)."""
    if row is None or row.paper is None:
        return accuracy(row, seeds)
    if row.last10 is None:
        return f"{FAILED if row.failed else NOTHING} ({paper(row)})"
    return f"{accuracy(row, seeds)} ({paper(row)}, {from_paper(row)})"


def steps(line: Iterable[Row | None]) -> str:
    """Local steps of a client in a round, or their range over the columns."""
    found = sorted(row.local_steps for row in line if row is not None and row.local_steps is not None)
    if not found:
        return NOTHING
    texts = list(dict.fromkeys(f"{value:.1f}" for value in (found[0], found[-1])))
    return "–".join(texts)


def most_seeds(rows: Iterable[Row]) -> int:
    """The number of seeds that a complete row has."""
    return max((len(row.seeds) for row in rows), default=0)


def beyond_labels(grid: Grid) -> list[list[str]]:
    """Lines of names and differences from labels-only training with as many steps; those that have any."""
    lines = []
    for name, line in zip(grid.names, grid.entries, strict=True):
        found = [None if row is None else row.beyond_labels for row in line]
        if any(one is not None for one in found):
            lines.append([name, *(NOTHING if one is None else str(one) for one in found)])
    return lines


def missing(rows: Iterable[Row]) -> list[str]:
    """What is not measured yet and has not failed, in words: a line for each method of a panel."""
    found: dict[str, list[str]] = {}
    for row in rows:
        seeds = [seed for seed in row.missing if seed not in row.failed]
        if seeds:
            found.setdefault(_whose(row), []).append(_where(row, seeds))
    return [f"{name}: {'; '.join(places)}" for name, places in found.items()]


def failed(rows: Iterable[Row]) -> list[str]:
    """What was tried in vain, in words: a line for each method of a panel and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for reason in dict.fromkeys(row.failed.values()):
            seeds = [seed for seed, why in row.failed.items() if why == reason]
            found.setdefault((_whose(row), reason), []).append(_where(row, seeds))
    return [f"{name}: {'; '.join(places)}: {reason}" for (name, reason), places in found.items()]


def _whose(row: Row) -> str:
    panel = "" if row.value is None else f", {setting_name(row.setting)}"
    return f"{spoken(row.dataset)}{panel}, {row.name}"


def _where(row: Row, seeds: Sequence[int]) -> str:
    axis = reproduce.STUDIES[row.study].axis
    where = setting_name(row.setting) if row.value is None else axis_text(axis, row.value)
    return f"{where} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))})"


def markdown(rows: Sequence[Row], definitions: str = "") -> str:
    """All tables of a study as Markdown, with what their words mean below the first."""
    lines: list[str] = []
    seeds = most_seeds(rows)
    for place, grid in enumerate(grids(rows)):
        cells = [
            [name, *(entry(row, seeds) for row in line), steps(line)]
            for name, line in zip(grid.names, grid.entries, strict=True)
        ]
        lines += [f"## {grid.title}", "", *table(["method", *grid.columns, "local steps"], cells), ""]
        if place == 0 and definitions:
            lines += [definitions, ""]
        beyond = beyond_labels(grid)
        if beyond:
            lines += [
                "Points beyond labels-only training with matched steps, on the same seeds"
                + (", with 95 % intervals:" if seeds > 1 else ":"),
                "",
                *table(["method", *grid.columns], beyond),
                "",
            ]
    return "\n".join(lines)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], numbers: bool = True) -> list[str]:
    """Lines of a Markdown table; the first column holds words, the others numbers or words too."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    return [line(columns), "|---|" + ("---:|" if numbers else "---|") * (len(columns) - 1), *map(line, lines)]


def as_csv(rows: Sequence[Row]) -> str:
    """Every row of a study with all its numbers; accuracies in per cent, differences in points."""
    axis = reproduce.STUDIES[rows[0].study].axis if rows else ""
    records = [_record(row, axis) for row in rows]
    return lines_of(list(_record(Row("table1", "", "", "", ""), axis)), [list(found.values()) for found in records])


def lines_of(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A CSV file's text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return text.getvalue()


def _record(row: Row, axis: str) -> dict[str, object]:
    beyond = row.beyond_labels
    numbers: dict[str, float | None] = {"local_steps": row.local_steps}
    for name, found in (("last10", row.last10), ("last", row.last), ("ema", row.averaged)):
        numbers[f"accuracy_{name}_mean"] = None if found is None else found.mean
        numbers[f"accuracy_{name}_sd"] = None if found is None else found.sd
    numbers |= {
        "paper": row.paper,
        "difference_from_paper": row.from_paper,
        "beyond_labels_only": beyond.mean if beyond else None,
        "beyond_labels_only_low": beyond.low if beyond else None,
        "beyond_labels_only_high": beyond.high if beyond else None,
    }
    return {
        "study": row.study,
        "preset": row.preset,
        "dataset": row.dataset,
        "setting": row.setting,
        "method": row.method,
        "options": row.options,
        **({axis: "" if row.value is None else f"{row.value:g}"} if axis else {}),
        "rounds": next((found.rounds for found in row.measured.values()), ""),
        "seeds": " ".join(map(str, row.seeds)),
        "missing_seeds": " ".join(map(str, sorted(row.missing))),
        **{name: "" if value is None else round(value, 3) for name, value in numbers.items()},
    }


def _in_order(values: Iterable) -> list:
    return list(dict.fromkeys(values))
