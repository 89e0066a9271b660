"""What a sweep found: a leaderboard for each problem, and whether its first is better than by chance.

A problem is what the data are: the data set, and every field of the partition but its seed. Scores on different data
cannot be compared, so each problem has a leaderboard of its own. Where every run has images set aside for validation
they decide the order, and the test score stands beside it. What is scored is the experiments' `metric`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from feddure import experiments
from feddure.config import DIRICHLET
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports import figures, frame, inline, names, style
from feddure.reports.frame import Difference, Spread, mean_sd, signed
from feddure.reports.page import Code, Group, Section, Text, embed, escaped, markdown, page, table
from feddure.studies.grid.store import Store
from feddure.studies.sweep import Changes, Point, Sweep
from feddure.tracking.metrics import TITLES
from feddure.tracking.summary import NOTHING, duration, number

TABLE_FILE, PAGE_FILE, FIGURE_FILE, REPORT_FILE = "leaderboard.csv", "leaderboard.md", "leaderboard.png", "report.html"
_CASES_TEXT = (
    "The cases in the file's order: test {metric} in %, and points more than the case that each is compared with, on "
    "the same seeds with their 95 % interval by Student's t. Averaged: the averaged model at its last evaluation."
)
_MOST_CARDS = 4  # leaderboards whose best has a card
_MOST_LEFT_OUT = 0.5  # share of updates without which a combination is still ranked
_MOST_ROWS, _FEWEST_ROWS, _MOST_LEADERBOARDS = 40, 6, 8  # of the figure; the table has them all
_MOST_LINES, _MOST_PANELS = 10, 6  # of figures along the axes
_LONGEST = 70  # characters of a name in a figure
_WIDE_RANGE = 8  # largest over smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Row:
    """A combination, and its runs: rows of the frame of results."""

    point: Point
    runs: pd.DataFrame
    ranks_by: str = "accuracy"  # a metric on the test set, or "validation"
    metric: str = "accuracy"

    @cached_property
    def measured(self) -> pd.DataFrame:
        return frame.measured(self.runs)

    @property
    def missing(self) -> pd.DataFrame:
        return self.runs.drop(self.measured.index)

    @cached_property
    def last10(self) -> Spread | None:
        return mean_sd(self.runs[f"{self.ranks_by}_last10"])

    @property
    def left_out(self) -> float:
        """The largest share of updates that a seed lost because they were not finite."""
        return float(self.measured["left_out"].max()) if len(self.measured) else 0.0

    @property
    def diverged(self) -> bool:
        return self.left_out > _MOST_LEFT_OUT

    @property
    def ranked(self) -> bool:
        return self.last10 is not None and not self.diverged

    def against(self, other: "Row", column: str = "") -> Difference | None:
        """How much more accurate this one is on the seeds that both have; None where there are none."""
        column = column or f"{self.ranks_by}_last10"
        return frame.paired(frame.by_seed(self.runs, column), frame.by_seed(other.runs, column))

    @property
    def result(self) -> str:
        if self.last10 is None:
            return "not measured"
        return f"diverged, {self.last10}" if self.diverged else str(self.last10)


@dataclass(frozen=True)
class Leaderboard:
    """The combinations of a sweep that are measured on the same data, best first, named by what they differ in."""

    title: str  # what the data are; empty where the sweep has a single leaderboard
    axes: tuple[str, ...]
    cases: bool  # whether its rows are of different cases
    rows: list[Row]

    @cached_property
    def runs(self) -> pd.DataFrame:
        return pd.concat([row.runs for row in self.rows])

    @property
    def metric(self) -> str:
        return self.rows[0].metric

    @property
    def by_validation(self) -> bool:
        return self.rows[0].ranks_by == "validation"

    @property
    def numbers_from(self) -> int:
        """The first column of its table that holds what was found."""
        return 1 + self.cases + len(self.axes)

    def verdict(self) -> str:
        """Whether the best differs from the second by more than chance, in a sentence."""
        ranked = [row for row in self.rows if row.ranked]
        if not ranked:
            diverged = any(row.diverged for row in self.rows)
            return "All that is measured diverged." if diverged else "Nothing is measured yet."
        if len(ranked) == 1:
            return f"Only {ranked[0].point.name} can be ranked."
        best, second = ranked[:2]
        found = best.against(second)
        if found is None:
            return f"{best.point.name} over {second.point.name}: no seed is measured for both, so nothing can be said."
        interval = f", 95 % interval {found.interval}" if found.interval else ""
        lead = f"{best.point.name} over {second.point.name}: {signed(found.mean, 2)} points on the same"
        return f"{lead} {_seeds(found.n)}{interval}: {found.verdict}."

    def table(self, brief: bool = False) -> pd.DataFrame:
        """As people read it: the place, what was varied, what was found; `brief` fits a terminal."""
        varied = ["combination"] if brief else [*["case"] * self.cases, *map(names.axis, self.axes)]
        last = frame.heading(self.metric, "last")
        mean = frame.heading(self.metric, frame.mean_of(self.runs))
        columns = ["", *varied, mean, last, "seeds", "steps", "time", "from the best"]
        if self.by_validation:
            columns.insert(1 + len(varied), "validation")
        lines = []
        for place, row in enumerate(self.rows, 1):
            found = row.against(self.rows[0]) if place > 1 else None
            values = [names.shown(key, row.point.values[key]) for key in self.axes]
            done, wanted = len(row.measured), len(row.runs)
            steps, seconds = mean_sd(row.runs["local_steps"]), mean_sd(row.runs["seconds"])
            lines.append(
                [
                    place if row.ranked else NOTHING,
                    *([row.point.name] if brief else [*[row.point.case] * self.cases, *values]),
                    row.result,
                    *([mean_sd(row.runs[f"{self.metric}_last10"]) or NOTHING] if self.by_validation else []),
                    mean_sd(row.runs[f"{self.metric}_last"]) or NOTHING,
                    f"{done}" if done == wanted else f"{done} of {wanted}",
                    number(steps.mean if steps else None, 1),
                    duration(seconds.mean if seconds else None),
                    signed(found.mean, 2) if found else "",
                    found.interval if found else "",
                ]
            )
        table = pd.DataFrame(lines, columns=[*columns, "95 % interval"])
        table = table if frame.mean_heading(self.runs) else table.drop(columns=last)
        return table.drop(columns=[last, "95 % interval"], errors="ignore") if brief else table


def leaderboards(sweep: Sweep, store: Store) -> list[Leaderboard]:
    """All leaderboards of a sweep: one for each problem, or a single one.

    Combinations are ordered by their mean over seeds; then comes what diverged, then what is not measured.
    """
    found = []
    every = frame.of_cells(sweep.cells(), store)
    done, metric = frame.measured(every), frame.metric_of(every)
    ranks_by = "validation" if len(done) and done["validation_last10"].notna().all() else metric
    for title, axes, cases, points in divide(sweep):
        rows = [Row(point, frame.of_cells(point.cells, store), ranks_by, metric) for point in points]
        rows.sort(key=lambda row: (row.last10 is None, row.diverged, -row.last10.mean if row.last10 else 0.0))
        found.append(Leaderboard(title, axes, cases, rows))
    return found


def cases_table(sweep: Sweep, found: Sequence[Leaderboard]) -> pd.DataFrame:
    """Every combination in the file's order, against the case that it names, and what it is there for.

    Empty where no case says anything.
    """
    rows = {row.point.cells[0].hash: row for leaderboard in found for row in leaderboard.rows}
    by_case: dict[tuple[str, str], Row] = {}
    lines = []
    for point in sweep.points if any(point.about for point in sweep.points) else ():
        row = by_case[point.case, repr(point.values)] = rows[point.cells[0].hash]
        reference = by_case[point.against, repr(point.values)]
        compared = ["", "", ""]
        if row is not reference:
            differences = [row.against(reference, f"{row.metric}_{which}") for which in ("last10", "ema")]
            compared = [point.against, *(str(one or NOTHING) for one in differences)]
        averaged = mean_sd(row.runs[f"{row.metric}_ema"]) or NOTHING
        lines.append([point.name, row.result, str(averaged), *compared, point.about])
    columns = ["case", frame.mean_of(_every(found)), "averaged", "compared with", "points", "averaged, points"]
    return pd.DataFrame(lines, columns=[*columns, "what it is there for"])


def explanation(sweep: Sweep, found: Sequence[Leaderboard]) -> str:
    """What the columns are, and what not to read into them; said once for all leaderboards."""
    spread = " ± standard deviation over seeds" if len(sweep.seeds) > 1 else ""
    if len(found) > 1:
        spread += ", each leaderboard on its own because accuracies on different data cannot be compared"
    mean_of, metric = frame.mean_of(_every(found), spelled_out=True), TITLES[found[0].metric]
    if found[0].by_validation:
        text = f"Ordered by validation {metric} in %, {mean_of}{spread}; beside it the test {metric}."
        chosen = "its lead there is too large; the test set has chosen nothing"
    else:
        text = f"Ordered by test {metric} in %, {mean_of}{spread}."
        chosen = "the test set has chosen it: measure it again on new seeds before you rely on its lead"
    text += (
        " Steps: local ones per client and round. Time: of one seed. From the best: points on the same seeds; its "
        f"95 % interval is by Student's t. The best of many is partly the luckiest, and {chosen}."
    )
    rows = [row for leaderboard in found for row in leaderboard.rows]
    lost = [f"{row.point.name} {100 * row.left_out:.0f} %" for row in rows if row.left_out]
    if lost:
        text += " Updates of clients that were not finite were left out, in the worst seed of "
        text += f"{names.listed(lost, comma='; ')}: what lost more than half of them diverged and has no place."
    return text


def write(sweep: Sweep, store: Store) -> list[Path]:
    """Write results.csv, the leaderboard as a table, text and figure, and the page; returns their paths."""
    frame.write_results(store.folder, frame.of_cells(sweep.cells(), store))
    found = leaderboards(sweep, store)
    notes = _notes(found)
    frame.write_csv(store.folder / TABLE_FILE, _numbers(sweep, found))
    contents = {PAGE_FILE: _markdown(sweep, found, notes).encode()}
    pictures = []
    if len(frame.measured(_every(found))):
        figure = draw(found)
        contents[FIGURE_FILE] = style.render(figure, "png")
        pictures.append(embed(figure, f"{_ranked_by(found)} of each combination, best first"))
        along = along_axes(sweep, found)
        if along is not None:
            pictures.append(embed(along, f"{_ranked_by(found)} against the values that were varied"))
    contents[REPORT_FILE] = _html(sweep, found, notes, pictures).encode()
    for name, content in contents.items():
        write_whole(store.folder / name, content, RunError)
    return [store.folder / name for name in (TABLE_FILE, *contents)]


# --- problems ----------------------------------------------------------------------------------------------
def divide(sweep: Sweep) -> list[tuple[str, tuple[str, ...], bool, list[Point]]]:
    """Title, axes, whether cases differ, and combinations of each problem.

    There is a single one where no problem has two combinations to rank.
    """
    groups: dict[str, list[Point]] = {}
    for point in sweep.points:
        groups.setdefault(repr(_problem(point)), []).append(point)
    cases = any(point.case for point in sweep.points)
    if len(groups) == 1 or all(len(group) == 1 for group in groups.values()):
        return [("", sweep.axes, cases, list(sweep.points))]
    every = [_fields(point) for point in sweep.points]
    by_case = [key for key in every[0] if key not in sweep.axes and any(one[key] != every[0][key] for one in every)]
    # A case that says what its data are stands in the title rather than in the rows.
    meant: dict[str, set[str]] = {}
    for point in sweep.points:
        meant.setdefault(repr([_problem(point)[key] for key in by_case]), set()).add(point.case)
    in_title = bool(by_case) and all(len(found) == 1 for found in meant.values())
    found = []
    for group in groups.values():
        first = group[0]
        varied = {key for key in sweep.axes if any(point.values[key] != first.values[key] for point in group)}
        axes = tuple(key for key in sweep.axes if not _is_problem(key) or key in varied)
        parts = [names.part(key, first.values[key]) for key in sweep.axes if key not in axes]
        there = {key: _problem(first)[key] for key in by_case}
        known = {key: value for key, value in there.items() if value is not None}
        parts += [first.case] if in_title else [names.part(key, value) for key, value in (known or there).items()]
        points = []
        for point in group:
            name = names.combination("" if in_title else point.case, {key: point.values[key] for key in axes})
            points.append(replace(point, name=name or point.name))
        found.append((", ".join(parts), axes, cases and not in_title, points))
    return found


def _problem(point: Point) -> Changes:
    """What a combination's data are; without Dirichlet, gamma means nothing."""
    fields = _fields(point)
    return fields if fields["partition.setting"] in DIRICHLET else fields | {"partition.gamma": None}


