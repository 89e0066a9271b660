"""The figures of the studies. A method has the same colour, line and marker in all of them.

Colour says what a method learns from; FedProx instead of FedAvg, and other changes of the same idea, are dashed.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from feddure import config
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition, external_imbalance, internal_imbalance, make
from feddure.studies import reproduce
from feddure.studies.paper_numbers import method_name, setting_name
from feddure.studies.reproduce_rows import REFERENCE, Row, mean_of
from feddure.studies.reproduce_tables import grids, panels
from feddure.tracking import bubbles, style
from feddure.tracking.figures import apart
from feddure.tracking.summary import spoken

OURS, PAPER = style.BLUE, style.VERMILION
SMOOTHED = 5
"""Evaluations in the running mean that figure 1 draws; single ones jump by several points from round to round."""

SHOWN_CLIENTS = 20
"""Clients in the picture of the partitions; its table has them all."""

_WIDE = 10.4  # inches
_LETTER = 0.066  # inches of a letter, about
_LOOKS: dict[str, dict[str, Any]] = {
    "feddure": {"color": style.BLUE, "marker": "o", "linewidth": 2.4, "zorder": 5},
    "fedmatch": {"color": style.VERMILION, "marker": "s"},
    "fedavg-fixmatch": {"color": style.GREEN, "marker": "^"},
    "fedprox-fixmatch": {"color": style.GREEN, "marker": "^", "linestyle": "--"},
    "fedavg-uda": {"color": style.PURPLE, "marker": "D"},
    "fedprox-uda": {"color": style.PURPLE, "marker": "D", "linestyle": "--"},
    "fedavg": {"color": style.BLACK, "marker": "v", "linewidth": 1.2},
    REFERENCE: {"color": style.BLACK, "marker": "v", "linestyle": "--", "linewidth": 1.2},
    "fedavg-sl": {"color": style.ORANGE, "marker": "P"},
    "fedprox-sl": {"color": style.ORANGE, "marker": "P", "linestyle": "--"},
}
_OTHER = {"color": style.SKY, "marker": "X"}  # methods of a user's own, and ablations
_KINDS = {
    "fedavg": "FedAvg*: labels only",
    REFERENCE: "FedAvg*: labels only, matched steps",
    "fedavg-sl": "FedAvg-SL: fully supervised",
    "fedprox-sl": "FedProx-SL: fully supervised",
}


def look(method: str, options: str = "") -> dict[str, Any]:
    """Colour, line and marker of a method; dotted where it changes something by options."""
    changed = {"linestyle": ":"} if options else {}
    return {"linestyle": "-", "linewidth": 1.6} | _LOOKS.get(method, _OTHER) | changed


def figure(rows: Sequence[Row]) -> Figure:
    """The figure of a study's rows: curves, lines along its axis, or ours beside the paper's."""
    if rows[0].study == "figure1":
        return curves(rows)
    return along_axis(rows) if reproduce.STUDIES[rows[0].study].axis else beside_paper(rows)


def beside_paper(rows: Sequence[Row]) -> Figure:
    """A dot for ours and one for the paper's number, method by method; data sets without a measurement are left out."""
    measured = {row.dataset for row in rows if row.measured}
    chosen = grids([row for row in rows if not measured or row.dataset in measured])
    longest = max((len(name) for grid in chosen for name in grid.names), default=0)
    left, top, row_height, head, foot = max(2.05, 0.3 + _LETTER * longest), 0.68, 0.27, 0.58, 0.42
    heights = [row_height * len(grid.names) for grid in chosen]
    with style.applied():
        canvas = style.new_figure(_WIDE, top + sum(heights) + (head + foot) * len(chosen))
        up = canvas.get_size_inches()[1]
        drawn = [row for grid in chosen for line in grid.entries for row in line if row is not None]
        beside = ", ours beside the paper's" if any(row.paper is not None for row in drawn) else ""
        _write(canvas, 0.12, f"Test accuracy in %{beside}", size=12, weight="bold")
        _legend_of_dots(canvas, drawn)
        bottom = up - top
        for grid, height in zip(chosen, heights, strict=True):
            bottom -= head + height
            _write(canvas, up - bottom - height - 0.26, grid.title, size=11, weight="bold")
            width = (_WIDE - left - 0.2) / len(grid.columns)
            limits = _limits([row for line in grid.entries for row in line if row is not None])
            for column, setting in enumerate(grid.columns):
                axes = style.inches(canvas, left + column * width, bottom, width - 0.25, height)
                _dots(axes, [line[column] for line in grid.entries], limits)
                axes.set_title(setting, fontsize=9, pad=4)
                axes.set_yticks(range(len(grid.names)), [_plain(name) if column == 0 else "" for name in grid.names])
                for place, name in enumerate(grid.names):
                    if name == "FedDure":
                        axes.get_yticklabels()[place].set_fontweight("bold")
                        axes.axhspan(place - 0.5, place + 0.5, color=OURS, alpha=0.07, linewidth=0)
            bottom -= foot
    return canvas


