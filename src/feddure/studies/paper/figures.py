"""Figures of the studies: ours beside the paper's numbers, curves, and lines along an axis."""

import statistics
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from feddure.reports import figures, frame, inline, style
from feddure.studies.paper.plan import STUDIES, method_name
from feddure.studies.paper.rows import Row, grids, panels, runs_of
from feddure.studies.plan import REFERENCE
from feddure.tracking.summary import display_name

OURS, PAPER = style.BLUE, style.VERMILION
SMOOTHED = 5
"""Evaluations in the running mean that figure 1 draws; single ones jump by several points from round to round."""

_WIDE = 10.4  # inches
_AXES = {
    "gamma": "Dirichlet coefficient γ (smaller is more unequal)",
    "labels": "labelled images, % of the training images",
    "clients_per_round": "clients in a round, S",
}
_KINDS = {
    "fedavg": "FedAvg*: one pass over labelled images",
    "fedavg-sl": "FedAvg-SL: fully supervised",
    "fedprox-sl": "FedProx-SL: fully supervised",
}


def figure(rows: Sequence[Row]) -> Figure:
    """The figure of a study's rows; data sets without a measurement are left out."""
    measured = {row.dataset for row in rows if row.seeds}
    rows = [row for row in rows if row.dataset in measured]
    with style.applied():
        if rows[0].study == "figure1":
            return _curves(rows)
        return _along_axis(rows) if STUDIES[rows[0].study].axis else _beside_paper(rows)