def _fields(point: Point) -> Changes:
    return {key: value for key, value in experiments.flat(point.cells[0].experiment).items() if _is_problem(key)}


def _is_problem(key: str) -> bool:
    return key in ("dataset", "validation") or (key.startswith("partition.") and key != "partition.seed")


# --- files -------------------------------------------------------------------------------------------------
def _numbers(sweep: Sweep, found: Sequence[Leaderboard]) -> pd.DataFrame:
    """All leaderboards as numbers; metrics and differences in per cent, as in results.csv."""
    lines = []
    for leaderboard in found:
        for place, row in enumerate(leaderboard.rows, 1):
            line: dict[str, Any] = {"problem": leaderboard.title, "place": place if row.ranked else ""}
            line |= {"case": row.point.case} if any(point.case for point in sweep.points) else {}
            line |= {key: row.point.values[key] for key in sweep.axes}
            line["seeds_measured"] = " ".join(map(str, row.measured["seed"]))
            line["seeds_missing"] = " ".join(map(str, row.missing["seed"]))
            known = frame.metrics_of(leaderboard.runs)
            columns = [f"{name}_{which}" for name in known for which in ("last10", "last")]
            line |= frame.mean_and_sd(row.runs, ["validation_last10"] * leaderboard.by_validation + columns)
            for column in ("local_steps", "seconds"):
                line[column] = frame.rounded(mean_sd(row.runs[column]), "mean")
            against = row.against(leaderboard.rows[0]) if place > 1 else None
            for column, what in (("from_best", "mean"), ("interval_low", "low"), ("interval_high", "high")):
                line[column] = frame.rounded(against, what)
            lines.append(line | {"config_hashes": " ".join(row.runs["cell"])})
    return pd.DataFrame(lines, dtype=object)