def curves(rows: Sequence[Row]) -> Figure:
    """Accuracy against rounds: mean over seeds in a band of one standard deviation, named at the curves' ends.

    Single evaluations jump by several points, so that ten raw curves would hide each other; the CSV file has them.
    """
    found = [[row for row in rows if (row.dataset, row.setting) == place and row.measured] for place in _places(rows)]
    found = [panel for panel in found if panel] or [[]]
    longest = max((len(_in_words(row.method, row.options)) for panel in found for row in panel), default=0)
    height, below, right = 4.6, 0.5, max(2.75, 0.35 + _LETTER * longest)
    with style.applied():
        canvas = style.new_figure(_WIDE, len(found) * (height + below))
        for number, panel in enumerate(found):
            bottom = below + (len(found) - 1 - number) * (height + below)
            axes = style.inches(canvas, 0.7, bottom, _WIDE - 0.7 - right, height - 0.35)
            if not panel:
                _say_nothing_measured(axes)
                continue
            ends = []
            smooth = all(len(row.measured[seed].curve) > SMOOTHED for row in panel for seed in row.seeds)
            for row in panel:
                rounds, values = seed_curves(row)
                values = _smooth(values) if smooth else values
                mean = values.mean(axis=0)
                shown = look(row.method, row.options) | ({"marker": ""} if smooth else {"clip_on": False})
                axes.plot(rounds, mean, **shown)
                if len(values) > 1:
                    spread = values.std(axis=0, ddof=1)
                    axes.fill_between(
                        rounds, mean - spread, mean + spread, color=shown["color"], alpha=0.12, linewidth=0
                    )
                ends.append((row, rounds[-1], mean[-1]))
            axes.set_xlim(0, max(last for _, last, _ in ends))
            axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
            axes.set_xlabel("round")
            axes.set_ylabel("test accuracy, %")
            _name_ends(axes, ends, height - 0.35)
            place = f"{spoken(panel[0].dataset)}, {setting_name(panel[0].setting)}"
            drawn = f"running mean of {SMOOTHED} evaluations" if smooth else "each evaluation"
            axes.set_title(f"{place}: {drawn}, {_over_seeds(panel)}")
    return canvas


def along_axis(rows: Sequence[Row]) -> Figure:
    """Accuracy against what the study varies, one panel for each data set and setting."""
    study = reproduce.STUDIES[rows[0].study]
    found = panels(rows)
    width = _WIDE / max(len(found), 2)
    methods = list(dict.fromkeys((row.method, row.options) for row in rows))
    names = [_in_words(*method) for method in methods]
    across = int((width * len(found) - 0.6) / (0.6 + _LETTER * max(map(len, names))))
    across = min(max(across, 1), 4)  # names beside each other
    height, bottom = 4.1, 0.95 + 0.2 * math.ceil(len(names) / across)
    with style.applied():
        canvas = style.new_figure(width * len(found), height + bottom)
        for number, panel in enumerate(found):
            axes = style.inches(canvas, width * number + 0.65, bottom, width - 0.95, height - 0.35)
            axes.set_title(f"{spoken(panel[0].dataset)}, {setting_name(panel[0].setting)}")
            if study.axis == "clients_per_round":
                axes.set_xscale("log", base=2)
            values = sorted({row.value for row in panel if row.value is not None})
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.xaxis.set_minor_locator(NullLocator())
            if not any(row.measured for row in panel):
                _say_nothing_measured(axes)
            for method, options in methods:
                own = [row for row in panel if (row.method, row.options) == (method, options) and row.measured]
                _line(axes, own, values)
            axes.set_xlabel(_AXES[study.axis])
            axes.set_ylabel("test accuracy, %")
            axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        handles = [Line2D([], [], markersize=5, **look(*method)) for method in methods]
        corner = (0.3 / (width * len(found)), 0.28 / (height + bottom))
        canvas.legend(handles, names, loc="lower left", bbox_to_anchor=corner, ncols=across, handlelength=3.2)
        setting = " and names no setting" if rows[0].study == "clients" else ""
        drawn = [row for row in rows if row.measured]
        each = f"{mean_of(drawn)}; " if drawn else ""
        seeds = f"{each}{_over_seeds(drawn)}"
        note = f"{seeds[:1].upper()}{seeds[1:]}. The paper prints no numbers for this chart{setting}."
        canvas.text(0.65 / (width * len(found)), 0.12 / (height + bottom), note, color=style.MUTED, fontsize=8)
    return canvas


