"""The picture of a partition: which client holds how many images of which class.

Every bubble's area is proportional to a number of images. Up to 30 clients the labelled and unlabelled images
stand side by side, beyond that one above the other, each client in one column; crowds become a heat map.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from feddure.reports import inline, style
from feddure.tracking.records import Record

SIDE_BY_SIDE = 30
"""The most clients whose two panels stand next to each other."""

MOST_CLIENTS, MOST_CLASSES = 150, 40
"""Beyond these a bubble would be a dot, and a heat map is drawn instead."""

_POINTS = 72
_STEPS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))
_COLOURS = (style.BLUE, style.VERMILION)  # of labelled and unlabelled images
_MAPS = ("Blues", "Oranges")  # in one hue each, told apart by lightness alone


def figure(about: Record, dataset: str) -> Figure:
    """Class × client, labelled and unlabelled, of what a run keeps of its partition (`data.partition.summarise`)."""
    names, *panels = class_counts(about)
    clients = len(panels[0])
    crowded = clients > MOST_CLIENTS or len(names) > MOST_CLASSES
    few = clients <= SIDE_BY_SIDE and not crowded
    sites = about.get("sites") if few else ()
    height = 0.75 + min(max(0.3 * len(names), 1.2), 9.0) + (0.5 if sites else 0.2)
    with style.applied():
        canvas = style.new_figure(11.4, 0.7 + height * (1 if few else 2))
        reading = "darker is more" if crowded else "a bubble's area is its number of images"
        title, notes = _title(about, dataset, reading)
        canvas.suptitle(title, x=0.01, ha="left", size=12)
        canvas.text(0.01, 1 - 0.36 / canvas.get_figheight(), notes, color=style.MUTED, va="top")
        below = (0, 0, 1, 1 - 0.36 / canvas.get_figheight())
        canvas.get_layout_engine().set(rect=below, wspace=0.06)  # type: ignore[union-attr, call-arg]
        every = canvas.subplots(*((1, 2) if few else (2, 1)), squeeze=False, sharey=few)
        order = _by_main_class(panels[0] + panels[1])
        for number, (axes, counts) in enumerate(zip(every.flat, panels, strict=True)):
            axes.set_title(f"{('Labelled', 'Unlabelled')[number]}: {counts.sum():,} images", color=_COLOURS[number])
            rows = style.thinned(len(names), 60)
            axes.set_yticks(rows, [style.short(names[row], 18) for row in rows])
            axes.tick_params(length=0)
            if crowded:
                _heat_map(axes, counts[order], _MAPS[number])
            elif sites:
                axes.set_xticks(range(clients), [style.short(name, 12) for name in sites], rotation=35, ha="right")
            else:
                axes.set_xticks(range(0, clients, next(step for step in _STEPS if clients <= 21 * step)))
            if few or number:
                axes.set_xlabel("clients, sorted by their most frequent class" if crowded else "client")
        if not crowded:
            canvas.draw_without_rendering()  # a bubble's size depends on that of its axes
            for number, (axes, counts) in enumerate(zip(every.flat, panels, strict=True)):
                draw(axes, counts, _COLOURS[number], names)
    return canvas


def class_counts(about: Record) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Row names, labelled and unlabelled counts [client, row]; images of unknown class have their own row."""
    names = list(about["classes"])
    labelled, unlabelled = (np.array(about[kind], dtype=np.int64) for kind in ("labelled", "unlabelled"))
    unknown = np.array(about.get("unknown") or ())
    if unknown.any():
        names.append("(unknown)")
        labelled = np.column_stack([labelled, np.zeros_like(unknown)])
        unlabelled = np.column_stack([unlabelled, unknown])
    return names, labelled, unlabelled


def draw(axes: Axes, counts: np.ndarray, colour: str, names: Sequence[str]) -> None:
    """Bubbles of the counts [client, row] in axes that have their size, and what their areas mean above them."""
    clients, classes = counts.shape
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    across, up = box.width * _POINTS / clients, box.height * _POINTS / classes
    margin = max(0.6, up / across / 2)  # room for the largest bubble possible, so that panels stay aligned
    axes.set_xlim(-margin, clients - 1 + margin)
    axes.set_ylim(classes - 0.4, -0.6)
    axes.spines[:].set_visible(False)
    held = counts[counts > 0]
    if not len(held):
        return
    # The largest bubble may fill its row; three in four keep within their column too.
    scale = min((0.95 * up) ** 2 / held.max(), (0.92 * across) ** 2 / np.quantile(held, 0.75))
    fmt: dict[str, Any] = {"color": colour, "alpha": 0.7}
    client, row = np.nonzero(counts)
    said = [
        f"client {one}, {names[place]}: {counts[one, place]:,} images" for one, place in np.argwhere(counts).tolist()
    ]
    sizes_of = scale * counts[client, row]
    axes.scatter(client, row, s=sizes_of, linewidths=0, clip_on=False, gid=inline.saying(said), **fmt)
    sizes = _round_numbers(int(held.max())) if held.min() < held.max() else [int(held[0])]
    widths = [(scale * size) ** 0.5 for size in sizes]
    legend = axes.legend(
        [Line2D([], [], marker="o", linestyle="", markeredgewidth=0, markersize=width, **fmt) for width in widths],
        [f"{size:,}" for size in sizes],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(sizes),
        handlelength=max(widths) / rcParams["legend.fontsize"],
        handletextpad=0.4,
        columnspacing=0.8,
        borderpad=0.1,
        borderaxespad=0.5,
    )
    legend.set_in_layout(False)  # the title's line has room for it


def _title(about: Record, dataset: str, reading: str) -> tuple[str, str]:
    parameters = about["parameters"]
    title = [style.short(dataset, 40), parameters["setting"], f"{len(about['labelled']):,} clients"]
    if parameters["gamma"] is not None:
        title.append(f"γ = {parameters['gamma']:g}")
    title.append(f"seed {parameters['seed']}")
    measures = {name: about.get(f"{name}_imbalance") for name in ("internal", "external")}
    notes = [f"{name} imbalance {value:.2f}" for name, value in measures.items() if value is not None]
    return "  ·  ".join(title), "  ·  ".join([*notes, reading])


def _heat_map(axes: Axes, counts: np.ndarray, colours: str) -> None:
    largest = max(1, int(counts.max()))
    # The square root keeps small numbers apart; a few clients hold most images.
    shown = axes.imshow(counts.T, colours, PowerNorm(0.5, 0, largest), aspect="auto", gid=inline.MAP)
    axes.grid(False)
    axes.figure.colorbar(shown, ax=axes, label="images", ticks=[0, *_round_numbers(largest)], fraction=0.03, pad=0.01)


def _by_main_class(counts: np.ndarray) -> np.ndarray:
    """Clients in the order of their most frequent class, and within it by its share, largest first."""
    share = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.lexsort((-share, counts.argmax(axis=1)))


def _round_numbers(largest: int) -> list[int]:
    """Up to three round numbers that span 1 to the largest."""
    return sorted([step for step in _STEPS if step <= largest][::-2][:3])
