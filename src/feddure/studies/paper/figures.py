"""The figures of the studies. Names of any length find room, and what all rows share is said once, above them."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from feddure.reports import style
from feddure.reports.figures import apart
from feddure.studies.paper import names
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.looks import Line, Look, looks, text_colour
from feddure.studies.paper.numbers import setting_name
from feddure.studies.paper.rows import REFERENCE, Row, mean_of
from feddure.studies.paper.tables import grids, panels
from feddure.tracking.summary import spoken

OURS, PAPER = style.BLUE, style.VERMILION
SMOOTHED = 5
"""Evaluations in the running mean that figure 1 draws; single ones jump by several points from round to round."""

_WIDE = 10.4  # inches
_NARROWEST = 2.4  # inches of a panel
_LONGEST_NAME = 3.3  # inches beside the axes; what is longer goes on in a further line
_LEADING, _NAME_HEIGHT = 0.15, 0.185  # inches of a further line, and of a line at the end of a curve


def figure(rows: Sequence[Row]) -> Figure:
    """The figure of a study's rows: curves, lines along its axis, or ours beside the paper's."""
    if rows[0].study == "figure1":
        return curves(rows)
    return along_axis(rows) if reproduce.STUDIES[rows[0].study].axis else beside_paper(rows)


def beside_paper(rows: Sequence[Row]) -> Figure:
    """A dot for ours and one for the paper's number, method by method; data sets without a measurement are left out."""
    measured = {row.dataset for row in rows if row.measured}
    alike, rows = _said_once([row for row in rows if not measured or row.dataset in measured])
    chosen = grids(rows)
    texts = [[names.fitted(name, _LONGEST_NAME) for name in grid.names] for grid in chosen]
    longest = max((names.inches(lines) for own in texts for lines in own), default=0.0)
    left, top, row_height, head, foot = max(2.05, 0.2 + longest), 0.68 + _room(alike), 0.27, 0.58, 0.42
    sizes = [np.array([1 + (len(lines) - 1) * _LEADING / row_height for lines in own]) for own in texts]  # in rows
    heights = [row_height * size.sum() for size in sizes]
    with style.applied():
        canvas = style.new_figure(_WIDE, top + sum(heights) + (head + foot) * len(chosen))
        up = canvas.get_size_inches()[1]
        drawn = [row for grid in chosen for line in grid.entries for row in line if row is not None]
        beside = ", ours beside the paper's" if any(row.paper is not None for row in drawn) else ""
        names.write(canvas, 0.12, [f"Test accuracy in %{beside}"], size=12, weight="bold")
        names.write(canvas, 0.38, alike, color=style.MUTED)
        _legend_of_dots(canvas, drawn, 0.36 + _room(alike))
        bottom = up - top
        for grid, own, size, height in zip(chosen, texts, sizes, heights, strict=True):
            bottom -= head + height
            names.write(canvas, up - bottom - height - 0.26, [grid.title], size=11, weight="bold")
            width = (_WIDE - left - 0.2) / len(grid.columns)
            limits = _limits([row for line in grid.entries for row in line if row is not None])
            places = np.cumsum(size) - size / 2 - 0.5
            for column, setting in enumerate(grid.columns):
                axes = style.inches(canvas, left + column * width, bottom, width - 0.25, height)
                _dots(axes, [line[column] for line in grid.entries], places, limits)
                axes.set_ylim(size.sum() - 0.4, -0.6)
                axes.set_title(setting, fontsize=9, pad=4)
                axes.set_yticks(places, [names.drawn(lines) if column == 0 else "" for lines in own])
                for number, name in enumerate(grid.names):
                    if name == "FedDure":
                        axes.get_yticklabels()[number].set_fontweight("bold")
                        around = places[number] - 0.5, places[number] + 0.5
                        axes.axhspan(*around, color=OURS, alpha=0.07, linewidth=0)
            bottom -= foot
    return canvas