def _html(sweep: Sweep, found: Sequence[Leaderboard], notes: Sequence[str], pictures: Sequence[Any]) -> str:
    parts: list[Any] = []
    for leaderboard in found:
        parts += [Text(leaderboard.title, "heading")] if leaderboard.title else []
        parts.append(table(leaderboard.table(), marked=frozenset({"1"}), numbers_from=leaderboard.numbers_from))
    cases = cases_table(sweep, found)
    first = (
        [Section("Cases", _about_cases(found), [table(cases, numbers_from=len(cases.columns))])] if len(cases) else []
    )
    file = f"{sweep.name}.yaml"
    again = "This file, what it starts from, the data set and the kind of machine determine all numbers but times."
    return page(
        "Sweep",
        sweep.name,
        [(leaderboard.title, leaderboard.verdict()) for leaderboard in found],
        [
            *first,
            Section(
                "Leaderboards" if len(found) > 1 else "Leaderboard", explanation(sweep, found), [*parts, *pictures]
            ),
            Section("Run it again", again, [Code(f"feddure sweep {file}"), Group([Code(sweep.text)], file)]),
        ],
        notes=notes,
        cards=_cards(sweep, found),
        footer=frame.provenance(_every(found)),
    )


def _cards(sweep: Sweep, found: Sequence[Leaderboard]) -> list[tuple[str, str, str]]:
    cards = []
    for leaderboard in found:
        best = leaderboard.rows[0]
        about = leaderboard.title or ("validation" if leaderboard.by_validation else frame.mean_of(leaderboard.runs))
        cards += [(f"best, {about}", f"{best.last10} %", best.point.name)] if best.last10 else []
    problems = f" of {len(found)} problems" if len(found) > 1 else ""
    note = f"{len(sweep.points)} combinations{problems}, {_seeds(len(sweep.seeds))}"
    runs = _every(found)
    counted = ("cells measured", f"{len(frame.measured(runs))} of {len(runs)}", note)
    return [*cards, counted] if len(found) <= _MOST_CARDS else [counted]


