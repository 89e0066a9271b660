"""How the paper deals images to clients, beside FedMatch: the picture of it, and its numbers."""

from matplotlib.figure import Figure

from feddure import config
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition, external_imbalance, internal_imbalance, make
from feddure.reports import partition_figure as bubbles
from feddure.reports import style
from feddure.studies.paper import names
from feddure.tracking.summary import spoken

DEALT = {"fedmatch": "FedMatch, Batch-NonIID", "dir-dir": "The paper, DIR-DIR"}
"""The settings in the picture."""

SHOWN_CLIENTS = 20
"""Clients in the picture; its table has them all."""


def picture(dataset: Dataset, clients: int = 100, seed: int = 0) -> Figure:
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
        names.write(canvas, 0.12, [heading], size=12, weight="bold")
        for row, (setting, title) in enumerate(DEALT.items()):
            dealt = deal(dataset, setting, clients, seed)
            bottom = up - 0.45 - (row + 1) * (height + gap) + 0.5
            inside, outside = imbalances(dealt, dataset)
            measures = f"internal imbalance {inside:.2f}, external imbalance {outside:.2f}"
            names.write(canvas, up - bottom - height - 0.78, [title], size=11, weight="bold")
            names.write(canvas, up - bottom - height - 0.54, [measures], color=style.MUTED)
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
