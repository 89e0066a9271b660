"""The figures of a sweep: every combination with its seeds, and accuracy along what was varied by numbers."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from feddure.reports import style
from feddure.reports.figures import look
from feddure.studies.grid.store import mean_of
from feddure.studies.sweep import Sweep
from feddure.studies.sweep_boards import divide
from feddure.studies.sweep_names import axis_name, combination, written

if TYPE_CHECKING:
    from feddure.studies.sweep_report import Row

MOST_ROWS = 40
"""Combinations in the figure, where boards share it; the table has them all."""

_MOST_BOARDS, _FEWEST_ROWS = 8, 6
_WIDE, _ABOVE = 9.6, 0.42  # inches: the figure's width, and the room for a board's title
_MOST_LINES, _MOST_PANELS = 10, 6
_LONGEST = 70  # characters of a name
_WIDE_RANGE = 8  # largest over smallest value from which an axis is logarithmic

Group = tuple[str, list["Row"]]


def leaderboard(sweep: Sweep, boards: Sequence[Group]) -> Figure:
    """A dot for the mean of each combination, a bar of one standard deviation, and its seeds as small rings.

    Boards stand below one another, each under its title, on one scale.
    """
    boards = [(title, [row for row in rows if row.measured]) for title, rows in boards]
    found = [(title, rows) for title, rows in boards if rows]
    drawn = found[:_MOST_BOARDS]
    most = max(MOST_ROWS // len(drawn), _FEWEST_ROWS)
    drawn = [(title, rows[:most]) for title, rows in drawn]
    left = 0.35 + 0.068 * max(len(_short(row.point.name)) for _, rows in drawn for row in rows)
    above, around = (_ABOVE, 0.85) if len(boards) > 1 else (0.0, 1.15)
    heights = [0.3 * len(rows) + 0.1 for _, rows in drawn]
    with style.applied():
        canvas = style.new_figure(_WIDE, sum(heights) + above * len(drawn) + around)
        up = canvas.get_size_inches()[1]
        for number, (title, rows) in enumerate(drawn):
            below = sum(heights[number + 1 :]) + above * (len(drawn) - number - 1)
            axes = style.inches(canvas, left, 0.55 + below, _WIDE - left - 0.3, heights[number])
            if number:
                axes.sharex(canvas.axes[0])  # before anything is drawn, or it would not count towards the limits
            if below:
                axes.tick_params(axis="x", length=0, labelbottom=False)
                axes.spines["bottom"].set_visible(False)
            _ranked(axes, rows)
            axes.set_title(_short(title))
        canvas.axes[-1].set_xlabel(f"test accuracy, %, {_mean_of([row for _, rows in drawn for row in rows])}")
        several = len(sweep.seeds) > 1
        text = "Mean over seeds ± one standard deviation; rings are single seeds" if several else "One seed each"
        text += _left_out(found, len(drawn), most)
        canvas.text(0.12 / _WIDE, 1 - 0.15 / up, text, va="top", size=11, weight="bold")
    return canvas


def _ranked(axes: Axes, rows: Sequence["Row"]) -> None:
    for place, row in enumerate(rows):
        seeds = [100 * found.accuracy_last10 for found in row.measured.values()]
        colour = style.BLUE if place == 0 else style.MUTED
        if len(seeds) > 1:
            axes.plot(seeds, [place] * len(seeds), "o", markersize=5, markerfacecolor="none", color=colour, alpha=0.5)
        spread = row.last10
        assert spread is not None
        error = None if spread.deviation is None else 100 * spread.deviation
        axes.errorbar(100 * spread.mean, place, xerr=error, fmt="o", markersize=6, color=colour, capsize=3)
    axes.set_yticks(range(len(rows)), [_short(row.point.name) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _left_out(boards: Sequence[Group], drawn: int, most: int) -> str:
    """What the figure has no room for."""
    longest = max(len(rows) for _, rows in boards[:drawn])
    said = []
    if longest > most:
        said.append(f"the best {most} of {longest}" if len(boards) == 1 else f"the best {most} of each")
    if len(boards) > drawn:
        said.append(f"the first {drawn} of {len(boards)} boards")
    return f" ({', '.join(said)})" if said else ""


def along_axes(sweep: Sweep, rows: Sequence["Row"]) -> Figure | None:
    """Lines for a grid with one axis of numbers, heat maps for one with two; None for any other."""
    numeric = [key for key in sweep.axes if _is_numeric(rows, key)]
    measured = [row for row in rows if row.measured]
    if len(numeric) == 1:
        groups = _groups(sweep, measured, numeric)
        return _lines(numeric[0], groups) if len(groups) <= _MOST_LINES else None
    if len(numeric) == 2:
        groups = _groups(sweep, measured, numeric)
        return _maps(rows, numeric[0], numeric[1], groups, _best(sweep, rows)) if len(groups) <= _MOST_PANELS else None
    return None


def _best(sweep: Sweep, rows: Sequence["Row"]) -> set[str]:
    """The first cells of the best combinations, one a board."""
    ranked = [row.point.cells[0].hash for row in rows if row.measured]
    boards = [{point.cells[0].hash for point in board.sweep.points} for board in divide(sweep)]
    return {name for board in boards for name in [one for one in ranked if one in board][:1]}


def _is_numeric(rows: Sequence["Row"], key: str) -> bool:
    values = {row.point.values[key] for row in rows if not isinstance(row.point.values[key], list | dict)}
    return len(values) > 1 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _groups(sweep: Sweep, rows: Sequence["Row"], numeric: Sequence[str]) -> list[Group]:
    """Rows by all that they differ in besides the axes of numbers, in the sweep's order."""
    ordered = sorted(rows, key=lambda row: sweep.points.index(row.point))
    found: dict[str, list[Row]] = {}
    for row in ordered:
        others = {key: value for key, value in row.point.values.items() if key not in numeric}
        found.setdefault(combination(row.point.case, others), []).append(row)
    return list(found.items())