def _notes(found: Sequence[Leaderboard]) -> list[str]:
    """What a reader must know before the numbers: cells that failed, and those that nobody has tried."""
    failed: dict[tuple[str, str], list[str]] = {}
    absent = []
    for leaderboard in found:
        for row in leaderboard.rows:
            name = f"{leaderboard.title}: {row.point.name}" if leaderboard.title else row.point.name
            for run in row.missing.itertuples():
                if run.failed:
                    failed.setdefault((name, str(run.failed)), []).append(str(run.seed))
                else:
                    absent.append(f"{name}, seed {run.seed}")
    said = [f"{name}, seeds {', '.join(seeds)} ({reason})" for (name, reason), seeds in failed.items()]
    notes = [f"Failed: {names.listed(said, comma='; ')}."] if said else []
    if absent:
        notes.append(f"Not measured: {names.listed(absent, comma='; ')}. The order may change when they are.")
    return notes


def _markdown(sweep: Sweep, found: Sequence[Leaderboard], notes: Sequence[str]) -> str:
    text = [f"# {sweep.name}", *(escaped(note) for note in notes)]
    cases = cases_table(sweep, found)
    text += [markdown(table(cases)), _about_cases(found)] if len(cases) else []
    for leaderboard in found:
        text += [f"## {escaped(leaderboard.title)}"] if leaderboard.title else []
        text += [
            escaped(leaderboard.verdict()),
            markdown(table(leaderboard.table(), numbers_from=leaderboard.numbers_from)),
        ]
    text += [escaped(explanation(sweep, found)), *frame.provenance(_every(found))]
    return "\n\n".join(text) + "\n"