def partitions(dataset: Dataset, clients: int = 100, seed: int = 0) -> Figure:
    """Who owns what: FedMatch's Batch-NonIID above, the paper's DIR-DIR below; labelled images left of the others."""
    shown = min(SHOWN_CLIENTS, clients)
    classes = len(dataset.classes)
    left, width, height, gap = 0.35 + 0.075 * max(map(len, dataset.classes)), 4.2, 0.3 * classes, 1.35
    across = 2 * (left + width) + 0.35
    with style.applied():
        canvas = style.new_figure(across, 0.5 + 2 * (height + gap))
        up = canvas.get_size_inches()[1]
        few = f", the first {shown} of {clients} clients" if shown < clients else f", {clients} clients"
        heading = f"{spoken(dataset.name)}{few}, seed {seed}: a bubble's area is its number of images"
        _write(canvas, 0.12, heading, size=12, weight="bold")
        for row, (setting, title) in enumerate(DEALT.items()):
            dealt = deal(dataset, setting, clients, seed)
            bottom = up - 0.45 - (row + 1) * (height + gap) + 0.5
            inside, outside = imbalances(dealt, dataset)
            measures = f"internal imbalance {inside:.2f}, external imbalance {outside:.2f}"
            _write(canvas, up - bottom - height - 0.78, title, size=11, weight="bold")
            _write(canvas, up - bottom - height - 0.54, measures, color=style.MUTED)
            for column, counts in enumerate(dealt.counts(dataset.labels, classes)):
                axes = style.inches(canvas, left + column * (left + width), bottom, width, height)
                kind, colour = (("Labelled", style.LABELLED), ("Unlabelled", style.UNLABELLED))[column]
                axes.set_title(kind, color=colour)
                axes.set_yticks(range(classes), dataset.classes)
                axes.tick_params(length=0)
                bubbles.draw(axes, counts[:shown], colour)
                axes.set_xticks(range(0, shown, 2 if shown > 10 else 1))
                axes.set_xlabel("client")
    return canvas


DEALT = {"fedmatch": "FedMatch, Batch-NonIID", "dir-dir": "The paper, DIR-DIR"}
"""The settings in the picture of the partitions."""


def deal(dataset: Dataset, setting: str, clients: int = 100, seed: int = 0) -> Partition:
    """The partition that experiments of this setting and seed train on."""
    changes = {"partition.setting": setting, "partition.clients": clients, "clients_per_round": 1}
    return make(dataset, config.load(changes=changes).partition, seed)


def imbalances(partition: Partition, dataset: Dataset) -> tuple[float, float]:
    """Internal and external; 0 is none, 1 the most."""
    classes = len(dataset.classes)
    inside = internal_imbalance(partition, dataset.labels, classes)
    outside = external_imbalance(partition, dataset.labels, classes)
    return inside or 0.0, outside or 0.0