def curves(rows: Sequence[Row]) -> Figure:
    """Accuracy against rounds: mean over seeds in a band of one standard deviation, named at the curves' ends.

    Single evaluations jump by several points, so that ten raw curves would hide each other; the CSV file has them.
    """
    alike, rows = _said_once(rows, [row for row in rows if row.measured])
    found = [[row for row in rows if (row.dataset, row.setting) == place and row.measured] for place in _places(rows)]
    found = [panel for panel in found if panel] or [[]]
    shown = looks(map(_line_of, rows))
    texts = {line: names.fitted(names.in_words(*line), _LONGEST_NAME, 8.5, _weight(line[0])) for line in shown}
    most = max(sum(len(texts[_line_of(row)]) for row in panel) for panel in found)
    longest = max((names.inches(texts[line], 8.5, _weight(line[0])) for line in shown), default=0.0)
    height, below, right = max(4.6, 0.5 + _NAME_HEIGHT * most), 0.5, max(2.75, 0.3 + longest)
    with style.applied():
        canvas = style.new_figure(_WIDE, len(found) * (height + below) + _room(alike))
        names.write(canvas, 0.12, alike, color=style.MUTED)
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
                look = shown[_line_of(row)]
                axes.plot(rounds, mean, **look | ({"marker": ""} if smooth else {"clip_on": False}))
                if len(values) > 1:
                    spread = values.std(axis=0, ddof=1)
                    around = mean - spread, mean + spread
                    axes.fill_between(rounds, *around, color=look["color"], alpha=0.12, linewidth=0)
                ends.append(_End(texts[_line_of(row)], _weight(row.method), look, rounds[-1], mean[-1]))
            axes.set_xlim(0, max(end.round for end in ends))
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
    width = max(_WIDE / max(len(found), 2), _NARROWEST)
    wide = width * len(found)
    alike, rows = _said_once(rows, wide=wide)
    found = panels(rows)
    mixed = _some_of_one_seed(rows)
    shown = looks(map(_line_of, rows))
    texts = [names.fitted(names.in_words(*line), wide - 1.2, 8) for line in shown]
    across = int((wide - 0.6) / (0.7 + max(names.inches(lines, 8) for lines in texts)))
    across = min(max(across, 1), 4)  # names beside each other
    columns = np.array_split([0.2 + _LEADING * (len(lines) - 1) for lines in texts], across)  # as the legend does
    note = names.fitted(_note(rows), wide - 0.8, 8)
    under = _LEADING * (len(note) - 1)
    height, bottom = 4.1, 0.95 + under + max(column.sum() for column in columns)
    high = height + bottom + _room(alike)
    with style.applied():
        canvas = style.new_figure(wide, high)
        names.write(canvas, 0.12, alike, color=style.MUTED)
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
            for line, look in shown.items():
                own = [row for row in panel if _line_of(row) == line and row.measured]
                _line(axes, own, values, look, hollow=mixed)
            axes.set_xlabel(_AXES[study.axis])
            axes.set_ylabel("test accuracy, %")
            axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        handles = [Line2D([], [], markersize=5, **look) for look in shown.values()]
        said, corner = map(names.drawn, texts), (0.3 / wide, (0.28 + under) / high)
        canvas.legend(handles, said, loc="lower left", bbox_to_anchor=corner, ncols=across, handlelength=3.2)
        canvas.text(0.65 / wide, 0.12 / high, names.drawn(note), color=style.MUTED, fontsize=8)
    return canvas


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


def _line(axes: Axes, own: Sequence[Row], values: Sequence[float], look: Look, hollow: bool) -> None:
    """A method along the axis, broken where a point is not measured.

    A band joins neighbours of several seeds each, a bar stands where there is no such neighbour. A point of one seed
    has neither, and is hollow where others have more.
    """
    found = {row.value: row.last10 for row in own if row.last10 is not None}
    if not found:
        return
    at = np.array(values)
    mean, deviation = np.full(len(at), np.nan), np.full(len(at), np.nan)
    for place, spread in enumerate(map(found.get, values)):
        if spread is not None:
            mean[place] = spread.mean
            deviation[place] = np.nan if spread.sd is None else spread.sd
    axes.plot(at, mean, markersize=5, **look)
    axes.fill_between(at, mean - deviation, mean + deviation, color=look["color"], alpha=0.13, linewidth=0)
    spread_out = ~np.isnan(deviation)
    beside = np.concatenate([[False], spread_out, [False]])
    lonely = spread_out & ~beside[:-2] & ~beside[2:]
    if lonely.any():
        bars = {"ecolor": look["color"], "elinewidth": 1.2, "capsize": 3}
        axes.errorbar(at[lonely], mean[lonely], deviation[lonely], fmt="none", **bars)
    single = ~np.isnan(mean) & ~spread_out
    if hollow and single.any():
        points = look | {"linestyle": "none", "markerfacecolor": "white", "zorder": look.get("zorder", 2) + 0.5}
        axes.plot(at[single], mean[single], markersize=5, **points)


