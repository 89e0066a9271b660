"""A study's table: a row for each of its places over all seeds, ours beside the paper's number.

Accuracies and differences are in per cent and points, as the paper prints them. What is not measured has no number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from feddure.reports import frame
from feddure.reports.frame import Difference, Spread
from feddure.studies.grid.store import Cell, Store
from feddure.studies.paper.plan import PRESETS, STUDIES, axis_text, is_apart, method_name, printed, reference_cell
from feddure.studies.plan import REFERENCE
from feddure.tracking.summary import NOTHING, display_name

NOT_MEASURED, FAILED, DIRTY = "not measured", "failed", "†"

_REFERENCE = "reference"  # a column: the accuracy of labels-only training with as many steps on the same seed

_NO_RUNS = pd.DataFrame(columns=[*frame.COLUMNS, _REFERENCE])


@dataclass(frozen=True, eq=False)
class Row:
    """A method at one place of a study, over its seeds."""

    study: str
    preset: str
    dataset: str
    setting: str
    method: str
    options: str = ""  # what all rows of the table change
    value: float | None = None  # of the study's axis
    runs: pd.DataFrame = field(default_factory=lambda: _NO_RUNS)  # of the frame of results, with a reference
    paper: float | None = None

    @property
    def name(self) -> str:
        return method_name(self.method, self.study)

    @cached_property
    def measured(self) -> pd.DataFrame:
        return frame.measured(self.runs)

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """The mean of the last ten evaluations by seed."""
        return frame.by_seed(self.runs)

    @property
    def seeds(self) -> list[int]:
        return sorted(self.accuracies)

    @property
    def missing(self) -> list[int]:
        return sorted(set(map(int, self.runs["seed"])) - set(self.seeds))

    @cached_property
    def failed(self) -> dict[int, str]:
        """Why seeds are missing that were tried in vain."""
        return {int(seed): why for seed, why in zip(self.runs["seed"], self.runs["failed"], strict=True) if why}

    @cached_property
    def last10(self) -> Spread | None:
        return frame.mean_sd(self.accuracies.values())

    @property
    def local_steps(self) -> float | None:
        steps = frame.mean_sd(self.runs["local_steps"])
        return None if steps is None else steps.mean

    @property
    def from_paper(self) -> float | None:
        """Ours − the paper's."""
        return None if self.last10 is None or self.paper is None else self.last10.mean - self.paper

    @property
    def beyond_labels(self) -> Difference | None:
        """What unlabelled images are worth: ours − labels-only training with as many steps, seed by seed."""
        return None if self.method == REFERENCE else frame.paired(self.accuracies, self.reference)

    @property
    def reference(self) -> dict[int, float]:
        """The accuracies of labels-only training with as many steps, by seed."""
        return frame.by_seed(self.measured, _REFERENCE)

    @cached_property
    def is_dirty(self) -> bool:
        """Whether a cell was measured by a tree with uncommitted changes."""
        return any(str(about.get("commit")).endswith("-dirty") for about in self.measured["environment"])


def rows(cells: Sequence[Cell], store: Store) -> list[Row]:
    """The rows of a study in the order of its cells, then the places where only the paper has a number.

    Experiments that are not the paper's have their own rows alone.
    """
    if not cells:
        return []
    study, preset = cells[0].study, cells[0].preset
    axis, paper = STUDIES[study].axis, printed(study)
    runs = frame.of_cells(cells, store)
    runs[_REFERENCE] = frame.of_cells(map(reference_cell, cells), store)["accuracy_last10"]
    apart = is_apart(cells)
    found = []
    for _, own in runs.groupby(["dataset", "setting", "method", *filter(None, [axis])], sort=False):
        first = own.iloc[0]
        place = first["dataset"], first["setting"], first["method"]
        number = None if cells[0].options else paper.get(place)
        value = float(first[axis]) if axis else None
        found.append(Row(study, preset, *place, cells[0].options, value, own, number))
    return found if apart or preset not in PRESETS else found + _only_printed(found)


def _only_printed(found: Sequence[Row]) -> list[Row]:
    """Rows of what the paper prints beyond a table; a whole data set has room for labels-only training too."""
    study, preset = found[0].study, found[0].preset
    paper = printed(study)
    datasets, there = {row.dataset for row in found}, {(row.dataset, row.setting, row.method) for row in found}
    places = [
        (dataset, setting, method)
        for dataset, setting in dict.fromkeys(place[:2] for place in paper)
        for method in STUDIES[study].methods
        if (dataset, setting, method) in paper or (method == REFERENCE and dataset not in datasets)
    ]
    return [Row(study, preset, *place, paper=paper.get(place)) for place in places if place not in there]


class Grid(NamedTuple):
    """A table: methods down, settings or points of an axis across."""

    title: str
    names: list[str]
    columns: dict[str, list[Row | None]]  # [column][method]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """A study's tables: one a data set, or one for each data set and setting where the study has an axis."""
    found = []
    for panel in panels(rows):
        study, axis, dataset = panel[0].study, STUDIES[panel[0].study].axis, display_name(panel[0].dataset)
        there = {(row.method, row.setting if row.value is None else row.value): row for row in panel}
        keys: list[Any] = list(dict.fromkeys(key for _, key in there))
        title = dataset
        if axis:
            keys.sort()
            title += f", {panel[0].setting.upper()}"
        names = {row.method: row.name for row in panel}
        columns = {
            axis_text(study, key) if axis else key.upper(): [there.get((method, key)) for method in names]
            for key in keys
        }
        found.append(Grid(title, list(names.values()), columns))
    return found