def _beside_paper(rows: Sequence[Row]) -> Figure:
    """A dot for ours and one for the paper's number, method by method."""
    chosen = grids(rows)
    heights = [0.9 + sum(0.13 + 0.15 * len(name.splitlines()) for name in map(_wrapped, one.names)) for one in chosen]
    canvas = style.new_figure(_WIDE, 0.6 + sum(heights))
    parts = canvas.subfigures(len(chosen), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, grid in zip(parts, chosen, strict=True):
        part.suptitle(f"{grid.title}, test accuracy in %", x=0.01, ha="left")
        panels = part.subplots(1, len(grid.columns), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (title, column) in zip(panels, grid.columns.items(), strict=True):
            _dots(axes, column)
            axes.set_title(title)
        panels[0].set_yticks(range(len(grid.names)), map(_wrapped, grid.names))
        panels[0].set_ylim(len(grid.names) - 0.4, -0.6)
    several = any(len(row.seeds) > 1 for row in rows)
    ours = f"ours, {frame.mean_of(runs_of(rows), True)}" + " ± standard deviation over seeds" * several
    formats: dict[str, dict[str, Any]] = {
        ours: {"marker": "o", "linestyle": "-" if several else "", "color": OURS},
        "the paper's number": {"marker": "D", "linestyle": "", "markerfacecolor": "none", "markeredgecolor": PAPER},
        "ours, labels only": {"linestyle": "--", "color": style.BLACK, "linewidth": 0.9},
    }
    canvas.legend(handles=[Line2D([], [], label=name, **fmt) for name, fmt in formats.items()],
                  loc="outside lower left", ncols=3)  # fmt: skip
    return canvas


def _dots(axes: Axes, column: Sequence[Row | None]) -> None:
    """Ours with its deviation, the paper's, and a thin line between them."""
    axes.set_gid(inline.ALONG_Y)
    for place, row in enumerate(column):
        if row is None:
            continue
        if row.name == "FedDure":
            axes.axhspan(place - 0.5, place + 0.5, color=OURS, alpha=0.07, linewidth=0)
        if row.last10 is not None and row.paper is not None:
            axes.plot([row.last10.mean, row.paper], [place, place], color=style.MUTED, linewidth=0.9, alpha=0.55)
        if row.paper is not None:
            # An empty diamond in front: both can be seen where they agree.
            diamond: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": PAPER, "label": "the paper's"}
            axes.plot(row.paper, place, "D", markersize=6.5, zorder=4, **diamond)
        if row.last10 is not None:
            dot: dict[str, Any] = {"fmt": "o", "markersize": 5, "color": OURS, "capsize": 2.5, "label": "ours"}
            axes.errorbar(row.last10.mean, place, xerr=row.last10.sd, **dot)
    # A row's own accuracies of labels-only training, or what rows without one are compared with.
    known = [row.accuracies if row.method == REFERENCE else row.reference for row in column if row is not None]
    labels_only = max(known, key=len, default={})
    if labels_only:
        mean = statistics.fmean(labels_only.values())
        axes.axvline(mean, color=style.BLACK, linestyle="--", linewidth=0.9, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(axis="y", length=0)


def _curves(rows: Sequence[Row]) -> Figure:
    """Accuracy against rounds: mean over seeds in a band of one standard deviation, the best at the end named first.

    Single evaluations jump by several points, so that ten raw curves would hide each other; the cells have them.
    """
    formats = _line_styles(rows)
    found = panels([row for row in rows if row.seeds], by_setting=True)
    canvas = style.new_figure(_WIDE, 4.6 * len(found))
    for axes, panel in zip(canvas.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        smooth = all(len(curve) > SMOOTHED for row in panel for curve in row.measured["curve"])
        curves = []
        for row in panel:
            fmt = formats[row.method] | ({"marker": ""} if smooth else {})
            window = SMOOTHED if smooth else 1
            curves.append(figures.over_seeds(_legend_name(row.method), fmt, row.measured["curve"], window))
        figures.draw_curves(axes, sorted(curves, key=lambda curve: -curve.points[-1][1]))
        axes.set_ylabel("test accuracy, %")
        drawn = f"running mean of {SMOOTHED} evaluations" if smooth else "each evaluation"
        axes.set_title(f"{_place(panel)}: {drawn}, {_over_seeds(panel)}")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=3.2)
    return canvas


def _along_axis(rows: Sequence[Row]) -> Figure:
    """Accuracy against what the study varies, one panel for each data set and setting."""
    axis, found = STUDIES[rows[0].study].axis, [panel for panel in panels(rows) if any(row.seeds for row in panel)]
    formats = _line_styles(rows)
    hollow = len({len(row.seeds) for row in rows if row.seeds}) > 1
    canvas = style.new_figure(max(_WIDE, 2.4 * len(found)), 5.2)
    for axes, panel in zip(canvas.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        axes.set_title(_place(panel))
        if axis == "clients_per_round":
            axes.set_xscale("log", base=2)
        values = sorted({row.value for row in panel if row.value is not None})
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(_AXES[axis])
        axes.set_ylabel("test accuracy, %")
        for method, fmt in formats.items():
            own = {row.value: row for row in panel if row.method == method}
            _line(axes, values, own, fmt | {"label": _legend_name(method)}, hollow)
    handles = [Line2D([], [], **fmt) for fmt in formats.values()]
    style.legend(canvas, map(_legend_name, formats), handles)
    note = f"{frame.mean_of(runs_of(rows), True)}; {_over_seeds(rows)}" + " (hollow: one seed)" * hollow
    canvas.suptitle(note.capitalize(), x=0.01, ha="left", fontsize=8, fontweight="normal", color=style.MUTED)
    return canvas


def _line(axes: Axes, values: Sequence[float], own: Mapping[Any, Row], fmt: style.LineStyle, hollow: bool) -> None:
    """A method along the axis with its deviations, broken where a point is not measured.

    A point of one seed has no deviation, and is hollow where others have more seeds.
    """
    found = [own[value].last10 if value in own else None for value in values]
    mean = np.array([np.nan if one is None else one.mean for one in found])
    sd = np.array([np.nan if one is None or one.sd is None else one.sd for one in found])
    axes.errorbar(values, mean, sd, capsize=3, elinewidth=1.0, **fmt)
    single = np.isnan(sd) & ~np.isnan(mean)
    if hollow and single.any():
        points = fmt | {"linestyle": "none", "markerfacecolor": "white", "zorder": 5, "label": ""}
        axes.plot(np.array(values)[single], mean[single], gid=inline.part_of(fmt["label"]), **points)


def _line_styles(rows: Sequence[Row]) -> dict[str, style.LineStyle]:
    """What the paper proposes stands out."""
    found = style.line_styles(row.method for row in rows)
    return {
        method: fmt | ({"linewidth": 2.4, "zorder": 4} if method == "feddure" else {}) for method, fmt in found.items()
    }


def _legend_name(method: str) -> str:
    """A method's name with what it learns from, where that is not the rule."""
    return _wrapped(_KINDS.get(method, method_name(method)))


def _wrapped(name: str) -> str:
    return fill(name, 42)


def _over_seeds(rows: Sequence[Row]) -> str:
    """What lines and bands are, in words."""
    seeds = sorted({len(row.seeds) for row in rows if row.seeds})
    if seeds == [1]:
        return "one seed"
    number = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"mean of {number} seeds ± standard deviation"


def _place(panel: Sequence[Row]) -> str:
    return f"{display_name(panel[0].dataset)}, {panel[0].setting.upper()}"
