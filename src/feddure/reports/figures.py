"""The figures of a report, drawn from plain records.

A line is a run with its name and its format, the same in every figure. Few clients take part in a round, so that
rounds are noisy: faint lines are single rounds, strong ones running means. Shares are drawn in per cent.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from feddure.reports import inline, style
from feddure.reports.diagnostics import LAST_PROBES, LAST_ROUNDS, class_names, numbers, per_class, running_mean, trace
from feddure.reports.style import LineStyle
from feddure.tracking.metrics import TITLES
from feddure.tracking.records import Record, Run
from feddure.tracking.summary import NOTHING, Summary, evaluations

WIDE, HALF = 9.6, 4.7
"""Inches: a whole row of the report, and half of one."""

_LONGEST_LABEL, _LONGEST_CLASS = 40, 18
_MOST_NAMES = 40  # classes that are all named
_MOST_NUMBERS = 20  # classes whose confusion is also written out
_MOST_CELLS = 50  # of a heat map over the rounds
_TICKS = [1, 2, 2.5, 5, 10]


class Line(NamedTuple):
    """A run in the figures."""

    label: str
    metrics: Sequence[Record]
    fmt: LineStyle


class Shown(NamedTuple):
    """A run in a report: with its numbers, and as it is in the figures."""

    run: Run
    summary: Summary
    line: Line


class Curve(NamedTuple):
    """Values by round, perhaps those of the averaged model too, and a band around them."""

    label: str
    fmt: LineStyle
    points: Sequence[tuple[int, float]]
    averaged: Sequence[tuple[int, float]] = ()
    band: Sequence[tuple[float, float]] = ()


def evaluated(lines: Sequence[Line], quantity: str, on: str = "test", data: str = "") -> Figure:
    """A metric or the loss against rounds, on test or validation images; `data` says of what, as " on CIFAR-10"."""
    scale, unit = (1, " (mean cross entropy)") if quantity == "loss" else (100, ", %")

    def points(line: Line, model: str) -> list[tuple[int, float]]:
        return [(number, scale * value) for number, value in evaluations(line.metrics, quantity, model)]

    found = [Curve(line.label, line.fmt, points(line, on), points(line, f"{on}_ema")) for line in lines]
    height = 3.9 if on == "test" and quantity != "loss" else 3.2
    return curves(found, f"{on.capitalize()} {TITLES.get(quantity, quantity)}{data}{unit}", height)


def curves(found: Sequence[Curve], title: str, height: float = 3.9) -> Figure:
    """One line each with its evaluations as points; an averaged model is a line of dots."""
    found = [curve for curve in found if curve.points]
    with style.applied():
        canvas = style.new_figure(WIDE, height + 0.06 * len(found))
        axes = canvas.add_subplot()
        draw_curves(axes, [curve._replace(label=style.short(curve.label, _LONGEST_LABEL)) for curve in found])
        axes.set_title(title + (", dotted: averaged model" if any(curve.averaged for curve in found) else ""))
        if len(found) > 1:
            style.legend(canvas, *_names(found))
        return canvas


def draw_curves(axes: Axes, found: Sequence[Curve]) -> None:
    """Draw them into axes whose x are rounds."""
    for curve in found:
        rounds, values = zip(*curve.points, strict=True)
        often = max(1, len(rounds) // 40)
        own: dict[str, Any] = {"color": curve.fmt["color"], "gid": inline.part_of(curve.label)}
        axes.plot(rounds, values, markersize=4, markevery=often, clip_on=False, label=curve.label, **curve.fmt)
        if curve.averaged:
            axes.plot(*zip(*curve.averaged, strict=True), ":", label=f"{curve.label}, averaged", **own)
        if curve.band:
            low, high = zip(*curve.band, strict=True)
            axes.fill_between(rounds, low, high, alpha=0.12, linewidth=0, **own)
    _rounds(axes, ticks=10)


def over_seeds(label: str, fmt: LineStyle, seeds: Iterable[Sequence[tuple[Any, ...]]], window: int = 1) -> Curve:
    """The mean over seeds at the rounds that all have, in a band of one standard deviation.

    A seed has (round, value, …) by evaluation; `window` smooths each by a running mean, cut off at its ends.
    """
    each = pd.DataFrame({place: {one[0]: one[1] for one in seed} for place, seed in enumerate(seeds)}).dropna()
    each = each.sort_index().rolling(window, center=True, min_periods=1).mean()
    mean, sd = each.mean(axis=1), each.std(axis=1)
    band = list(zip(mean - sd, mean + sd, strict=True)) if each.shape[1] > 1 else []
    return Curve(label, fmt, list(zip(each.index, mean, strict=True)), band=band)


def by_class(lines: Sequence[Line], panels: Mapping[str, Sequence[Sequence[float]]], classes: Sequence[str]) -> Figure:
    """Shares of each class: bars for one run, dots for several; a panel has a value a run and class."""
    rows = np.arange(len(classes))
    several = len(lines) > 1
    with style.applied():
        width = WIDE if several or len(panels) > 1 else HALF
        canvas = style.new_figure(width, 0.9 + _row(classes) * len(classes) + 0.06 * several * len(lines))
        axes: Axes | None = None
        for place, (title, values) in enumerate(panels.items(), 1):
            axes = canvas.add_subplot(1, len(panels), place, sharey=axes, gid=inline.ALONG_Y)
            for line, shares in zip(lines, values, strict=True):
                scaled = 100 * np.array(shares, dtype=float)
                if several and len(scaled):
                    label = style.short(line.label, _LONGEST_LABEL)
                    dots = line.fmt | {"linestyle": "", "markersize": 6.5, "label": label}
                    axes.plot(scaled, rows, clip_on=False, **dots)
                elif len(scaled):
                    bars = axes.barh(rows, scaled, height=0.62, color=style.BLUE)
                    if len(classes) <= _MOST_NAMES:
                        axes.bar_label(bars, fmt="%.0f", padding=3, size=8, color=style.MUTED)
            axes.set_xlim(0, 100)
            axes.set_title(title)
            axes.grid(visible=several, axis="y")
            _name_classes(axes, classes)
        if several:
            style.legend(canvas, *_names(lines))
        return canvas


def over_rounds(panels: Mapping[str, pd.DataFrame], classes: Sequence[str], last: int) -> Figure:
    """Shares of each class as heat maps over the rounds, and beside them the mean of the last ones in per cent.

    A panel has a row a round and a column a class; a few rounds go to a cell, grey is none seen.
    """
    with style.applied():
        canvas = style.new_figure(WIDE, 0.9 + _row(classes) * len(classes))
        axes: Axes | None = None
        for place, (title, values) in enumerate(panels.items(), 1):
            axes = style.bare(canvas.add_subplot(1, len(panels), place, sharey=axes))
            size = -(-len(values) // _MOST_CELLS)
            cells = values.groupby(np.arange(len(values)) // size).mean().to_numpy().T
            first, final = values.index[0], values.index[-1]
            each = (final - first) / max(1, len(values) - 1) or 1
            extent = (first - each / 2, first + each * (size * cells.shape[1] - 0.5), len(cells) - 0.5, -0.5)
            shown = axes.imshow(100 * cells, "viridis", vmin=0, vmax=100, extent=extent, aspect="auto", rasterized=True)
            axes.set_facecolor(style.GRID)
            axes.xaxis.set_major_locator(MaxNLocator(8, steps=_TICKS, integer=True))
            axes.set_xlabel("round")
            axes.set_title(title)
            _name_classes(axes, classes)
            if len(classes) <= _MOST_NAMES:
                for row, value in enumerate(values.tail(last).mean()):
                    text = f"{100 * value:.0f}" if np.isfinite(value) else NOTHING
                    where: Any = ("axes fraction", "data")
                    axes.annotate(text, (1.01, row), xycoords=where, va="center", size=8, color=style.MUTED)
        canvas.colorbar(shown, ax=canvas.axes, label="%", fraction=0.03, pad=0.02).outline.set_visible(False)
        return canvas


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Where the images of each class end up: shares of a row, with the true class on the left."""
    table = np.array(counts, dtype=float)
    shares = 100 * table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    many = len(classes) > _MOST_NUMBERS
    with style.applied():
        side = 7.5 if many else 1.3 + max(3.2, 0.38 * len(classes))
        canvas = style.new_figure(side, side + 0.3)
        axes = style.bare(canvas.add_subplot())
        look: dict[str, Any] = {"cmap": "Blues", "edgecolor": "white", "linewidth": 0 if many else 1}
        axes.pcolormesh(shares, vmin=0, vmax=100, rasterized=many, gid=inline.MAP, **look)
        places = style.thinned(len(classes), _MOST_NAMES)
        names = [style.short(classes[place], _LONGEST_CLASS) for place in places]
        axes.set_yticks([place + 0.5 for place in places], names)
        axes.set_xticks([place + 0.5 for place in places], names, rotation=90)
        axes.set_ylim(len(classes), 0)
        if not many:
            write_values(axes, shares, "{:.0f}")
        canvas.suptitle("True class (row), prediction (column), % of row", x=0.01, ha="left", size=10)
        return canvas


