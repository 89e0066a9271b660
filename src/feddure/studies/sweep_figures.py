"""The figures of a sweep: every combination with its seeds, and accuracy along what was varied by numbers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from feddure.studies.cells import mean_of
from feddure.studies.sweep import Sweep, axis_name, written
from feddure.tracking import style
from feddure.tracking.figures import look
from feddure.tracking.summary import spoken

if TYPE_CHECKING:
    from feddure.studies.sweep_report import Row

MOST_ROWS = 40
"""Combinations in the figure; the table has them all."""

_WIDE = 9.6  # inches
_MOST_LINES, _MOST_PANELS = 10, 6
_LONGEST = 70  # characters of a name
_WIDE_RANGE = 8  # largest over smallest value from which an axis is logarithmic

Group = tuple[str, list["Row"]]


def leaderboard(sweep: Sweep, rows: Sequence["Row"]) -> Figure:
    """A dot for the mean of each combination, a bar of one standard deviation, and its seeds as small rings."""
    ranked = [row for row in rows if row.measured][:MOST_ROWS]
    names = [_short(row.point.name) for row in ranked]
    left, height = 0.35 + 0.068 * max(map(len, names)), 0.3 * len(names) + 0.1
    with style.applied():
        canvas = style.new_figure(_WIDE, height + 1.15)
        up = canvas.get_size_inches()[1]
        axes = style.inches(canvas, left, 0.55, _WIDE - left - 0.3, height)
        for place, row in enumerate(ranked):
            seeds = [100 * found.accuracy_last10 for found in row.measured.values()]
            colour = style.BLUE if place == 0 else style.MUTED
            if len(seeds) > 1:
                axes.plot(
                    seeds, [place] * len(seeds), "o", markersize=5, markerfacecolor="none", color=colour, alpha=0.5
                )
            spread = row.last10
            assert spread is not None
            error = None if spread.deviation is None else 100 * spread.deviation
            axes.errorbar(100 * spread.mean, place, xerr=error, fmt="o", markersize=6, color=colour, capsize=3)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"test accuracy, %, {_mean_of(ranked)}")
        several = len(sweep.seeds) > 1
        title = "Mean over seeds ± one standard deviation; rings are single seeds" if several else "One seed each"
        shown = f" (the best {MOST_ROWS} of {len(rows)})" if len(rows) > MOST_ROWS else ""
        canvas.text(0.12 / _WIDE, 1 - 0.15 / up, title + shown, va="top", size=11, weight="bold")
    return canvas


def along_axes(sweep: Sweep, rows: Sequence["Row"]) -> Figure | None:
    """Lines for a grid with one axis of numbers, heat maps for one with two; None for any other."""
    numeric = [key for key in sweep.axes if _is_numeric(rows, key)]
    measured = [row for row in rows if row.measured]
    if len(numeric) == 1:
        groups = _groups(sweep, measured, numeric)
        return _lines(numeric[0], groups) if len(groups) <= _MOST_LINES else None
    if len(numeric) == 2:
        groups = _groups(sweep, measured, numeric)
        return _maps(rows, numeric[0], numeric[1], groups) if len(groups) <= _MOST_PANELS else None
    return None


def _is_numeric(rows: Sequence["Row"], key: str) -> bool:
    values = {row.point.values[key] for row in rows if not isinstance(row.point.values[key], list | dict)}
    return len(values) > 1 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _groups(sweep: Sweep, rows: Sequence["Row"], numeric: Sequence[str]) -> list[Group]:
    """Rows by all that they differ in besides the axes of numbers, in the sweep's order."""
    ordered = sorted(rows, key=lambda row: sweep.points.index(row.point))
    found: dict[str, list[Row]] = {}
    for row in ordered:
        others = {key: value for key, value in row.point.values.items() if key not in numeric}
        found.setdefault(_label(row.point.case, others), []).append(row)
    return list(found.items())


def _label(case: str, values: Mapping[str, Any]) -> str:
    parts = [case] if case else []
    for key, value in values.items():
        named = key in ("method", "dataset", "model")
        parts.append(spoken(value) if named else f"{axis_name(key)} {written(value)}")
    return ", ".join(parts)


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


def _maps(every: Sequence["Row"], across: str, up: str, groups: Sequence[Group]) -> Figure:
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
            for row in rows:
                if row.last10 is not None:
                    at = lines.index(row.point.values[up]), columns.index(row.point.values[across])
                    table[at] = 100 * row.last10.mean
            _map(axes, table, min(means), max(means))
            axes.set_xticks(np.arange(len(columns)) + 0.5, [written(value) for value in columns])
            axes.set_yticks(np.arange(len(lines)) + 0.5, [written(value) for value in lines])
            axes.set_xlabel(axis_name(across))
            axes.set_ylabel(axis_name(up))
            axes.set_title(name, fontsize=9)
        text = f"Test accuracy, %, {_mean_of(every)}; mean over seeds"
        canvas.text(0.12 / canvas.get_size_inches()[0], 1 - 0.12 / total, text, va="top", size=10, weight="bold")
    return canvas


def _map(axes: Axes, table: np.ndarray, low: float, high: float) -> None:
    axes.pcolormesh(
        table, cmap="Blues", vmin=low - 0.25 * (high - low) - 1e-9, vmax=high, edgecolor="white", linewidth=1
    )
    for line, column in np.ndindex(table.shape):
        value = table[line, column]
        dark = value > low + 0.45 * (high - low)
        text = "–" if np.isnan(value) else f"{value:.1f}"
        best = value == high
        axes.text(
            column + 0.5, line + 0.5, text, ha="center", va="center", size=8,
            color="white" if dark else style.INK, weight="bold" if best else "normal",
        )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(False)


def _mean_of(rows: Sequence["Row"]) -> str:
    return mean_of((found for row in rows for found in row.measured.values()), spelled_out=True)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