def seed_curves(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and accuracies in per cent [seed, round] at the rounds that all seeds have."""
    each = [{number: 100 * share for number, share, _ in row.measured[seed].curve} for seed in row.seeds]
    rounds = sorted(set.intersection(*(set(found) for found in each)))
    return np.array(rounds), np.array([[found[number] for number in rounds] for found in each])


def _smooth(values: np.ndarray) -> np.ndarray:
    """Means over a window around each evaluation, cut off at the ends."""
    places, half = np.arange(values.shape[1]), SMOOTHED // 2
    first, beyond = np.maximum(places - half, 0), np.minimum(places + half + 1, values.shape[1])
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return (sums[:, beyond] - sums[:, first]) / (beyond - first)


_AXES = {
    "gamma": "Dirichlet coefficient γ (smaller is more unequal)",
    "labels": "labelled images, % of the training images",
    "clients_per_round": "clients in a round, S",
}


def _line(axes: Axes, own: Sequence[Row], values: Sequence[float]) -> None:
    """A method along the axis; broken where a point is not measured, with a bar where a band would have no width."""
    found = {row.value: row.last10 for row in own if row.last10 is not None}
    if not found:
        return
    shown = look(own[0].method, own[0].options)
    spreads = [found.get(value) for value in values]
    mean = np.array([np.nan if spread is None else spread.mean for spread in spreads])
    deviation = np.array([0.0 if spread is None else spread.deviation or 0.0 for spread in spreads])
    axes.plot(values, mean, markersize=5, **shown)
    axes.fill_between(values, mean - deviation, mean + deviation, color=shown["color"], alpha=0.13, linewidth=0)
    beside = np.concatenate([[np.nan], mean, [np.nan]])
    lonely = np.isnan(beside[:-2]) & np.isnan(beside[2:]) & (deviation > 0)
    if lonely.any():
        at, middle = np.array(values)[lonely], mean[lonely]
        axes.errorbar(at, middle, deviation[lonely], fmt="none", ecolor=shown["color"], elinewidth=1.2, capsize=3)


def _dots(axes: Axes, column: Sequence[Row | None], limits: tuple[float, float]) -> None:
    """Ours with its deviation, the paper's, and a thin line between them."""
    for place, row in enumerate(column):
        if row is None:
            continue
        if row.last10 is not None and row.paper is not None:
            axes.plot([row.last10.mean, row.paper], [place, place], color=style.MUTED, linewidth=0.9, alpha=0.55)
        if row.paper is not None:
            # An empty diamond in front: both can be seen where they agree.
            axes.plot(row.paper, place, "D", markersize=6.5, markerfacecolor="none", markeredgecolor=PAPER, zorder=4)
        if row.last10 is not None:
            axes.errorbar(
                row.last10.mean, place, xerr=row.last10.deviation, fmt="o", markersize=5, color=OURS, capsize=2.5
            )
    labels_only = _labels_only(column)
    if labels_only is not None:
        axes.axvline(labels_only, color=style.BLACK, linestyle="--", linewidth=0.9, zorder=1)
    axes.set_xlim(*limits)
    axes.set_ylim(len(column) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=True)


def _labels_only(rows: Sequence[Row | None]) -> float | None:
    """Accuracy of labels-only training with as many steps: a row's own, or what rows without one are compared with."""
    known = [row.accuracies if row.method == REFERENCE else row.reference for row in rows if row is not None]
    most = max(known, key=len, default={})
    return statistics.fmean(most.values()) if most else None


def _legend_of_dots(canvas: Figure, rows: Sequence[Row]) -> None:
    """What dots, diamonds and lines are, of those that are there."""
    across, up = canvas.get_size_inches()
    several = any(len(row.seeds) > 1 for row in rows)
    ours = f"ours, {mean_of(rows)}" + (" ± standard deviation over seeds" if several else "")
    diamond: dict[str, Any] = {"marker": "D", "linestyle": "", "markerfacecolor": "none", "markeredgecolor": PAPER}
    dashed: dict[str, Any] = {"linestyle": "--", "color": style.BLACK, "linewidth": 0.9}
    handles = []
    if any(row.measured for row in rows):
        handles.append(Line2D([], [], marker="o", linestyle="-" if several else "", color=OURS, label=ours))
    if any(row.paper is not None for row in rows):
        handles.append(Line2D([], [], label="the paper's number", **diamond))
    if _labels_only(rows) is not None:
        handles.append(Line2D([], [], label="ours, labels only with matched steps", **dashed))
    canvas.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.05 / across, 1 - 0.36 / up),
        ncols=3,
        borderpad=0,
    )


def _name_ends(axes: Axes, ends: list[tuple[Row, float, float]], height: float) -> None:
    """Each method's name beside the end of its curve, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[2])
    wanted = [(value - low) / (high - low) for *_, value in ends]
    for (row, last, value), place in zip(ends, apart(wanted, 0.185 / height), strict=True):
        colour = look(row.method)["color"]
        axes.annotate(
            _in_words(row.method, row.options),
            xy=(last, value),
            xytext=(1.035, place),
            textcoords=axes.transAxes,
            va="center",
            size=8.5,
            color=colour if colour != style.ORANGE else "#9a6a00",  # text needs more contrast than lines
            weight="bold" if row.method == "feddure" else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 1.0,
                "linestyle": look(row.method, row.options)["linestyle"],
                "shrinkA": 1,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
        )


def _in_words(method: str, options: str) -> str:
    """A method's name with what it learns from, where that is not the rule."""
    return _plain(_KINDS.get(method, method_name(method)) + (f", {options}" if options else ""))


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib would read a formula


def _over_seeds(rows: Sequence[Row]) -> str:
    """What lines and bands are, in words."""
    seeds = sorted({len(row.seeds) for row in rows})
    if not seeds:
        return "nothing is measured yet"
    if seeds == [1]:
        return "one seed"
    number = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"mean of {number} seeds ± standard deviation"


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    values = [row.paper for row in rows if row.paper is not None]
    for row in rows:
        if row.last10 is not None:
            around = row.last10.deviation or 0.0
            values += [row.last10.mean - around, row.last10.mean + around]
    if not values:
        return 0.0, 100.0
    margin = 0.06 * (max(values) - min(values)) + 0.5
    return min(values) - margin, max(values) + margin


def _places(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.dataset, row.setting) for row in rows))


def _say_nothing_measured(axes: Axes) -> None:
    axes.set_yticks([])
    axes.grid(False)
    axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", va="center", color=style.MUTED)


def _write(canvas: Figure, down: float, text: str, **look: Any) -> None:
    """A line of text this far below the top, in inches."""
    across, up = canvas.get_size_inches()
    canvas.text(0.12 / across, 1 - down / up, text, va="top", **look)