def write_values(axes: Axes, values: np.ndarray, form: str, bold: Any = (), middle: float = 55) -> None:
    """The values of a map's cells, white where they are above `middle`; zeros are left out, NaN is a dash."""
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        text = NOTHING if np.isnan(value) else form.format(value)
        if text.strip("0."):
            colour = style.ON_DARK if value > middle else style.ON_LIGHT
            weight = "bold" if (row, column) in bold else "normal"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", size=8, color=colour, weight=weight)


def training(lines: Sequence[Line], leave_out: Sequence[str] = ()) -> Figure | None:
    """Every quantity that the methods recorded while training, each in a small panel; None without any."""
    tables = [numbers(line.metrics, "train").drop(columns=list(leave_out), errors="ignore") for line in lines]
    names = list(dict.fromkeys(str(name) for table in tables for name in table))
    if not names:
        return None
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    with style.applied():
        canvas = style.new_figure(WIDE, 2.1 * rows + 0.06 * len(lines))
        for place, name in enumerate(names, 1):
            axes = canvas.add_subplot(rows, columns, place)
            for line, table in zip(lines, tables, strict=True):
                if name in table:
                    _noisy(axes, table[name].dropna(), line.fmt, style.short(line.label, _LONGEST_LABEL))
            axes.set_title(style.short(name.replace("_", " "), _LONGEST_LABEL))
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=_TICKS))
            _rounds(axes, ticks=4)
        if len(lines) > 1:
            style.legend(canvas, *_names(lines, marker=""))
        return canvas