# --- figures -----------------------------------------------------------------------------------------------
def draw(found: Sequence[Leaderboard]) -> Figure:
    """A dot for the mean of each combination, a bar of one standard deviation, and its seeds as small rings.

    Leaderboards stand below one another, each under its title, on one scale.
    """
    shown = {board.title: [row for row in board.rows if row.last10] for board in found}
    drawn = [(title, rows) for title, rows in shown.items() if rows][:_MOST_LEADERBOARDS]
    most = max(_MOST_ROWS // len(drawn), _FEWEST_ROWS)
    several = any(len(row.runs) > 1 for _, rows in drawn for row in rows)
    title = "Mean over seeds ± one standard deviation; rings are single seeds" if several else "One seed each"
    if len(drawn) < len(shown) or any(len(rows) > most for _, rows in drawn):
        title += f" (the best {most} of {len(drawn)} leaderboards; the tables have all)"
    lengths = [min(most, len(rows)) for _, rows in drawn]
    with style.applied():
        height = sum(0.3 * length + 0.45 for length in lengths) + 0.7
        canvas = style.new_figure(figures.WIDE, height)
        panels = canvas.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=[n + 0.5 for n in lengths])
        for axes, (name, rows) in zip(panels.flat, drawn, strict=True):
            axes.set_gid(inline.ALONG_Y)
            _ranked(axes, rows[:most])
            axes.set_title(style.short(name, _LONGEST))
        panels[-1, 0].set_xlabel(f"{_ranked_by(found)}, %, {frame.mean_of(_every(found), spelled_out=True)}")
        canvas.suptitle(title, x=0.01, ha="left")
    return canvas


