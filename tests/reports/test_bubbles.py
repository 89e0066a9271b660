"""The picture of a partition: areas that tell the truth, at any number of clients."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from feddure import config
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import make
from feddure.errors import ConfigError
from feddure.reports import partition_figure as bubbles
from feddure.reports import style


def dataset(classes: int = 10, per_class: int = 60, unknown: int = 0, sites: tuple[str, ...] = ()) -> Dataset:
    labels = np.concatenate([np.arange(classes * per_class) % classes, np.full(unknown, UNKNOWN)])
    images = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8)
    names = tuple(f"class {number}" for number in range(classes))
    site = np.arange(len(labels)) // 7 % len(sites) if sites else None
    labelled = np.arange(len(labels)) % 3 == 0 if sites else None
    return Dataset("synthetic", images, labels, images, labels, names, (0.5,), (0.5,), labelled, sites, site)


def drawn(data: Dataset, **fields) -> tuple[Figure, list[np.ndarray]]:
    """The figure and the counts it must show."""
    options = config.Partition(**{"clients": 8, "label_fraction": 0.3, "setting": "dir-dir", **fields})
    partition = make(data, options, 0)
    return bubbles.figure(partition, data), list(partition.counts(data.labels, len(data.classes)))


def panels(figure: Figure) -> list:
    return [axes for axes in figure.axes if axes.get_title(loc="left")]


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


@pytest.mark.parametrize("clients", [1, 8, 31, 120])
def test_every_bubble_has_its_place_and_its_area(clients):
    figure, expected = drawn(dataset(), clients=clients)
    for axes, counts in zip(panels(figure), expected, strict=True):
        (cloud,) = axes.collections
        shown = np.zeros_like(counts)
        sizes = cloud.get_sizes()
        scale = sizes.max() / counts.max()
        for (client, row), size in zip(cloud.get_offsets().astype(int), sizes, strict=True):
            shown[client, row] = round(size / scale)
        np.testing.assert_array_equal(shown, counts)


def test_few_clients_stand_side_by_side_and_many_above_each_other():
    left, right = (axes.get_position() for axes in panels(drawn(dataset(), clients=30)[0]))
    assert left.x1 < right.x0
    assert left.y0 == right.y0
    upper, lower = (axes.get_position() for axes in panels(drawn(dataset(), clients=31)[0]))
    assert upper.y0 > lower.y1
    assert upper.x0 == lower.x0


def test_a_client_keeps_its_column_in_both_panels():
    upper, lower = panels(drawn(dataset(), clients=100, setting="iid-dir")[0])
    assert upper.get_xlim() == lower.get_xlim()


def test_the_largest_bubble_stays_in_its_row():
    figure, _ = drawn(dataset(), clients=100, gamma=0.05)
    for axes in panels(figure):
        height = axes.get_position().height * figure.get_size_inches()[1] * 72
        assert axes.collections[0].get_sizes().max() ** 0.5 <= height / 10


def test_crowds_become_a_heat_map_with_every_client_once():
    figure, expected = drawn(dataset(), clients=151)
    orders = []
    for axes, counts in zip(panels(figure), expected, strict=True):
        shown = np.asarray(axes.images[0].get_array()).T
        assert sorted(map(tuple, shown)) == sorted(map(tuple, counts))
        orders.append(shown)
    main = (orders[0] + orders[1]).argmax(axis=1)
    assert (np.diff(main) >= 0).all()
    assert "sorted" in panels(figure)[1].get_xlabel()


def test_many_classes_become_a_heat_map():
    figure, _ = drawn(dataset(classes=70, per_class=10))
    assert all(axes.images and not axes.collections for axes in panels(figure))


def test_the_title_says_what_is_shown():
    figure, _ = drawn(dataset(), gamma=0.25)
    for part in (
        "synthetic",
        "dir-dir",
        "8 clients",
        "γ = 0.25",
        "seed 0",
        "internal imbalance 0.",
        "external",
    ):
        assert part in texts(figure)
    assert "γ" not in texts(drawn(dataset(), setting="iid-iid")[0])


def test_unknown_classes_have_a_row_of_their_own():
    data = dataset(classes=3, unknown=40)
    partition = make(data, config.Partition(clients=5, label_fraction=0.3), 0)
    names, labelled, unlabelled = bubbles.class_counts(partition, data)
    assert names == ["class 0", "class 1", "class 2", "(unknown)"]
    assert labelled[:, 3].sum() == 0
    assert unlabelled[:, 3].sum() == 40
    assert [len(part) for part in partition.unlabelled] == unlabelled.sum(axis=1).tolist()


def test_sites_are_named():
    data = dataset(classes=3, sites=("north", "a rather long name", "$west$"))
    partition = make(data, config.Partition(setting="sites"), 0)
    figure = bubbles.figure(partition, data)
    style.render(figure, "png")
    labels = [label.get_text() for label in panels(figure)[0].get_xticklabels()]
    assert labels == ["north", "a rat…g name", r"\$west\$"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_equal_partitions_are_equal_pictures(tmp_path, ending):
    for name in ("one", "two"):
        style.save(drawn(dataset())[0], tmp_path / f"{name}.{ending}")
    assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_files_are_what_their_names_say(tmp_path):
    figure, _ = drawn(dataset())
    for ending in style.FORMATS:
        style.save(figure, tmp_path / f"picture.{ending}")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width == pytest.approx(figure.get_size_inches()[0] * 150, abs=1)
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "picture.pdf").read_bytes().startswith(b"%PDF")


def test_files_that_cannot_be_written_are_errors(tmp_path):
    figure, _ = drawn(dataset())
    with pytest.raises(ConfigError, match=r"to end in \.png, \.svg or \.pdf"):
        style.save(figure, tmp_path / "picture.jpeg")
    with pytest.raises(ConfigError, match="cannot be written"):
        style.save(figure, tmp_path / "missing" / "picture.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        style.save(figure, tmp_path / "folder.png")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]


def test_drawing_leaves_matplotlib_as_it_was():
    def settings() -> dict:
        # Asking for the backend would choose one.
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before = settings()
    style.render(drawn(dataset())[0], "png")
    assert settings() == before


def test_drawing_does_without_pyplot():
    program = (
        "import sys; from feddure.tracking import bubbles, style; "
        "[style.render(style.new_figure(1, 1), ending) for ending in style.FORMATS]; "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_neighbouring_colours_differ_in_lightness():
    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    steps = np.abs(np.diff([lightness(colour) for colour in style.PALETTE]))
    assert steps.min() > 0.02
