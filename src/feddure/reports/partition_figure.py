"""The picture of a partition: which client holds how many images of which class.

Every bubble's area is proportional to a number of images. Up to 30 clients the labelled and unlabelled images
stand side by side, beyond that one above the other, each client in one column; crowds become a heat map.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from feddure.data.dataset import Dataset
from feddure.data.partition import Partition, external_imbalance, internal_imbalance
from feddure.reports import style

SIDE_BY_SIDE = 30
"""The most clients whose two panels stand next to each other."""

MOST_CLIENTS, MOST_CLASSES = 150, 40
"""Beyond these a bubble would be a dot, and a heat map is drawn instead."""

_POINTS = 72
_LONGEST_NAME = 18
_STEPS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))


@dataclass(frozen=True)
class _Layout:
    """Sizes in inches."""

    columns: int
    width: float
    height: float
    left: float
    right: float
    bottom: float
    gap: float
    top: float = 1.0

    @property
    def size(self) -> tuple[float, float]:
        rows = 2 // self.columns
        across = self.columns * (self.left + self.width) + (self.columns - 1) * self.gap + self.right
        return across, self.top + rows * self.height + (rows - 1) * self.gap + self.bottom

    def corner(self, panel: int) -> tuple[float, float]:
        """Lower left corner of panel 0 (labelled) or 1 (unlabelled)."""
        if self.columns == 2:
            return self.left + panel * (self.left + self.width + self.gap), self.bottom
        return self.left, self.bottom + (1 - panel) * (self.height + self.gap)


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


def figure(partition: Partition, dataset: Dataset) -> Figure:
    """Class × client, labelled and unlabelled, with the partition's setting and imbalance in the title."""
    names, *panels = class_counts(partition, dataset)
    names = [_short(name, _LONGEST_NAME) for name in names]
    crowded = partition.clients > MOST_CLIENTS or len(names) > MOST_CLASSES
    few_sites = partition.parameters["setting"] == "sites" and partition.clients <= SIDE_BY_SIDE
    layout = _layout(partition.clients, names, crowded, bottom=1.15 if few_sites else 0.65)
    reading = "darker is more" if crowded else "a bubble's area is its number of images"
    with style.applied():
        canvas = style.new_figure(*layout.size)
        _write_title(canvas, partition, dataset, reading)
        for number, (kind, counts) in enumerate(zip(("Labelled", "Unlabelled"), panels, strict=True)):
            axes = style.inches(canvas, *layout.corner(number), layout.width, layout.height)
            colour = (style.LABELLED, style.UNLABELLED)[number]
            axes.set_title(f"{kind}: {counts.sum():,} images", color=colour)
            axes.set_yticks(*_every_name(names))
            axes.tick_params(length=0)
            if crowded:
                order = _by_main_class(panels[0] + panels[1])
                _heat_map(axes, counts[order], (style.LABELLED_MAP, style.UNLABELLED_MAP)[number])
            else:
                draw(axes, counts, colour)
                _name_clients(axes, partition.clients, dataset.sites if few_sites else ())
            if layout.columns == 2 or number == 1:
                axes.set_xlabel("clients, sorted by their most frequent class" if crowded else "client")
    return canvas


def draw(axes: Axes, counts: np.ndarray, colour: str) -> None:
    """Bubbles of the counts [client, row] in these axes, and what their areas mean above them."""
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
    look: dict[str, Any] = {"color": colour, "alpha": 0.7}
    client, row = np.nonzero(counts)
    axes.scatter(client, row, s=scale * counts[client, row], linewidths=0, clip_on=False, **look)
    sizes = _round_numbers(int(held.max())) if held.min() < held.max() else [int(held[0])]
    widths = [(scale * size) ** 0.5 for size in sizes]
    axes.legend(
        [Line2D([], [], marker="o", linestyle="", markeredgewidth=0, markersize=width, **look) for width in widths],
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


def _layout(clients: int, names: list[str], crowded: bool, bottom: float) -> _Layout:
    columns = 2 if clients <= SIDE_BY_SIDE and not crowded else 1
    return _Layout(
        columns,
        width=min(max(4.4, 0.27 * clients), 5.4) if columns == 2 else 10.4,
        height=min(max(0.3 * len(names), 1.2), 9.0),
        left=0.35 + 0.075 * max(map(len, names)),
        right=1.0 if crowded else 0.3,
        bottom=bottom,
        gap=0.1 if columns == 2 else 0.65,
    )


def _write_title(canvas: Figure, partition: Partition, dataset: Dataset, reading: str) -> None:
    across, up = canvas.get_size_inches()
    parameters = partition.parameters
    title = [_short(dataset.name, 40), parameters["setting"], f"{partition.clients:,} clients"]
    if parameters["gamma"] is not None:
        title.append(f"γ = {parameters['gamma']:g}")
    title.append(f"seed {parameters['seed']}")
    measures = {
        "internal imbalance": internal_imbalance(partition, dataset.labels, len(dataset.classes)),
        "external imbalance": external_imbalance(partition, dataset.labels, len(dataset.classes)),
    }
    notes = [f"{name} {value:.2f}" for name, value in measures.items() if value is not None]
    canvas.text(0.15 / across, 1 - 0.15 / up, "  ·  ".join(title), size=12, weight="bold", va="top")
    canvas.text(0.15 / across, 1 - 0.42 / up, "  ·  ".join([*notes, reading]), color=style.MUTED, va="top")


def _heat_map(axes: Axes, counts: np.ndarray, colours: str) -> None:
    largest = max(1, int(counts.max()))
    # The square root keeps small numbers apart; a few clients hold most images.
    shown = axes.imshow(counts.T, aspect="auto", interpolation="nearest", cmap=colours, norm=PowerNorm(0.5, 0, largest))
    axes.grid(False)
    bar = axes.inset_axes((1.012, 0.0, 0.014, 1.0))
    axes.figure.colorbar(shown, cax=bar, label="images", ticks=[0, *_round_numbers(largest)])
    bar.grid(False)


def _by_main_class(counts: np.ndarray) -> np.ndarray:
    """Clients in the order of their most frequent class, and within it by its share, largest first."""
    share = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.lexsort((-share, counts.argmax(axis=1)))


def _round_numbers(largest: int) -> list[int]:
    """Up to three round numbers that span 1 to the largest."""
    steps = [step for step in _STEPS if step <= largest]
    return sorted(steps[::-2][:3])


def _name_clients(axes: Axes, clients: int, sites: tuple[str, ...]) -> None:
    if sites:
        axes.set_xticks(range(clients), [_short(name, 12) for name in sites], rotation=35, ha="right")
    else:
        step = next(step for step in _STEPS if clients <= 21 * step)
        axes.set_xticks(range(0, clients, step))


def _every_name(names: list[str]) -> tuple[list[int], list[str]]:
    """Row numbers and names, thinned where they would overlap."""
    rows = list(range(0, len(names), 1 + len(names) // 60))
    return rows, [names[row] for row in rows]


def _short(name: str, longest: int) -> str:
    """The name, or its two ends where it is too long: paths and numbered names differ at the end."""
    if len(name) > longest:
        tail = longest // 2
        name = f"{name[: longest - tail - 1]}…{name[-tail:]}"
    return name.replace("$", r"\$")  # matplotlib would read a formula