def _ranked(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        assert row.last10 is not None
        colour = style.BLUE if place == 0 else style.MUTED
        seeds = list(row.measured[f"{row.ranks_by}_last10"])
        if len(seeds) > 1:
            axes.plot(seeds, [place] * len(seeds), "o", markerfacecolor="none", color=colour, alpha=0.5)
        fmt: dict[str, Any] = {"fmt": "o", "markersize": 6, "capsize": 3, "color": colour, "label": "mean"}
        axes.errorbar(row.last10.mean, place, xerr=row.last10.sd, **fmt)
    axes.set_yticks(range(len(rows)), [style.short(row.point.name, _LONGEST) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def along_axes(sweep: Sweep, found: Sequence[Leaderboard]) -> Figure | None:
    """Lines for a grid with one axis of numbers, heat maps for one with two; None for any other."""
    numeric = [key for key in sweep.axes if _is_numeric([point.values[key] for point in sweep.points])]
    lines = []
    for leaderboard in found:
        for row in leaderboard.rows:
            others = {key: value for key, value in row.point.values.items() if key not in numeric}
            group = style.short(names.combination(row.point.case, others), _LONGEST)
            mean, sd = (row.last10.mean, row.last10.sd or 0.0) if row.last10 else (np.nan, np.nan)
            about = {"group": group, "mean": mean, "sd": sd, "best": row is leaderboard.rows[0]}
            lines.append(row.point.values | about)
    data = pd.DataFrame(lines)
    groups = data.loc[data["mean"].notna(), "group"].nunique()
    if len(numeric) == 1 and groups <= _MOST_LINES:
        return _lines(numeric[0], data[data["mean"].notna()], len(sweep.seeds) > 1, _ranked_by(found))
    if len(numeric) == 2 and groups <= _MOST_PANELS:
        return _maps(numeric, data, f"{_ranked_by(found)}, %, {frame.mean_of(_every(found), spelled_out=True)}")
    return None


def _is_numeric(values: Sequence[Any]) -> bool:
    plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return plain and len(set(values)) > 1


def _lines(key: str, data: pd.DataFrame, several: bool, ranked_by: str) -> Figure:
    values = sorted(set(data[key]))
    groups = list(data.groupby("group", sort=False))
    formats = style.run_line_styles([""] * len(groups))
    with style.applied():
        canvas = style.new_figure(figures.WIDE, 3.8 + 0.06 * len(groups))
        axes = canvas.add_subplot()
        for (name, own), fmt in zip(groups, formats, strict=True):
            own = own.sort_values(key)
            axes.errorbar(own[key], own["mean"], own["sd"], capsize=2.5, elinewidth=1, label=str(name), **fmt)
        if values[0] > 0 and values[-1] / values[0] >= _WIDE_RANGE:
            axes.set_xscale("log")
        axes.set_xticks(values, [names.shown(key, value) for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(names.axis(key))
        bars = ", mean over seeds ± one standard deviation" if several else ""
        axes.set_title(f"{ranked_by}, %, against {names.axis(key)}{bars}")
        if len(groups) > 1:
            style.legend(canvas, [str(name) for name, _ in groups], axes.containers)
    return canvas


def _maps(keys: Sequence[str], data: pd.DataFrame, title: str) -> Figure:
    """One map for each group with the same colours in all; a combination that is not measured stays white."""
    columns, lines = (sorted(set(data[key])) for key in keys)
    low, high = data["mean"].min(), data["mean"].max()
    formats: dict[str, Any] = {"cmap": "Blues", "edgecolor": "white", "linewidth": 1, "gid": inline.MAP}
    formats |= {"vmin": low - 0.25 * (high - low) - 1e-9, "vmax": high}
    groups = list(data.groupby("group", sort=False))
    width = 0.75 * len(columns) + 1.2
    beside = max(1, min(len(groups), int(figures.WIDE // width)))
    deep = -(-len(groups) // beside)
    with style.applied():
        canvas = style.new_figure(min(figures.WIDE, max(5.2, beside * width)), deep * (0.45 * len(lines) + 0.9) + 0.4)
        for place, (name, own) in enumerate(groups, 1):
            axes = style.bare(canvas.add_subplot(deep, beside, place))
            mean, best = (own.pivot(index=keys[1], columns=keys[0], values=which) for which in ("mean", "best"))
            axes.pcolormesh(mean.to_numpy(), **formats)
            bold = set(zip(*np.nonzero(best.to_numpy()), strict=True))
            figures.write_values(axes, mean.to_numpy(), "{:.1f}", bold, middle=low + 0.45 * (high - low))
            axes.set_xticks(np.arange(len(columns)) + 0.5, [names.shown(keys[0], value) for value in columns])
            axes.set_yticks(np.arange(len(lines)) + 0.5, [names.shown(keys[1], value) for value in lines])
            axes.set_xlabel(names.axis(keys[0]))
            axes.set_ylabel(names.axis(keys[1]))
            axes.set_title(str(name), fontsize=9)
        canvas.suptitle(f"{title}; mean over seeds", x=0.01, ha="left", size=10)
    return canvas


def _ranked_by(found: Sequence[Leaderboard]) -> str:
    return f"{'Validation' if found[0].by_validation else 'Test'} {TITLES[found[0].metric]}"


def _about_cases(found: Sequence[Leaderboard]) -> str:
    return _CASES_TEXT.format(metric=TITLES[found[0].metric])


def _every(found: Sequence[Leaderboard]) -> pd.DataFrame:
    return pd.concat([leaderboard.runs for leaderboard in found])


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"
