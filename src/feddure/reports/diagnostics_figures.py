"""Figures of what pseudo labels were worth and of what the regulators made of them.

Few clients take part in a round, so rounds are noisy: faint lines are single rounds, strong ones running means.
A figure exists only where a method records what it shows; one without a reward d has none of d.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator

from feddure.reports import style
from feddure.reports.diagnostics_summary import (
    LAST_ROUNDS,
    Trace,
    class_names,
    findings,
    known_mean,
    per_class,
    running_mean,
    short,
    trace,
)
from feddure.reports.figures import Runs, look
from feddure.tracking.summary import NOTHING

_WIDE, _HALF = 9.6, 4.7  # inches: a whole row of the report, and half of one
_COLUMNS = 3  # of panels, and of runs' names
_LINE = 0.16  # inches between two lines of small text
_MOST_NAMES = 30  # classes that are all named, with their numbers
_MOST_CELLS = 50  # of a heat map over the rounds
_TICKS = [1, 2, 5, 10]
_TIGHT = {"borderpad": 0, "borderaxespad": 0, "labelspacing": 0.35, "columnspacing": 1.4, "handlelength": 1.8}


class Chart(NamedTuple):
    """A figure, what it says of its only run, and how to read it."""

    figure: Figure
    title: str
    finding: str
    reading: str


class _Plot(NamedTuple):
    """Quantities of a trace in one figure, each with its name in the legend."""

    title: str
    reading: str
    solid: tuple[str, str]
    dashed: tuple[str, str] = ("", "")
    dotted: tuple[str, str] = ("", "")
    band: tuple[str, str, str] = ("", "", "")
    dashed_colour: str = ""  # of a line in its own right, not one to compare with
    shows: tuple[float, ...] = ()  # values that the axis includes in any case
    share: bool = False  # between 0 and 1, shown in per cent
    overlaid: bool = False  # several runs share one panel, without the dashed line


_PLOTS = {
    "reward": _Plot(
        "Reward d of C-reg",
        "By Eq. 3 it is above 0 where C-reg's step on pseudo labels lowered its loss on labels; it then adds to "
        "the weight of all pseudo labels. Below a dotted line the model's step is gradient ascent.",
        solid=("d_mean", "mean"),
        dotted=("ascent_below", "ascent below"),
        band=("d_lowest", "d_highest", "lowest to highest"),
        shows=(0.0,),
    ),
    "weights": _Plot(
        "Weights m of pseudo labels",
        "A narrow band means that pseudo labels count alike; without a band the weights are 0 or 1, "
        "and the mean is the share that counts.",
        solid=("weight_mean", "mean"),
        dashed=("weight_p50", "median"),
        band=("weight_p10", "weight_p90", "10 to 90 %"),
    ),
    "accuracy": _Plot(
        "Right pseudo labels",
        "Where the dashed line is above the solid one, the weights favour right pseudo labels over wrong ones.",
        solid=("pseudo_accuracy", "plain"),
        dashed=("pseudo_accuracy_weighted", "weighted by m"),
        dotted=("chance", "chance"),
        shows=(0.0,),
        share=True,
    ),
    "separation": _Plot(
        "AUROC of m, right against wrong",
        "How often a right pseudo label weighs more than a wrong one, ties counting half: "
        "at 1 always, at 0.5 the weights cannot tell.",
        solid=("weight_auroc", "all clients"),
        dashed=("auroc_within", "within clients"),
        dotted=("cannot_tell", "cannot tell"),
        shows=(0.4, 0.6),
        overlaid=True,
    ),
    "ascent": _Plot(
        "Steps of gradient ascent",
        "In these steps d outweighs mean(m), so the model moves away from its pseudo labels.",
        solid=("ascent_share", "share of steps"),
        shows=(0.0, 0.1),
        share=True,
        overlaid=True,
    ),
    "losses": _Plot(
        "Losses while training",
        "The loss on pseudo labels, before weighting, says how far the model agrees with itself: "
        "it can be low where they are wrong.",
        solid=("loss", "labels"),
        dashed=("loss_unlabelled", "pseudo labels"),
        dashed_colour=style.UNLABELLED,
        shows=(0.0,),
    ),
}
_CLASSES_TITLE = "Pseudo labels by true class"
_QUANTITIES = {"pseudo_accuracy_per_class": "right pseudo labels", "coverage_per_class": "mean weight"}
_CLASSES_READING = "How many of a class's pseudo labels are right, and their mean weight m (of a threshold: coverage)"
_HEAT_READING = f"; bright is much, grey is none seen, and numbers are per cent in the last {LAST_ROUNDS} rounds."
_DOTS_READING = f", in the last {LAST_ROUNDS} rounds."


def draw(runs: Runs, classes: Sequence[str] = ()) -> list[Chart]:
    """Every figure for which a run has records; none where no run has pseudo labels."""
    traces = {label: trace(metrics) for label, metrics in runs.items()}
    if not any("weight_mean" in found for found in traces.values()):
        return []
    colours = {label: str(look(place)["color"]) for place, label in enumerate(runs)}
    said = findings(next(iter(runs.values())), classes) if len(runs) == 1 else {}
    charts = []
    for name, plot in _PLOTS.items():
        shown = {label: found for label, found in traces.items() if plot.solid[0] in found}
        if shown:
            figure = _against_rounds(plot, shown, colours)
            charts.append(Chart(figure, plot.title, said.get(name, ""), plot.reading))
    sizes = {per_class(metrics, "coverage_per_class").shape[1] for metrics in runs.values()} - {0}
    if len(sizes) == 1:
        figure = _by_class(runs, class_names(classes, sizes.pop()))
        reading = _CLASSES_READING + (_HEAT_READING if len(runs) == 1 else _DOTS_READING)
        charts.append(Chart(figure, _CLASSES_TITLE, said.get("classes", ""), reading))
    return charts


# --- pictures ----------------------------------------------------------------------------------------------
def _against_rounds(plot: _Plot, traces: Mapping[str, Trace], colours: Mapping[str, str]) -> Figure:
    """One panel for one run; for several a panel each, or one for all where they are overlaid."""
    single, together = len(colours) == 1, plot.overlaid and len(colours) > 1
    groups = [list(traces)] if together else [[label] for label in traces]
    columns = 1 if single or together else min(max(len(groups), 2), _COLUMNS)
    width, height, rows = _HALF if single else _WIDE, 1.85, -(-len(groups) // columns)
    top = 0.15 + _LINE * (-(-(len(traces) + 1) // _COLUMNS) if together else 1)
    with style.applied():
        canvas = style.new_figure(width, top + rows * height)
        panels: list[Axes] = []
        for index, labels in enumerate(groups):
            row, column = divmod(index, columns)
            left, room = 0.6 + column * width / columns, height - (0.5 if columns == 1 else 0.7)
            panels.append(style.inches(canvas, left, (rows - 1 - row) * height + 0.45, width / columns - 0.8, room))
            for label in labels:
                _paint(panels[-1], plot, traces[label], colours[label], short(label) if together else "")
            longest = traces[max(labels, key=lambda label: len(traces[label]["round"]))]
            if plot.dotted[0] in longest:
                _mean_line(panels[-1], longest, *plot.dotted, color=style.INK, linewidth=1.2, linestyle=":")
            if columns > 1:
                panels[-1].set_title(short(labels[0]), size=8.5, weight="normal")
            panels[-1].set_xlabel("round" if index + columns >= len(groups) else "")
        _same_limits(panels, plot)
        legend = _legend(canvas, panels)
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            if columns > 1 and handle is not None and text.get_text() in (plot.solid[1], plot.band[2]):
                handle.set(color=style.MUTED, alpha=0.25 if text.get_text() == plot.band[2] else 1)  # of any run
        return canvas


def _paint(axes: Axes, plot: _Plot, found: Trace, colour: str, run: str) -> None:
    """The lines of a run; where it shares the panel with others, only its own line under its name."""
    faint: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.4}
    axes.plot(found["round"], found[plot.solid[0]], color=colour, **faint)
    _mean_line(axes, found, plot.solid[0], run or plot.solid[1], color=colour, linewidth=1.7, clip_on=False)
    if plot.dashed[0] in found and not run:
        _mean_line(axes, found, *plot.dashed, color=plot.dashed_colour or style.INK, linewidth=1.3, linestyle="--")
        if plot.dashed_colour:
            axes.plot(found["round"], found[plot.dashed[0]], color=plot.dashed_colour, **faint)
    if plot.band[0] in found:
        low, high, name = found[plot.band[0]], found[plot.band[1]], plot.band[2]
        axes.fill_between(found["round"], low, high, color=colour, alpha=0.18, linewidth=0, label=name)


def _mean_line(axes: Axes, found: Trace, quantity: str, name: str, **looks: Any) -> None:
    axes.plot(found["round"], running_mean(found[quantity]), label=name, **looks)


def _same_limits(panels: Sequence[Axes], plot: _Plot) -> None:
    """One scale for all panels, so that runs can be compared."""
    ends = [end for axes in panels for end in axes.get_ylim()] + list(plot.shows)
    # The margin around the data must not suggest values that cannot be.
    low = max(min(ends), 0.0) if all(axes.dataLim.y0 >= 0 for axes in panels) else min(ends)
    high = min(max(ends), 1.01) if plot.share else max(ends)
    last = max(axes.dataLim.x1 for axes in panels)
    for axes in panels:
        axes.set(xlim=(0, last), ylim=(low, high))
        if low < 0:
            axes.axhline(0, color=style.MUTED, linewidth=0.8)
        axes.tick_params(left=False, bottom=False)  # the grid shows the same, in less room
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICKS, integer=True))
        if plot.share:
            axes.yaxis.set_major_formatter(style.PercentTicks())


def _legend(canvas: Figure, panels: Sequence[Axes]) -> Legend:
    """What the lines of all panels are, at the top."""
    across, up = canvas.get_size_inches()
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    place, columns = (0.1 / across, 1 - 0.08 / up), 4 if len(found) <= 4 else _COLUMNS
    handles, names = list(found.values()), list(found)
    return canvas.legend(handles, names, loc="upper left", bbox_to_anchor=place, ncols=columns, **_TIGHT)


def _by_class(runs: Runs, classes: Sequence[str]) -> Figure:
    """Accuracy and weight of each class: over the rounds of one run, or of several runs in their colours."""
    row = 0.24 if len(classes) <= _MOST_NAMES else 6.0 / len(classes)
    shown = range(0, len(classes), -(-len(classes) // _MOST_NAMES))
    left, height = 0.3 + 0.075 * max(map(len, classes)), row * len(classes)
    top = 0.3 + (0.1 + _LINE * -(-len(runs) // _COLUMNS) if len(runs) > 1 else 0)
    across = (_WIDE - left - 0.1) / 2
    with style.applied():
        canvas = style.new_figure(_WIDE, top + height + 0.45)
        panels = [style.inches(canvas, left + side * across, 0.45, across - 0.6, height) for side in (0, 1)]
        for axes, (quantity, title) in zip(panels, _QUANTITIES.items(), strict=True):
            for place, (label, metrics) in enumerate(runs.items()):
                values = per_class(metrics, quantity)
                if values.size and len(runs) == 1:
                    _heat(axes, values, [record["round"] for record in metrics], numbers=len(classes) <= _MOST_NAMES)
                elif values.size:
                    dots = known_mean(values[-LAST_ROUNDS:])
                    axes.plot(
                        dots,
                        range(len(dots)),
                        linestyle="",
                        markersize=6,
                        clip_on=False,
                        label=short(label),
                        **look(place),
                    )
            if len(runs) > 1:
                axes.set_xlim(0, 1)
                axes.xaxis.set_major_formatter(style.PercentTicks())
            axes.set_yticks(shown, [classes[place] for place in shown] if axes is panels[0] else [""] * len(shown))
            axes.set_ylim(len(classes) - 0.5, -0.5)
            axes.tick_params(left=False, bottom=False)
            axes.tick_params(axis="y", pad=7 if len(runs) > 1 else 3.5)  # half a dot may lie before the axis
            axes.set_title(title, size=8.5, weight="normal")
        _legend(canvas, panels)
        return canvas


def _heat(axes: Axes, values: np.ndarray, rounds: Sequence[int], numbers: bool) -> None:
    """Classes over rounds, a few rounds to a cell, and the mean of the last ones beside each row."""
    size = -(-len(values) // _MOST_CELLS)
    cells = np.array([known_mean(values[start : start + size]) for start in range(0, len(values), size)]).T
    extent = (rounds[0] - 0.5, rounds[0] - 0.5 + size * cells.shape[1], len(cells) - 0.5, -0.5)
    looks: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis", "rasterized": True}
    axes.imshow(cells, vmin=0, vmax=1, extent=extent, **looks)
    axes.set_facecolor(style.GRID)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("round")
    for place, value in enumerate(known_mean(values[-LAST_ROUNDS:]) if numbers else ()):
        text = f"{100 * value:.0f}" if np.isfinite(value) else NOTHING
        axes.annotate(text, (1.015, place), xycoords=("axes fraction", "data"), va="center", size=8, color=style.MUTED)
