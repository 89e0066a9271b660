"""Figures of what pseudo labels were worth and of what the regulators made of them, and the same in words.

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
from matplotlib.ticker import MaxNLocator, PercentFormatter

from feddure.tracking import style
from feddure.tracking.figures import Runs, look
from feddure.tracking.records import Record
from feddure.tracking.summary import NOTHING, number, percent, points

LAST_ROUNDS = 20
"""Rounds that sentences and tables take their means over."""

TRAINING = ("loss", "loss_unlabelled", "d")
"""Quantities of a round's training that are shown here."""

Trace = dict[str, np.ndarray]
"""A run's quantities by name, a value a round, NaN in rounds without; a quantity without any value is left out."""

_WIDE, _HALF = 9.6, 4.7  # inches: a whole row of the report, and half of one
_COLUMNS = 3  # of panels, and of runs' names
_LINE = 0.16  # inches between two lines of small text
_LONGEST_CLASS = 18
_MOST_NAMES = 30  # classes that are all named, with their numbers
_MOST_CELLS = 50  # of a heat map over the rounds
_TICKS = [1, 2, 5, 10]
_TIGHT = {"borderpad": 0, "borderaxespad": 0, "labelspacing": 0.35, "columnspacing": 1.4, "handlelength": 1.8}
_PERCENT = PercentFormatter(1.0, decimals=0)

# From this many hundredths on, an AUROC is called so.
_JUDGEMENTS = {
    90: "very well",
    80: "well",
    70: "fairly well",
    60: "a little",
    53: "hardly",
    48: "not at all",
    40: "slightly the wrong way round",
    0: "the wrong way round",
}


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
        "Above 0, C-reg's step on pseudo labels lowered its loss on labels; below a dotted line at −mean(m), "
        "the model's step is gradient ascent.",
        solid=("d_mean", "mean"),
        dotted=("ascent_below", "−mean(m)"),
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
        "In these steps mean(m) + d is negative, so the model moves away from its pseudo labels.",
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
        figure = _by_class(runs, _class_names(classes, sizes.pop()))
        reading = _CLASSES_READING + (_HEAT_READING if len(runs) == 1 else _DOTS_READING)
        charts.append(Chart(figure, _CLASSES_TITLE, said.get("classes", ""), reading))
    return charts


# --- numbers -----------------------------------------------------------------------------------------------
def trace(metrics: Sequence[Record]) -> Trace:
    """What a run recorded about its pseudo labels, the mean of its clients' own AUROCs, and levels to compare with."""
    rows = []
    for record in metrics:
        row = (record.get("diagnostics") or {}) | {name: (record.get("train") or {}).get(name) for name in TRAINING}
        own = [client.get("weight_auroc") for client in row.get("clients") or ()]
        own = [value for value in own if value is not None]
        rows.append(row | {"auroc_within": float(np.mean(own)) if own else None})
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    found = {name: np.array([row.get(name) for row in rows], dtype=float) for name in names}
    found["round"] = np.array([record["round"] for record in metrics], dtype=float)
    percentiles = [name for name in found if name.startswith("weight_p")]
    if percentiles and np.isin([found[name] for name in percentiles], (0, 1)).mean() > 0.5:
        # Weights of a threshold: 0 or 1, so their mean says all.
        found = {name: values for name, values in found.items() if name not in percentiles}
        if "weight_auroc" in found:
            best = best_of_threshold(found["weight_mean"], found["pseudo_accuracy"])
            found["auroc_best"] = np.where(np.isfinite(found["weight_auroc"]), best, np.nan)
    classes = per_class(metrics, "coverage_per_class").shape[1]
    if classes:
        found |= {"chance": np.full(len(rows), 1 / classes), "cannot_tell": np.full(len(rows), 0.5)}
    # Far below every d, the level of ascent would only flatten the curve.
    if "d_lowest" in found and np.nanmin(found["d_lowest"]) < np.nanmax(-found["weight_mean"]):
        found["ascent_below"] = -found["weight_mean"]
    return found


