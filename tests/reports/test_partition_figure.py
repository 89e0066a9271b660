"""The picture of a partition: areas that tell the truth, at any number of clients."""

import numpy as np
import pytest

from feddure import config
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import make, summarise
from feddure.reports import inline, partition_figure, style


def dataset(classes=10, per_class=60, unknown=0, sites=()):
    labels = np.concatenate([np.arange(classes * per_class) % classes, np.full(unknown, UNKNOWN)])
    images = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8)
    names = tuple(f"class {number}" for number in range(classes))
    site = np.arange(len(labels)) // 7 % len(sites) if sites else None
    labelled = np.arange(len(labels)) % 3 == 0 if sites else None
    return Dataset("synthetic", images, labels, images, labels, names, (0.5,), (0.5,), labelled, sites, site)


def drawn(data, **fields):
    """A figure's two panels and the counts they must show."""
    options = config.PartitionOptions(**{"clients": 8, "label_fraction": 0.3, "setting": "dir-dir", **fields})
    partition = make(data, options, 0)
    figure = partition_figure.figure(summarise(partition, data), data.name)
    style.render(figure, "png", 50)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    return panels, partition.counts(data.labels, len(data.classes))


@pytest.mark.parametrize("clients", [1, 8, 31, 120])
def test_every_bubble_has_its_place_and_its_area(clients):
    panels, expected = drawn(dataset(), clients=clients)
    for axes, counts in zip(panels, expected, strict=True):
        (cloud,) = axes.collections
        shown = np.zeros_like(counts)
        sizes = cloud.get_sizes()
        scale = sizes.max() / counts.max()
        for (client, row), size in zip(cloud.get_offsets().astype(int), sizes, strict=True):
            shown[client, row] = round(size / scale)
        np.testing.assert_array_equal(shown, counts)
    assert panels[0].get_xlim() == pytest.approx(panels[1].get_xlim())  # a client keeps its column
    assert inline.svg(panels[0].figure).count("<circle ") == np.count_nonzero(expected)


@pytest.mark.parametrize(("classes", "clients"), [(10, 151), (70, 8)])
def test_crowds_become_a_heat_map_with_every_client_once(classes, clients):
    panels, expected = drawn(dataset(classes, per_class=60 if clients > 8 else 10), clients=clients)
    shown = [np.asarray(axes.images[0].get_array()).T for axes in panels]
    for found, counts in zip(shown, expected, strict=True):
        assert sorted(map(tuple, found)) == sorted(map(tuple, counts))
    assert (np.diff((shown[0] + shown[1]).argmax(axis=1)) >= 0).all()


def test_unknown_classes_have_a_row_of_their_own():
    data = dataset(classes=3, unknown=40)
    partition = make(data, config.PartitionOptions(clients=5, label_fraction=0.3), 0)
    names, labelled, unlabelled = partition_figure.class_counts(summarise(partition, data))
    assert names[3] == "(unknown)"
    assert labelled[:, 3].sum() == 0
    assert unlabelled[:, 3].sum() == 40
    assert [len(part) for part in partition.unlabelled] == unlabelled.sum(axis=1).tolist()


def test_sites_are_named_whatever_they_are_called():
    panels, _ = drawn(
        dataset(classes=3, sites=("north", "a rather long name", "$west$")), setting="sites", label_fraction=None
    )
    labels = [label.get_text() for label in panels[0].get_xticklabels()]
    assert labels[0] == "north"
    assert "west" in labels[2]