# --- pseudo labels -----------------------------------------------------------------------------------------
class Chart(NamedTuple):
    """A figure of pseudo labels, and how to read it."""

    figure: Figure
    title: str
    reading: str


class _Plot(NamedTuple):
    """Quantities of a trace in one figure, each with its name in the legend; several runs have the solid line alone."""

    title: str
    reading: str
    solid: tuple[str, str]
    dashed: tuple[str, str] = ("", "")
    dotted: tuple[str, str] = ("", "")
    band: tuple[str, str, str] = ("", "", "")
    shows: tuple[float, ...] = ()  # values that the axis includes in any case
    scale: float = 1


_PLOTS = (
    _Plot(
        "Reward d of C-reg",
        "By Eq. 3 it is above 0 where C-reg's step on pseudo labels lowered its loss on labels; it then adds to "
        "the weight of all pseudo labels. Below a dotted line the model's step is gradient ascent.",
        solid=("d_mean", "mean"),
        dotted=("ascent_below", "ascent below"),
        band=("d_lowest", "d_highest", "lowest to highest"),
        shows=(0.0,),
    ),
    _Plot(
        "Weights m of pseudo labels",
        "A narrow band means that pseudo labels count alike; without a band the weights are 0 or 1, "
        "and the mean is the share that counts.",
        solid=("weight_mean", "mean"),
        dashed=("weight_p50", "median"),
        band=("weight_p10", "weight_p90", "10 to 90 %"),
    ),
    _Plot(
        "Right pseudo labels, %",
        "Where the dashed line is above the solid one, the weights favour right pseudo labels over wrong ones.",
        solid=("pseudo_accuracy", "plain"),
        dashed=("pseudo_accuracy_weighted", "weighted by m"),
        dotted=("chance", "chance"),
        shows=(0.0,),
        scale=100,
    ),
    _Plot(
        "AUROC of m, right against wrong",
        "How often a right pseudo label weighs more than a wrong one, ties counting half: "
        "at 1 always, at 0.5 the weights cannot tell.",
        solid=("weight_auroc", "all clients"),
        dashed=("auroc_within", "within clients"),
        dotted=("cannot_tell", "cannot tell"),
        shows=(0.4, 0.6),
    ),
    _Plot(
        "Steps of gradient ascent, %",
        "In these steps d outweighs mean(m), so the model moves away from its pseudo labels.",
        solid=("ascent_share", "share of steps"),
        shows=(0.0, 10.0),
        scale=100,
    ),
    _Plot(
        "Losses while training",
        "The loss on pseudo labels, before weighting, says how far the model agrees with itself: "
        "it can be low where they are wrong.",
        solid=("loss", "labels"),
        dashed=("loss_unlabelled", "pseudo labels"),
        shows=(0.0,),
    ),
)
_QUANTITIES = {"pseudo_accuracy_per_class": "Right pseudo labels, %", "coverage_per_class": "Mean weight, %"}
_CLASSES_READING = (
    "How many of a class's pseudo labels are right, and their mean weight m (of a threshold: coverage); "
    f"numbers and dots are means of the last {LAST_ROUNDS} rounds."
)