def per_class(metrics: Sequence[Record], name: str) -> np.ndarray:
    """A quantity of each class [rounds, classes], NaN where it has no value."""
    rows = [(record.get("diagnostics") or {}).get(name) or [] for record in metrics]
    size = max(map(len, rows), default=0)
    return np.array([row if len(row) == size else [None] * size for row in rows], dtype=float).reshape(len(rows), size)


def known_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is not NaN; NaN where nothing is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)


def best_of_threshold(passing: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The highest AUROC of weights 0 and 1, when these shares of the pseudo labels weigh 1 and are right."""
    right = np.clip(right, 1e-9, 1 - 1e-9)
    return 1 - np.maximum((right - passing) / right, (passing - right) / (1 - right)) / 2


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over a tenth of the run around each round, five rounds at least, cut off at its ends."""
    half = max(2, len(values) // 20)
    return np.array([known_mean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))])


def last_means(found: Trace) -> dict[str, float]:
    """Mean of each quantity in the last rounds, where it has one there."""
    means = {name: float(known_mean(values[-LAST_ROUNDS:])) for name, values in found.items()}
    return {name: value for name, value in means.items() if np.isfinite(value)}


# --- words -------------------------------------------------------------------------------------------------
def judged(auroc: float) -> str:
    """How well weights with this AUROC separate right from wrong, going by the two digits that are shown."""
    return next(word for least, word in _JUDGEMENTS.items() if round(100 * auroc) >= least)


def findings(metrics: Sequence[Record], classes: Sequence[str] = ()) -> dict[str, str]:
    """What the last rounds of a run say, by figure."""
    found, rounds, said = trace(metrics), len(metrics), {}
    mean = last_means(found)
    when = f"in the last {LAST_ROUNDS} rounds" if rounds > LAST_ROUNDS else f"over all {rounds} rounds"
    if "d_mean" in mean:
        low, high = np.nanmin(found["d_lowest"][-LAST_ROUNDS:]), np.nanmax(found["d_highest"][-LAST_ROUNDS:])
        said["reward"] = (
            f"d is {_signed(mean['d_mean'])} on average {when}, from {_signed(low)} to {_signed(high)}: "
            f"C-reg's steps {'lowered' if mean['d_mean'] > 0 else 'raised'} the labelled loss on the whole."
        )
    if "weight_mean" in mean:
        said["weights"] = _weights_in_words(mean, when)
    if "pseudo_accuracy" in mean:
        said["accuracy"] = _accuracy_in_words(mean, when)
    if "weight_auroc" in mean:
        said["separation"] = _separation_in_words(mean, when)
    if "ascent_share" in mean:
        steps = f"{percent(mean['ascent_share'], 1)} of the steps" if mean["ascent_share"] else "No step"
        whole = f"; over the whole run, {percent(float(known_mean(found['ascent_share'])), 1)} did"
        away = f"{steps} {when} moved the model away from its pseudo labels"
        said["ascent"] = f"{away}{whole if rounds > LAST_ROUNDS else ''}."
    if {"loss", "loss_unlabelled"} <= mean.keys():
        on_pseudo_labels = f"{mean['loss_unlabelled']:.2f} on pseudo labels"
        said["losses"] = f"The loss is {mean['loss']:.2f} on labels and {on_pseudo_labels} {when}."
    right = known_mean(per_class(metrics, "pseudo_accuracy_per_class")[-LAST_ROUNDS:])
    if np.isfinite(right).sum() > 1:
        names, best, worst = _class_names(classes, len(right)), int(np.nanargmax(right)), int(np.nanargmin(right))
        said["classes"] = (
            f"{percent(right[best], 0)} of the pseudo labels of {names[best]} are right {when}, "
            f"and {percent(right[worst], 0)} of those of {names[worst]}."
        )
    return said