def _lines(key: str, groups: Sequence[Group]) -> Figure:
    values = sorted({row.point.values[key] for _, rows in groups for row in rows})
    height, below = 3.6, 0.6 + 0.17 * -(-len(groups) // 3) * (len(groups) > 1)
    with style.applied():
        canvas = style.new_figure(_WIDE, height + below + 0.2)
        axes = style.inches(canvas, 0.65, below, _WIDE - 0.95, height - 0.25)
        for place, (_, rows) in enumerate(groups):
            rows = sorted(rows, key=lambda row: row.point.values[key])
            spreads = [spread for row in rows if (spread := row.last10) is not None]
            mean = np.array([100 * spread.mean for spread in spreads])
            around = np.array([100 * (spread.deviation or 0.0) for spread in spreads])
            x = _aside([row.point.values[key] for row in rows], values, place - (len(groups) - 1) / 2)
            axes.errorbar(x, mean, around, markersize=5, capsize=2.5, elinewidth=1, **look(place))
        if _is_wide(values):
            axes.set_xscale("log")
        axes.set_xticks(values, [written(value) for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(axis_name(key))
        axes.set_ylabel("test accuracy, %")
        several = any(len(row.measured) > 1 for _, rows in groups for row in rows)
        bars = ", mean over seeds ± one standard deviation" if several else ""
        axes.set_title(f"Accuracy against {axis_name(key)}{bars}")
        if len(groups) > 1:
            handles = [Line2D([], [], markersize=5, **look(place)) for place in range(len(groups))]
            names = [_short(name) for name, _ in groups]
            columns = 3 if max(map(len, names)) < 30 else 1 if max(map(len, names)) > 45 else 2
            canvas.legend(handles, names, loc="lower left", bbox_to_anchor=(0.6 / _WIDE, 0.0), ncols=columns)
    return canvas


def _is_wide(values: Sequence[float]) -> bool:
    """Whether sorted values reach so far that their logarithms are to be drawn."""
    return values[0] > 0 and values[-1] / values[0] >= _WIDE_RANGE


def _aside(x: Sequence[float], values: Sequence[float], places: float) -> list[float]:
    """Places a little beside their values, or the bars of several lines would hide one another."""
    shift = 0.006 * places
    if _is_wide(values):
        return [value * (values[-1] / values[0]) ** shift for value in x]
    return [value + shift * (values[-1] - values[0]) for value in x]


def _maps(every: Sequence["Row"], across: str, up: str, groups: Sequence[Group], best: Collection[str]) -> Figure:
    """One map for each group with the same colours in all; a combination that is not measured stays white."""
    columns, lines = (sorted({row.point.values[key] for row in every}) for key in (across, up))
    means = [100 * row.last10.mean for _, rows in groups for row in rows if row.last10 is not None]
    side, tall = min(0.95, 6.5 / len(columns)), 0.45
    left, gap = 0.75 + 0.07 * max(len(written(value)) for value in lines), 0.95
    width, height = side * len(columns), tall * len(lines)
    beside = max(1, min(len(groups), int((_WIDE + 0.2) // (width + left + 0.2))))
    deep = -(-len(groups) // beside)
    with style.applied():
        canvas = style.new_figure(max(beside * (left + width + 0.2), 5.2), deep * (height + gap) + 0.4)
        total = canvas.get_size_inches()[1]
        for number, (name, rows) in enumerate(groups):
            line, place = divmod(number, beside)
            bottom = total - 0.4 - (line + 1) * (height + gap) + 0.6
            axes = style.inches(canvas, left + place * (left + width + 0.2), bottom, width, height)
            table = np.full((len(lines), len(columns)), np.nan)
            bold = set()
            for row in rows:
                if row.last10 is not None:
                    at = lines.index(row.point.values[up]), columns.index(row.point.values[across])
                    table[at] = 100 * row.last10.mean
                    if row.point.cells[0].hash in best:
                        bold.add(at)
            _map(axes, table, min(means), max(means), bold)
            axes.set_xticks(np.arange(len(columns)) + 0.5, [written(value) for value in columns])
            axes.set_yticks(np.arange(len(lines)) + 0.5, [written(value) for value in lines])
            axes.set_xlabel(axis_name(across))
            axes.set_ylabel(axis_name(up))
            axes.set_title(name, fontsize=9)
        text = f"Test accuracy, %, {_mean_of(every)}; mean over seeds"
        canvas.text(0.12 / canvas.get_size_inches()[0], 1 - 0.12 / total, text, va="top", size=10, weight="bold")
    return canvas


def _map(axes: Axes, table: np.ndarray, low: float, high: float, bold: Collection[tuple[int, int]]) -> None:
    axes.pcolormesh(
        table, cmap="Blues", vmin=low - 0.25 * (high - low) - 1e-9, vmax=high, edgecolor="white", linewidth=1
    )
    for line, column in np.ndindex(table.shape):
        value = table[line, column]
        dark = value > low + 0.45 * (high - low)
        text = "–" if np.isnan(value) else f"{value:.1f}"
        axes.text(
            column + 0.5, line + 0.5, text, ha="center", va="center", size=8,
            color="white" if dark else style.INK, weight="bold" if (line, column) in bold else "normal",
        )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(False)


def _mean_of(rows: Sequence["Row"]) -> str:
    return mean_of((found for row in rows for found in row.measured.values()), spelled_out=True)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
