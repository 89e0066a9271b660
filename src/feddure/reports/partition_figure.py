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

from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition, external_imbalance, internal_imbalance
from feddure.reports import style
from feddure.tracking.records import Record

SIDE_BY_SIDE = 30
"""The most clients whose two panels stand next to each other."""

MOST_CLIENTS, MOST_CLASSES = 150, 40
"""Beyond these a bubble would be a dot, and a heat map is drawn instead."""

_POINTS = 72
_STEPS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))


def figure(partition: Partition, dataset: Dataset) -> Figure:
    """Class × client, labelled and unlabelled, with the partition's setting and imbalance in the title."""
    names, *panels = class_counts(partition, dataset)
    crowded = partition.clients > MOST_CLIENTS or len(names) > MOST_CLASSES
    few = partition.clients <= SIDE_BY_SIDE and not crowded
    sites = dataset.sites if few and partition.parameters["setting"] == "sites" else ()
    height = 0.75 + min(max(0.3 * len(names), 1.2), 9.0) + (0.5 if sites else 0.2)
    with style.applied():
        canvas = style.new_figure(11.4, 0.7 + height * (1 if few else 2))
        title, notes = _title(
            partition, dataset, "darker is more" if crowded else "a bubble's area is its number of images"
        )
        canvas.suptitle(title, x=0.01, ha="left", size=12)
        canvas.text(0.01, 1 - 0.36 / canvas.get_figheight(), notes, color=style.MUTED, va="top")
        canvas.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.36 / canvas.get_figheight()))  # type: ignore[union-attr, call-arg]
        every = canvas.subplots(*((1, 2) if few else (2, 1)), squeeze=False, sharey=few)
        order = _by_main_class(panels[0] + panels[1])
        for number, (axes, counts) in enumerate(zip(every.flat, panels, strict=True)):
            axes.set_title(f"{('Labelled', 'Unlabelled')[number]}: {counts.sum():,} images", color=_COLOURS[number])
            rows = style.thinned(len(names), 60)
            axes.set_yticks(rows, [style.short(names[row], 18) for row in rows])
            axes.tick_params(length=0)
            if crowded:
                _heat_map(axes, counts[order], _MAPS[number])
            else:
                axes.set_xlim(-1, partition.clients)
                _name_clients(axes, partition.clients, sites)
            if few or number:
                axes.set_xlabel("clients, sorted by their most frequent class" if crowded else "client")
        if not crowded:
            canvas.draw_without_rendering()  # a bubble's size depends on that of its axes
            for number, (axes, counts) in enumerate(zip(every.flat, panels, strict=True)):
                draw(axes, counts, _COLOURS[number])
    return canvas


_COLOURS, _MAPS = (style.LABELLED, style.UNLABELLED), (style.LABELLED_MAP, style.UNLABELLED_MAP)


def of_counts(counts: Record, dataset: str) -> Figure:
    """The same from the counts that a run keeps of its partition."""
    classes = tuple(counts["classes"])
    kinds = [np.array(counts[kind], dtype=np.int64) for kind in ("labelled", "unlabelled")]
    clients = len(kinds[0])
    unknown = counts.get("unknown") or [0] * clients
    columns = [np.column_stack([kinds[0], np.zeros_like(unknown)]), np.column_stack([kinds[1], unknown])]
    # The picture reads nothing of an image but its class, so numbering images that fit the counts is enough.
    labels = [np.repeat([*range(len(classes)), UNKNOWN], row) for kind in columns for row in kind]
    owned = np.split(np.arange(sum(map(len, labels))), np.cumsum([len(part) for part in labels])[:-1])
    nothing, sites = np.empty((0, 1, 1, 1), dtype=np.uint8), tuple(counts.get("sites") or map(str, range(clients)))
    no_labels = np.empty(0, dtype=np.int64)
    images = Dataset(dataset, nothing, np.concatenate(labels), nothing, no_labels, classes, (0.0,), (1.0,), sites=sites)
    return figure(Partition(tuple(owned[:clients]), tuple(owned[clients:]), counts["parameters"]), images)


def class_counts(partition: Partition, dataset: Dataset) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Row names, labelled and unlabelled counts [client, row]; images of unknown class have their own row."""
    names = list(dataset.classes)
    labelled, unlabelled = partition.counts(dataset.labels, len(names))
    unknown = np.array([len(part) for part in partition.unlabelled]) - unlabelled.sum(axis=1)
    if unknown.any():
        names.append("(unknown)")
        labelled = np.column_stack([labelled, np.zeros_like(unknown)])
        unlabelled = np.column_stack([unlabelled, unknown])
    return names, labelled, unlabelled


def draw(axes: Axes, counts: np.ndarray, colour: str) -> None:
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
    axes.scatter(client, row, s=scale * counts[client, row], linewidths=0, clip_on=False, **fmt)
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


def _title(partition: Partition, dataset: Dataset, reading: str) -> tuple[str, str]:
    parameters, classes = partition.parameters, len(dataset.classes)
    title = [style.short(dataset.name, 40), parameters["setting"], f"{partition.clients:,} clients"]
    if parameters["gamma"] is not None:
        title.append(f"γ = {parameters['gamma']:g}")
    title.append(f"seed {parameters['seed']}")
    measures = {
        "internal imbalance": internal_imbalance(partition, dataset.labels, classes),
        "external imbalance": external_imbalance(partition, dataset.labels, classes),
    }
    notes = [f"{name} {value:.2f}" for name, value in measures.items() if value is not None]
    return "  ·  ".join(title), "  ·  ".join([*notes, reading])


def _heat_map(axes: Axes, counts: np.ndarray, colours: str) -> None:
    largest = max(1, int(counts.max()))
    # The square root keeps small numbers apart; a few clients hold most images.
    shown = axes.imshow(counts.T, aspect="auto", interpolation="nearest", cmap=colours, norm=PowerNorm(0.5, 0, largest))
    axes.grid(False)
    axes.figure.colorbar(shown, ax=axes, label="images", ticks=[0, *_round_numbers(largest)], fraction=0.03, pad=0.01)


def _by_main_class(counts: np.ndarray) -> np.ndarray:
    """Clients in the order of their most frequent class, and within it by its share, largest first."""
    share = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.lexsort((-share, counts.argmax(axis=1)))


def _round_numbers(largest: int) -> list[int]:
    """Up to three round numbers that span 1 to the largest."""
    return sorted([step for step in _STEPS if step <= largest][::-2][:3])


def _name_clients(axes: Axes, clients: int, sites: Sequence[str]) -> None:
    if sites:
        axes.set_xticks(range(clients), [style.short(name, 12) for name in sites], rotation=35, ha="right")
    else:
        axes.set_xticks(range(0, clients, next(step for step in _STEPS if clients <= 21 * step)))
