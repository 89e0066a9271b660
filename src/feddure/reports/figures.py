"""The figures of a report, drawn from plain records.

Functions that compare take `runs`, a mapping from a run's label to its records; a run's place in it is its
colour in every figure. An averaged model (server.ema) is dashed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition
from feddure.reports import partition_figure as bubbles
from feddure.reports import style
from feddure.tracking.records import Record
from feddure.tracking.summary import evaluations

Runs = Mapping[str, Sequence[Record]]

MOST_LABELS = 12
"""Runs named at the ends of their curves; more are named in a legend below."""

_WIDE, _HALF = 9.6, 4.7  # inches: a whole row of the report, and half of one
_MARKERS = "os^Dv"
_LONGEST_LABEL, _LONGEST_CLASS = 40, 18
_STEPS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))
_TICKS = [1, 2, 2.5, 5, 10]
_MOST_NUMBERS = 20  # classes whose confusion is also written out
_LINE = 0.17  # inches between two lines of small text
_CONFUSION_TITLE = 4.1  # inches of that figure's title
_CLEAR_OF_DOTS = 7.0  # points between class names and the axis, where half a dot may lie

# matplotlib writes a bubble as eight curves from its top through its bottom.
_CIRCLE = re.compile(
    r'<path d="M (?P<x>\S+) (?P<top>\S+) \n(?:C [-\d. ]+\n){3}C (?:\S+ ){4}(?P=x) (?P<bottom>\S+) \n'
    r'(?:C [-\d. ]+\n){4}z\n"(?= style=)'
)


def look(place: int) -> dict[str, Any]:
    """Colour and marker of the run in this place; beyond the palette colours repeat with another marker."""
    again, colour = divmod(place, len(style.PALETTE))
    return {"color": style.PALETTE[colour], "marker": _MARKERS[again % len(_MARKERS)]}


def svg(figure: Figure) -> str:
    """The figure as SVG, a fraction of matplotlib's size: no invisible digits, and circles as circles."""
    text = style.render(figure, "svg").decode()
    text = re.sub(r'(?<= d=")[^"]+', _shorter, text[text.index("<svg") :])
    return _CIRCLE.sub(_circle, text)


def accuracy(runs: Runs) -> Figure:
    """Test accuracy against rounds."""
    with style.applied():
        canvas, axes = _curves(runs, "accuracy", "Test accuracy", height=3.9)
        axes.yaxis.set_major_formatter(style.PercentTicks())
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]), top=min(1.0, axes.get_ylim()[1]))
        return canvas


def loss(runs: Runs) -> Figure:
    """Test loss against rounds."""
    with style.applied():
        return _curves(runs, "loss", "Test loss (mean cross entropy)", height=3.2)[0]