def table(runs: Runs) -> tuple[list[str], dict[str, list[str]]]:
    """Column names and, for each run with pseudo labels, its means of the last rounds."""
    rows = {}
    for label, metrics in runs.items():
        mean = last_means(trace(metrics))
        if "weight_mean" in mean:
            in_per_cent = ("pseudo_accuracy", "pseudo_accuracy_weighted", "ascent_share")
            shares = [points(mean.get(name)) for name in in_per_cent]
            numbers = [number(mean.get(name), 2) for name in ("weight_mean", "weight_auroc", "auroc_within")]
            reward = _signed(mean["d_mean"]) if "d_mean" in mean else NOTHING
            rows[label] = [*shares, reward, *numbers, _verdict(mean) if "weight_auroc" in mean else NOTHING]
    return ["right", "weighted", "ascent", "mean d", "mean m", "AUROC", "within clients", "m tells them apart"], rows


def _weights_in_words(mean: Mapping[str, float], when: str) -> str:
    if "weight_p90" not in mean:
        return f"{percent(mean['weight_mean'], 1)} of the pseudo labels pass the threshold {when}."
    low, high = mean["weight_p10"], mean["weight_p90"]
    spread = round(high - low, 2)
    alike = "almost alike" if spread < 0.1 else "somewhat differently" if spread < 0.3 else "very differently"
    return (
        f"m is {mean['weight_mean']:.2f} on average {when}, mostly between {low:.2f} and {high:.2f}: "
        f"pseudo labels count {alike}."
    )


def _accuracy_in_words(mean: Mapping[str, float], when: str) -> str:
    text = f"{percent(mean['pseudo_accuracy'], 1)} of the pseudo labels are right {when}"
    weighted = mean.get("pseudo_accuracy_weighted")
    if weighted is None:
        return f"{text}."
    gain = round(100 * (weighted - mean["pseudo_accuracy"]), 1)
    verdict = "hardly matter" if abs(gain) < 1 else f"favour {'right' if gain > 0 else 'wrong'} ones"
    return f"{text}, {percent(weighted, 1)} weighted by m: the weights {verdict}."


def _separation_in_words(mean: Mapping[str, float], when: str) -> str:
    auroc, within = f"with an AUROC of {mean['weight_auroc']:.2f}", mean.get("auroc_within")
    text = f"The weights separate right from wrong pseudo labels {auroc} {when}: {_verdict(mean)}"
    text += f" with {percent(mean['weight_mean'], 1)} passing the threshold." if "auroc_best" in mean else "."
    return text if within is None else f"{text} Within single clients it is {within:.2f}."


def _verdict(mean: Mapping[str, float]) -> str:
    """A threshold that few pass cannot be far from 0.5, so it is measured by what it could reach."""
    return f"{mean['auroc_best']:.2f} at best" if "auroc_best" in mean else judged(mean["weight_auroc"])


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


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
                _paint(panels[-1], plot, traces[label], colours[label], _short(label) if together else "")
            longest = traces[max(labels, key=lambda label: len(traces[label]["round"]))]
            if plot.dotted[0] in longest:
                _mean_line(panels[-1], longest, *plot.dotted, color=style.INK, linewidth=1.2, linestyle=":")
            if columns > 1:
                panels[-1].set_title(_short(labels[0]), size=8.5, weight="normal")
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
            axes.yaxis.set_major_formatter(_PERCENT)


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
                    axes.plot(dots, range(len(dots)), linestyle="", markersize=6, label=_short(label), **look(place))
            if len(runs) > 1:
                axes.set_xlim(0, 1)
                axes.xaxis.set_major_formatter(_PERCENT)
            axes.set_yticks(shown, [classes[place] for place in shown] if axes is panels[0] else [""] * len(shown))
            axes.set_ylim(len(classes) - 0.5, -0.5)
            axes.tick_params(left=False, bottom=False)
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


def _class_names(classes: Sequence[str], size: int) -> list[str]:
    names = classes if len(classes) == size else [f"class {place}" for place in range(size)]
    return [_short(name, _LONGEST_CLASS) for name in names]


def _short(label: str, longest: int = 36) -> str:
    return label if len(label) <= longest else label[: longest - 1] + "…"