def pseudo_labels(lines: Sequence[Line], classes: Sequence[str] = ()) -> list[Chart]:
    """Every figure for which a run has records that tell something; none where no run has pseudo labels."""
    traces = [(line, trace(line.metrics)) for line in lines]
    if not any("weight_mean" in found for _, found in traces):
        return []
    charts = []
    for plot in _PLOTS:
        shown = [(line, found) for line, found in traces if plot.solid[0] in found]
        if shown and not _is_constant(plot, [found for _, found in shown]):
            charts.append(Chart(_against_rounds(plot, shown), plot.title, plot.reading))
    sizes = {per_class(line.metrics, "coverage_per_class").shape[1] for line in lines} - {0}
    if len(sizes) == 1:
        names = class_names(classes, sizes.pop())
        tables = {title: [per_class(line.metrics, name) for line in lines] for name, title in _QUANTITIES.items()}
        if len(lines) == 1:
            figure = over_rounds({title: one for title, (one,) in tables.items()}, names, LAST_ROUNDS)
        else:
            means = {title: [one.tail(LAST_ROUNDS).mean().tolist() for one in each] for title, each in tables.items()}
            figure = by_class(lines, means, names)
        charts.append(Chart(figure, "Pseudo labels by true class", _CLASSES_READING))
    return charts


def _is_constant(plot: _Plot, traces: Sequence[pd.DataFrame]) -> bool:
    """Whether all that a plot would show is one value, as weights that are always 1."""
    drawn = [plot.solid[0]] if len(traces) > 1 else [plot.solid[0], plot.dashed[0], *plot.band[:2]]
    return len(np.unique([value for found in traces for value in found.filter(items=drawn).stack()])) <= 1


def _against_rounds(plot: _Plot, traces: Sequence[tuple[Line, pd.DataFrame]]) -> Figure:
    with style.applied():
        canvas = style.new_figure(HALF, 2.6 + 0.1 * len(traces))
        axes = canvas.add_subplot()
        longest = max((found for _, found in traces), key=len)
        if len(traces) > 1:
            for line, found in traces:
                _noisy(axes, plot.scale * found[plot.solid[0]], line.fmt, style.short(line.label, _LONGEST_LABEL))
            style.legend(canvas, *_names([line for line, _ in traces], marker=""))
        else:
            _noisy(axes, plot.scale * longest[plot.solid[0]], {"color": style.BLUE}, plot.solid[1])
            if plot.dashed[0] in longest:
                dashed = {"color": style.VERMILION, "linestyle": "--"}
                _noisy(axes, plot.scale * longest[plot.dashed[0]], dashed, plot.dashed[1])
            low, high, label = plot.band
            if low in longest and high in longest:
                axes.fill_between(longest.index, longest[low], longest[high], alpha=0.18, linewidth=0, label=label)
        if plot.dotted[0] in longest:
            level = plot.scale * running_mean(longest[plot.dotted[0]])
            axes.plot(level, ":", color=style.INK, linewidth=1.2, label=plot.dotted[1])
        if len(traces) == 1:
            style.legend(canvas, *reversed(axes.get_legend_handles_labels()))
        ends = [*axes.get_ylim(), *plot.shows]
        # The margin around the data must not suggest values that cannot be.
        axes.set_ylim(max(min(ends), 0.0) if axes.dataLim.y0 >= 0 else min(ends), max(ends))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
        _rounds(axes, ticks=5)
        return canvas


# --- why: who labels, and how far clients drift --------------------------------------------------------------
class Probed(NamedTuple):
    """Runs that differ in their seeds alone: the mean of what their probes found, by round."""

    row: str  # the panels in which it is drawn: its setting
    label: str
    fmt: LineStyle
    source: str  # whose labels it learns from: local, global, average; empty where it does not say
    values: pd.DataFrame