def _dots(axes: Axes, column: Sequence[Row | None], places: np.ndarray, limits: tuple[float, float]) -> None:
    """Ours with its deviation, the paper's, and a thin line between them."""
    for place, row in zip(places, column, strict=True):
        if row is None:
            continue
        if row.last10 is not None and row.paper is not None:
            axes.plot([row.last10.mean, row.paper], [place, place], color=style.MUTED, linewidth=0.9, alpha=0.55)
        if row.paper is not None:
            # An empty diamond in front: both can be seen where they agree.
            axes.plot(row.paper, place, "D", markersize=6.5, markerfacecolor="none", markeredgecolor=PAPER, zorder=4)
        if row.last10 is not None:
            axes.errorbar(row.last10.mean, place, xerr=row.last10.sd, fmt="o", markersize=5, color=OURS, capsize=2.5)
    labels_only = _labels_only(column)
    if labels_only is not None:
        axes.axvline(labels_only, color=style.BLACK, linestyle="--", linewidth=0.9, zorder=1)
    axes.set_xlim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=True)


def _labels_only(rows: Sequence[Row | None]) -> float | None:
    """Accuracy of labels-only training with as many steps: a row's own, or what rows without one are compared with."""
    known = [row.accuracies if row.method == REFERENCE else row.reference for row in rows if row is not None]
    most = max(known, key=len, default={})
    return statistics.fmean(most.values()) if most else None


def _legend_of_dots(canvas: Figure, rows: Sequence[Row], down: float) -> None:
    """What dots, diamonds and lines are, of those that are there; this far below the top, in inches."""
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
        bbox_to_anchor=(0.05 / across, 1 - down / up),
        ncols=3,
        borderpad=0,
    )


class _End(NamedTuple):
    """The end of a curve, and the lines of its name."""

    name: list[str]
    weight: str
    look: Look
    round: float
    accuracy: float


def _name_ends(axes: Axes, ends: Sequence[_End], height: float) -> None:
    """Each method's name beside the end of its curve, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end.accuracy)
    # Each line of a name takes a place; the name stands in the middle of them.
    places = apart([(end.accuracy - low) / (high - low) for end in ends for _ in end.name], _NAME_HEIGHT / height)
    for end in ends:
        own, places = places[: len(end.name)], places[len(end.name) :]
        axes.annotate(
            names.drawn(end.name),
            xy=(end.round, end.accuracy),
            xytext=(1.035, statistics.fmean(own)),
            textcoords=axes.transAxes,
            va="center",
            size=8.5,
            color=text_colour(end.look),
            weight=end.weight,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.look["color"],
                "linewidth": 1.0,
                "linestyle": end.look["linestyle"],
                "shrinkA": 1,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
        )


def _line_of(row: Row) -> Line:
    return row.method, row.options


def _weight(name: str) -> str:
    """Of a name's letters: what the paper proposes stands out."""
    return "bold" if name in ("feddure", "FedDure") else "normal"


def _said_once(
    rows: Sequence[Row], drawn: Sequence[Row] | None = None, wide: float = _WIDE
) -> tuple[list[str], list[Row]]:
    """What all drawn rows change, in lines for the head of the figure, and the rows with names that leave it out."""
    options = names.shared(rows if drawn is None else drawn)
    lines = names.fitted(f"All with {', '.join(options)}", wide - 0.3) if options else []
    return lines, names.without(rows, options)


def _room(lines: Sequence[str]) -> float:
    """Inches that lines at the head of a figure take."""
    return 0.08 + _LEADING * len(lines) if lines else 0.0


def _note(rows: Sequence[Row]) -> str:
    """What lines and bands of a chart are, and what the paper leaves open."""
    setting = " and names no setting" if rows[0].study == "clients" else ""
    drawn = [row for row in rows if row.measured]
    each = f"{mean_of(drawn)}; " if drawn else ""
    seeds = f"{each}{_over_seeds(drawn)}{' (hollow: one seed)' if _some_of_one_seed(drawn) else ''}"
    return f"{seeds[:1].upper()}{seeds[1:]}. The paper prints no numbers for this chart{setting}."


def _some_of_one_seed(rows: Sequence[Row]) -> bool:
    """Whether some rows have one seed and others more."""
    seeds = {len(row.seeds) for row in rows if row.measured}
    return 1 in seeds and len(seeds) > 1


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
            around = row.last10.sd or 0.0
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