def panels(rows: Iterable[Row], by_setting: bool = False) -> list[list[Row]]:
    """Rows by data set, and by setting too where the study has an axis or that is asked for."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        setting = row.setting if by_setting or STUDIES[row.study].axis else ""
        found.setdefault((row.dataset, setting), []).append(row)
    return list(found.values())


def runs_of(rows: Iterable[Row]) -> pd.DataFrame:
    """All that was measured for these rows, a row a run."""
    found = [row.measured for row in rows if row.seeds]
    return pd.concat(found) if found else _NO_RUNS


def most_seeds(rows: Iterable[Row]) -> int:
    """The number of seeds that a complete row has."""
    return max((len(row.seeds) for row in rows), default=0)


def accuracy(row: Row | None, seeds: int = 0) -> str:
    """Ours; where it has fewer than these seeds, it says how many."""
    if row is None:
        return NOTHING
    if row.last10 is None:
        return FAILED if row.failed else NOT_MEASURED
    few = f" n={len(row.seeds)}" if len(row.seeds) < seeds else ""
    return f"{row.last10}{few}" + (f" {DIRTY}" if row.is_dirty else "")


def entry(row: Row | None, seeds: int = 0) -> str:
    """All of a cell in one text: ours ± deviation (paper, difference)."""
    if row is None or row.paper is None:
        return accuracy(row, seeds)
    if row.from_paper is None:
        return f"{FAILED if row.failed else NOTHING} ({row.paper:.2f})"
    difference = frame.signed(row.from_paper, 1 if len(row.seeds) > 1 else 2)
    return f"{accuracy(row, seeds)} ({row.paper:.2f}, {difference})"


def steps(line: Iterable[Row | None]) -> str:
    """Local steps of a client in a round, or their range over the columns."""
    found = sorted(row.local_steps for row in line if row is not None and row.local_steps is not None)
    return "–".join(dict.fromkeys(f"{value:.1f}" for value in (found[0], found[-1]))) if found else NOTHING


def table(grid: Grid, seeds: int) -> pd.DataFrame:
    """The table as people read it."""
    texts = {name: [entry(row, seeds) for row in column] for name, column in grid.columns.items()}
    lines = zip(*grid.columns.values(), strict=True)
    return pd.DataFrame({"method": grid.names, **texts, "local steps": map(steps, lines)})


def beyond_labels(grid: Grid) -> pd.DataFrame:
    """Differences from labels-only training with as many steps, for the methods that have any."""
    found = pd.DataFrame({name: [row and row.beyond_labels for row in column] for name, column in grid.columns.items()})
    texts = found.map(lambda one: str(one or NOTHING))
    texts.insert(0, "method", grid.names)
    return texts[found.notna().any(axis=1)]


def unmeasured(rows: Iterable[Row]) -> dict[str, list[str]]:
    """What has failed, with the reason, and what is not measured yet: a line for each method of a panel."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        panel, place = "", row.setting.upper()
        if row.value is not None:
            panel, place = f", {place}", axis_text(row.study, row.value)
        name = f"{display_name(row.dataset)}{panel}, {row.name}"
        for reason in dict.fromkeys(row.failed.get(seed, "") for seed in row.missing):
            seeds = [str(seed) for seed in row.missing if row.failed.get(seed, "") == reason]
            where = f"{place} (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})"
            found.setdefault((name, reason), []).append(where)
    lines: dict[str, list[str]] = {"Failed": [], "Not measured yet": []}
    for (name, reason), places in found.items():
        line = f"{name}: {'; '.join(places)}"
        lines["Failed" if reason else "Not measured yet"].append(f"{line}: {reason}" if reason else line)
    return lines


def records(rows: Sequence[Row]) -> pd.DataFrame:
    """Every row of a study with all its numbers, for a CSV file."""
    return pd.DataFrame(map(_record, rows), dtype=object)


def _record(row: Row) -> dict[str, Any]:
    axis = STUDIES[row.study].axis
    place = {name: getattr(row, name) for name in ("study", "preset", "dataset", "setting", "method", "options")}
    numbers = {"local_steps": row.local_steps}
    for name in ("last10", "last", "ema"):
        found = frame.mean_sd(row.runs[f"accuracy_{name}"])
        numbers |= {f"accuracy_{name}_{end}": getattr(found, end, None) for end in ("mean", "sd")}
    numbers |= {"paper": row.paper, "difference_from_paper": row.from_paper}
    for end in ("mean", "low", "high"):
        name = "beyond_labels_only" + ("" if end == "mean" else f"_{end}")
        numbers[name] = getattr(row.beyond_labels, end, None)
    return {
        **place,
        **({axis: None if row.value is None else f"{row.value:g}"} if axis else {}),
        "rounds": next(iter(row.measured["rounds"]), None),
        "seeds": " ".join(map(str, row.seeds)),
        "missing_seeds": " ".join(map(str, row.missing)),
        **{name: None if value is None else round(value, 3) for name, value in numbers.items()},
    }