def per_class(runs: Runs, classes: Sequence[str]) -> Figure:
    """Accuracy of each class at the last evaluation: bars for one run, dots in their colours for several."""
    found = {label: evaluations(metrics, "per_class") for label, metrics in runs.items()}
    classes = [_short(name, _LONGEST_CLASS) for name in classes]
    several = len(runs) > 1
    width, row = (_WIDE, 0.27) if several else (_HALF, 0.42)
    legend = _legend_height(runs) if several else 0.0
    left, height = 0.35 + 0.075 * max(map(len, classes)), row * len(classes)
    with style.applied():
        canvas = style.new_figure(width, 0.85 + height + legend)
        axes = style.inches(canvas, left, 0.35 + legend, width - left - 0.45, height)
        rows = np.arange(len(classes))
        for place, (label, values) in enumerate(found.items()):
            if values and several:
                name = _short(label, _LONGEST_LABEL)
                axes.plot(
                    values[-1][1],
                    rows,
                    linestyle="",
                    markersize=6.5,
                    label=name,
                    clip_on=False,
                    **look(place),
                )
            elif values:
                _class_bars(axes, rows, values[-1][1])
        axes.set_yticks(rows, classes)
        axes.set_ylim(len(classes) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(style.PercentTicks())
        axes.tick_params(axis="y", length=0, pad=_CLEAR_OF_DOTS)
        axes.grid(visible=several, axis="y")
        _title(canvas, "Accuracy of each class, last evaluation")
        if several:
            _legend_below(axes, drop=0.4 / height)
        return canvas


def class_history(metrics: Sequence[Record], classes: Sequence[str]) -> Figure:
    """Accuracy of each class at every evaluation of one run, as a heat map."""
    found = evaluations(metrics, "per_class")
    rounds, values = [number for number, _ in found], np.array([row for _, row in found]).T
    classes = [_short(name, _LONGEST_CLASS) for name in classes]
    with style.applied():
        left = 0.3 + 0.075 * max(map(len, classes))
        height = 0.22 * len(classes)
        canvas = style.new_figure(_WIDE, height + 0.95)
        axes = style.inches(canvas, left, 0.45, _WIDE - left - 0.85, height)
        shown = axes.imshow(
            values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1, rasterized=True
        )
        places = _round_numbers(rounds)
        axes.set_xticks(places, [str(rounds[place]) for place in places])
        axes.set_yticks(range(len(classes)), classes)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(False)
        axes.set_xlabel("round")
        _title(canvas, "Accuracy of each class over the rounds")
        bar = axes.inset_axes((1.012, 0.0, 0.014, 1.0))
        canvas.colorbar(shown, cax=bar, format=style.PercentTicks()).outline.set_visible(False)
        bar.grid(False)
        return canvas


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Where the images of each class end up: shares of a row, with the true class on the left."""
    table = np.array(counts, dtype=float)
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    classes = [_short(name, _LONGEST_CLASS) for name in classes]
    cell = min(0.7, max(0.36, 3.6 / len(classes))) if len(classes) <= _MOST_NUMBERS else 7.0 / len(classes)
    with style.applied():
        name = 0.3 + 0.075 * max(map(len, classes))
        side = cell * len(classes)
        canvas = style.new_figure(max(name + side, _CONFUSION_TITLE) + 0.2, 0.45 + side + name - 0.1)
        axes = style.inches(canvas, name, name - 0.1, side, side)
        axes.pcolormesh(
            shares, cmap="Blues", vmin=0, vmax=1, edgecolor="white", linewidth=1.0 if cell > 0.2 else 0
        ).set_rasterized(len(classes) > _MOST_NUMBERS)
        places = _thinned(len(classes), 40)
        names = [classes[place] for place in places]
        axes.set_yticks([place + 0.5 for place in places], names)
        axes.set_xticks([place + 0.5 for place in places], names, rotation=90)
        axes.set_ylim(len(classes), 0)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(False)
        if len(classes) <= _MOST_NUMBERS:
            _write_shares(axes, shares)
        _title(canvas, "True class (row) and prediction (column), % of row")
        return canvas


def training(runs: Runs) -> Figure | None:
    """Every quantity that the methods recorded while training, each in a small panel; None without any."""
    names = dict.fromkeys(name for metrics in runs.values() for record in metrics for name in record.get("train", {}))
    found = {name: {label: _recorded(metrics, name) for label, metrics in runs.items()} for name in names}
    found = {name: curves for name, curves in found.items() if any(len(rounds) for rounds, _ in curves.values())}
    if not found:
        return None
    columns, height = min(3, len(found)), 2.15
    width = _WIDE / columns
    rows = -(-len(found) // columns)
    legend = _legend_height(runs) + 0.1 if len(runs) > 1 else 0.0
    with style.applied():
        canvas = style.new_figure(_WIDE, rows * height + legend)
        for index, (name, curves) in enumerate(found.items()):
            row, column = divmod(index, columns)
            bottom = (rows - 1 - row) * height + 0.45 + legend
            axes = style.inches(canvas, column * width + 0.6, bottom, width - 0.8, height - 0.8)
            for place, (rounds, values) in enumerate(curves.values()):
                colour = look(place)["color"]
                axes.plot(rounds, values, color=colour, linewidth=0.7, alpha=0.35)
                axes.plot(rounds, _smooth(values), color=colour, linewidth=1.5)
            axes.set_title(name.replace("_", " "))
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=_TICKS))
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=_TICKS, integer=True))
            if index + columns >= len(found):
                axes.set_xlabel("round")
        if legend:
            lines = [Line2D([], [], color=look(place)["color"]) for place in range(len(runs))]
            shown = [_short(label, _LONGEST_LABEL) for label in runs]
            canvas.legend(
                lines,
                shown,
                loc="lower left",
                bbox_to_anchor=(0.6 / _WIDE, 0),
                ncols=3,
                labelspacing=0.35,
                borderpad=0,
            )
        return canvas


def ownership(partition: Record, dataset: str) -> Figure:
    """The picture of a partition from its counts, as `feddure partition --plot` draws it from the images."""
    classes = tuple(partition["classes"])
    kinds = [np.array(partition[kind], dtype=np.int64) for kind in ("labelled", "unlabelled")]
    unknown = partition.get("unknown") or [0] * len(kinds[1])
    columns = [np.column_stack([kinds[0], np.zeros_like(unknown)]), np.column_stack([kinds[1], unknown])]
    # The picture reads nothing of an image but its class, so numbering images that fit the counts is enough.
    names = [*range(len(classes)), UNKNOWN]
    labels = [np.repeat(names, row) for counts in columns for row in counts]
    ends = np.cumsum([len(part) for part in labels])[:-1]
    owned = np.split(np.arange(sum(map(len, labels))), ends)
    clients = len(kinds[0])
    nothing = np.empty((0, 1, 1, 1), dtype=np.uint8)
    return bubbles.figure(
        Partition(tuple(owned[:clients]), tuple(owned[clients:]), partition["parameters"]),
        Dataset(
            dataset,
            images=nothing,
            labels=np.concatenate(labels),
            test_images=nothing,
            test_labels=np.empty(0, dtype=np.int64),
            classes=classes,
            mean=(0.0,),
            std=(1.0,),
            sites=tuple(partition.get("sites") or map(str, range(clients))),
        ),
    )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """The sorted places, moved as little as need be so that neighbours keep the gap."""
    # Places that are too close form a group, evenly spaced around the mean of where they wanted to be.
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _lowest(groups[-1], gap) < _lowest(groups[-2], gap) + gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [_lowest(group, gap) + gap * index for group in groups for index in range(len(group))]


def _curves(runs: Runs, quantity: str, title: str, height: float) -> tuple[Figure, Axes]:
    """One line a run with its evaluations as points, named at its end."""
    inside = 1 < len(runs) <= MOST_LABELS
    below = _legend_height(runs) + 0.1 if len(runs) > MOST_LABELS else 0.0
    averaged = any(evaluations(metrics, quantity, "test_ema") for metrics in runs.values())
    names = {label: _short(label, _LONGEST_LABEL) for label in runs}
    right = 0.4 + 0.066 * max(map(len, names.values())) if inside else 0.3
    canvas = style.new_figure(_WIDE, height + below)
    axes = style.inches(canvas, 0.6, 0.45 + below, _WIDE - 0.6 - right, height - 0.95)
    ends = []
    for place, (label, metrics) in enumerate(runs.items()):
        for model, line in (("test", "-"), ("test_ema", "--")):
            points = evaluations(metrics, quantity, model)
            if points:
                shown = look(place) | ({} if model == "test" and len(points) <= 80 else {"marker": ""})
                name = names[label] if model == "test" else "_"
                axes.plot(*zip(*points, strict=True), line, markersize=4, label=name, clip_on=False, **shown)
                if model == "test":
                    ends.append((place, names[label], points[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=_TICKS, integer=True))
    axes.set_xlim(0, max((last_round for *_, (last_round, _) in ends), default=1))
    axes.set_xlabel("round")
    _title(canvas, title + (", dashed: averaged model" if averaged else ""))
    if inside:
        _name_ends(axes, ends, gap=_LINE / (height - 0.95))
    elif below:
        _legend_below(axes, drop=0.55 / (height - 0.95))
    return canvas, axes


def _name_ends(axes: Axes, ends: list[tuple[int, str, tuple[int, float]]], gap: float) -> None:
    """Each run's name beside the end of its curve, moved apart where names would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[2][1])
    wanted = [(end[2][1] - low) / (high - low) for end in ends]
    for (place, name, (last_round, value)), height in zip(ends, apart(wanted, gap), strict=True):
        colour = look(place)["color"]
        axes.annotate(
            name,
            xy=(last_round, value),
            xytext=(1.03, height),
            textcoords=axes.transAxes,
            va="center",
            size=8,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.9,
                "linestyle": ":",
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _lowest(group: list[float], gap: float) -> float:
    """Where a group of names begins: around the mean of its places, but not outside of the axes."""
    size = gap * (len(group) - 1)
    return max(0.0, min(sum(group) / len(group) - size / 2, 1.0 - size))


def _class_bars(axes: Axes, rows: np.ndarray, values: Sequence[float]) -> None:
    axes.barh(rows, values, height=0.62, color=style.PALETTE[0])
    for row, value in zip(rows, values, strict=True):
        axes.text(value + 0.015, row, f"{100 * value:.0f}", va="center", size=8, color=style.MUTED)


def _write_shares(axes: Axes, shares: np.ndarray) -> None:
    for row, column in np.ndindex(shares.shape):
        value = round(100 * float(shares[row, column]))
        if value:
            colour = "white" if shares[row, column] > 0.55 else style.INK
            axes.text(column + 0.5, row + 0.5, str(value), ha="center", va="center", size=8, color=colour)


def _legend_height(runs: Runs) -> float:
    """Inches of the runs' names in three columns."""
    return 0.155 * -(-len(runs) // 3)


def _legend_below(axes: Axes, drop: float) -> None:
    """The runs' names below the axes, at this share of their height."""
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -drop),
        ncols=3,
        labelspacing=0.35,
        borderpad=0,
        borderaxespad=0,
    )


def _title(canvas: Figure, text: str) -> None:
    across, up = canvas.get_size_inches()
    canvas.text(0.15 / across, 1 - 0.12 / up, text, size=10, weight="bold", va="top")


def _recorded(metrics: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and values of a quantity; rounds without it, or with null, are left out."""
    points = [(record["round"], record.get("train", {}).get(name)) for record in metrics]
    points = [(number, value) for number, value in points if isinstance(value, int | float)]
    return np.array([number for number, _ in points]), np.array([value for _, value in points], dtype=float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of a tenth of the run, cut off at its ends."""
    half, places = len(values) // 20, np.arange(len(values))
    first, beyond = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[beyond] - sums[first]) / (beyond - first)


def _round_numbers(rounds: Sequence[int]) -> list[int]:
    """Places of the evaluations at multiples of a round number, about ten of them."""
    step = next(step for step in _STEPS if rounds[-1] <= 10 * step)
    return [place for place, number in enumerate(rounds) if number % step == 0] or [len(rounds) - 1]


def _thinned(size: int, most: int) -> range:
    """Places of at most so many, evenly spaced from the first."""
    return range(0, size, -(-size // most))


def _short(label: str, longest: int) -> str:
    return label if len(label) <= longest else label[: longest - 1] + "…"


def _shorter(match: re.Match[str]) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", match.group())


def _circle(match: re.Match[str]) -> str:
    top, bottom = float(match["top"]), float(match["bottom"])
    return f'<circle cx="{match["x"]}" cy="{(top + bottom) / 2:.2f}" r="{abs(top - bottom) / 2:.2f}"'