def probes(found: Sequence[Probed]) -> Figure:
    """A row a setting: right labels over rounds, how overconfident labels are, and what aggregation brings."""
    rows = list(dict.fromkeys(one.row for one in found))
    groups = [[one for one in found if one.row == row] for row in rows]
    with style.applied():
        canvas = style.new_figure(WIDE, 0.6 + sum(1.5 + 0.34 * len(group) for group in groups))
        panels = canvas.subplots(len(rows), 3, sharex="col", squeeze=False, width_ratios=[1.35, 1, 1.1])
        for (rounds, gaps, tests), row, group in zip(panels, rows, groups, strict=True):
            for place, one in enumerate(group):
                _draw_probed(rounds, gaps, tests, place, one)
            gaps.axvline(0, color=style.MUTED, linewidth=0.8)
            for axes in (gaps, tests):
                axes.set_ylim(len(group) - 0.5, -0.5)
                axes.set_yticks(range(len(group)), [""] * len(group))
                axes.tick_params(axis="y", length=0)
            names = [style.short(one.label, _LONGEST_LABEL).replace(", ", ",\n") for one in group]
            gaps.set_yticks(range(len(group)), names)
            for text, one in zip(gaps.get_yticklabels(), group, strict=True):
                text.set_color(one.fmt["color"])
            _rounds(rounds, ticks=5)
            rounds.set(xlabel="", ylabel=row)
        titles = ("Whose labels are right? %", "Who is too sure?", "What aggregation brings")
        units = ("round", "confidence − accuracy, points", "test accuracy, %: clients → aggregated")
        for top, bottom, title, unit in zip(panels[0], panels[-1], titles, units, strict=True):
            top.set_title(title)
            bottom.set_xlabel(unit)
        legend: dict[str, LineStyle] = {
            "the server's (averaged) model": {"marker": "o"},
            "a client's own model after its steps": {"linestyle": "--", "marker": "o", "markerfacecolor": "white"},
            "thick, large: the labels that the method learns from": {"linewidth": 3},
        }
        style.legend(canvas, legend, [Line2D([], [], color=style.INK, **fmt) for fmt in legend.values()])
    return canvas


def _draw_probed(rounds: Axes, gaps: Axes, tests: Axes, place: int, one: Probed) -> None:
    colour, values, means = one.fmt["color"], 100 * one.values, 100 * one.values.tail(LAST_PROBES).mean()
    tutor = "averaged" if "averaged_accuracy" in values and one.source != "global" else "global"
    for who, line, face in ((tutor, "-", colour), ("own", "--", "white")):
        used = one.source == {"own": "local", "averaged": "average"}.get(who, who)
        if f"{who}_accuracy" in values:
            found = running_mean(values[f"{who}_accuracy"])
            rounds.plot(found, line, color=colour, linewidth=2.6 if used else 1.1, alpha=1 if used else 0.75)
            gap = means[f"{who}_confidence"] - means[f"{who}_accuracy"]
            size = 10 if used else 6
            gaps.plot(gap, place, "o", color=colour, markerfacecolor=face, markersize=size, clip_on=False)
    before, after = means["test_clients"], means["test_aggregated"]
    tests.annotate("", (after, place), (before, place), arrowprops={"arrowstyle": "->", "color": colour})
    tests.plot(before, place, "o", color=colour, markerfacecolor="white", markersize=6)
    tests.plot(after, place, "o", color=colour, markersize=6)
    drift = f"drift {one.values['drift'].tail(LAST_PROBES).mean():.3f}"
    tests.annotate(drift, (1.02, place), xycoords=("axes fraction", "data"), va="center", size=8, color=style.MUTED)


def _noisy(axes: Axes, values: pd.Series, fmt: LineStyle, label: str) -> None:
    axes.plot(values, color=fmt["color"], linewidth=0.7, alpha=0.35, gid=inline.part_of(label))
    axes.plot(running_mean(values), color=fmt["color"], linestyle=fmt.get("linestyle", "-"), label=label)


def _rounds(axes: Axes, ticks: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=_TICKS, integer=True))
    axes.set_xlim(left=0, right=max(axes.dataLim.x1, 1) if np.isfinite(axes.dataLim.x1) else 1)
    axes.set_xlabel("round")


def _names(lines: Sequence[Line | Curve], **fmt: Any) -> tuple[list[str], list[Line2D]]:
    """Names and handles of a legend."""
    handles = [Line2D([], [], **line.fmt | fmt) for line in lines]
    return [style.short(line.label, _LONGEST_LABEL) for line in lines], handles


def _name_classes(axes: Axes, classes: Sequence[str]) -> None:
    places = style.thinned(len(classes), _MOST_NAMES)
    axes.set_yticks(places, [style.short(classes[place], _LONGEST_CLASS) for place in places])
    axes.tick_params(axis="y", length=0, pad=7)  # half a dot may lie before the axis
    axes.set_ylim(len(classes) - 0.5, -0.5)
    if not axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.tick_params(labelleft=False)


def _row(classes: Sequence[str]) -> float:
    """Inches of a class."""
    return 0.27 if len(classes) <= _MOST_NAMES else 8.0 / len(classes)
