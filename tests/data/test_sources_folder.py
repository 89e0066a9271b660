"""Folders of the user's own images."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddure.data import sources
from feddure.data.sources import images
from feddure.errors import DataError

COLOURS = {"ant": (200, 10, 10), "bee": (10, 200, 10)}


def paint(path: Path, colour: tuple[int, int, int] = (1, 2, 3), size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), colour).save(path)


def write_folder(root: Path) -> Path:
    for kind, colour in COLOURS.items():
        for number in range(2):
            paint(root / "labelled" / kind / f"{number}.png", colour)
        paint(root / "test" / kind / "t.png", colour)
    paint(root / "unlabelled" / "deep" / "down" / "u.png", (0, 0, 255))
    paint(root / "unlabelled" / "a.png", (0, 0, 99))
    return root


def write_sites(root: Path) -> Path:
    paint(root / "clients" / "north" / "labelled" / "bee" / "1.png", COLOURS["bee"])
    paint(root / "clients" / "north" / "unlabelled" / "2.png", (0, 0, 7))
    paint(root / "clients" / "east" / "labelled" / "ant" / "1.png", COLOURS["ant"])
    paint(root / "clients" / "west" / "unlabelled" / "1.png", (0, 0, 9))
    paint(root / "test" / "ant" / "t.png", COLOURS["ant"])
    return root


def test_labelled_unlabelled_and_test_images_are_told_apart(tmp_path: Path) -> None:
    dataset = sources.load(f"folder:{write_folder(tmp_path)}?size=8")
    assert dataset.classes == ("ant", "bee")
    assert dataset.labels.tolist() == [0, 0, 1, 1, -1, -1]
    assert dataset.labelled is not None
    assert dataset.labelled.tolist() == [True] * 4 + [False] * 2
    assert dataset.images[:, 0, 0].tolist() == [
        [200, 10, 10],
        [200, 10, 10],
        [10, 200, 10],
        [10, 200, 10],
        [0, 0, 99],
        [0, 0, 255],
    ]
    assert dataset.test_labels.tolist() == [0, 1]
    assert dataset.test_images[:, 0, 0].tolist() == [[200, 10, 10], [10, 200, 10]]
    assert (dataset.site, dataset.sites) == (None, ())


def test_mean_and_deviation_come_from_the_training_images(tmp_path: Path) -> None:
    dataset = sources.load(f"folder:{write_folder(tmp_path)}")
    np.testing.assert_allclose(dataset.mean, (dataset.images / 255).mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(dataset.std, (dataset.images / 255).std(axis=(0, 1, 2)))


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ("", (32, 32, 3)),
        ("?size=16", (16, 16, 3)),
        ("?channels=1", (32, 32, 1)),
        ("?size=9&channels=1", (9, 9, 1)),
    ],
)
def test_size_and_channels_are_options_of_the_name(tmp_path: Path, options: str, shape: tuple[int, int, int]) -> None:
    name = f"folder:{write_folder(tmp_path)}{options}"
    dataset = sources.load(name)
    assert dataset.shape == shape
    assert dataset.test_images.shape[1:] == shape
    assert dataset.name == name


def test_sites_are_clients(tmp_path: Path) -> None:
    dataset = sources.load(f"folder:{write_sites(tmp_path)}?size=8")
    assert dataset.sites == ("east", "north", "west")
    assert dataset.site is not None
    assert dataset.site.tolist() == [0, 1, 1, 2]
    assert dataset.classes == ("ant", "bee")
    assert dataset.labels.tolist() == [0, 1, -1, -1]
    assert dataset.labelled is not None
    assert dataset.labelled.tolist() == [True, True, False, False]


def test_files_that_file_managers_leave_are_passed_over(tmp_path: Path) -> None:
    before = sources.load(f"folder:{write_folder(tmp_path)}").fingerprint
    for litter in (
        "labelled/.DS_Store",
        "labelled/ant/Thumbs.db",
        "unlabelled/._u.png",
        "test/bee/desktop.ini",
    ):
        (tmp_path / litter).write_text("litter")
    (tmp_path / "README.txt").write_text("about these images")
    (tmp_path / ".git").mkdir()
    assert sources.load(f"folder:{tmp_path}").fingerprint == before


def test_unlabelled_images_may_be_missing(tmp_path: Path) -> None:
    shutil.rmtree(write_folder(tmp_path) / "unlabelled")
    dataset = sources.load(f"folder:{tmp_path}")
    assert dataset.labelled is not None
    assert dataset.labelled.all()


def test_a_class_may_have_no_test_images(tmp_path: Path) -> None:
    shutil.rmtree(write_folder(tmp_path) / "test" / "ant")
    assert sources.load(f"folder:{tmp_path}").test_labels.tolist() == [1]


def test_a_linked_folder_is_followed(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "root")
    (root / "unlabelled").rename(tmp_path / "elsewhere")
    (root / "unlabelled").symlink_to(tmp_path / "elsewhere")
    assert len(sources.load(f"folder:{root}").images) == 6


def remove(path: str) -> Callable[[Path], None]:
    return lambda root: shutil.rmtree(root / path)


def put(path: str, content: bytes = b"no image") -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    return write


def truncate(path: str) -> Callable[[Path], None]:
    def cut(root: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / path)
        (root / path).write_bytes((root / path).read_bytes()[:-600])

    return cut


def mkdir(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).mkdir(parents=True)


def link(path: str, target: str) -> Callable[[Path], None]:
    return lambda root: (root / path).symlink_to(root / target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("test"), "no test/ folder"),
        (remove("labelled"), "classes in labelled/: none; expected 2 or more"),
        (remove("labelled/bee"), "classes in labelled/: ant; expected 2 or more"),
        (put("labelled/ant/notes.txt"), "labelled/ant/notes.txt: is not an image"),
        (put("unlabelled/notes.txt"), "unlabelled/notes.txt: is not an image"),
        (put("test/ant/empty.png", b""), "test/ant/empty.png: is not an image"),
        (truncate("labelled/ant/0.png"), "labelled/ant/0.png: cannot be decoded"),
        (put("labelled/loose.png"), "labelled/loose.png: expected only folders here"),
        (put("test/loose.png"), "test/loose.png: expected only folders here"),
        (mkdir("labelled/cat"), "labelled/cat: no images in it"),
        (put("labelled/cat/.DS_Store"), "labelled/cat: no images in it"),
        (mkdir("unlabeled"), "unlabeled: unknown folder; expected .*unlabelled"),
        (mkdir("clients/a"), "use one of the two layouts"),
        (lambda root: paint(root / "test" / "cat" / "c.png"), "test/cat: no labelled folder .* ant, bee"),
        (link("unlabelled/loop", "unlabelled"), "unlabelled/loop: a link to a folder that it lies in"),
        (link("labelled/ant/gone.png", "nowhere.png"), "labelled/ant/gone.png: cannot be decoded"),
    ],
)
def test_a_mistake_in_the_folder_is_one_error_that_names_the_place(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(write_folder(tmp_path))
    with pytest.raises(DataError, match=message):
        sources.load(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (mkdir("clients/idle"), "idle: neither labelled/ nor unlabelled/"),
        (put("clients/loose.png"), "loose.png: expected only folders here; .* its site"),
        (mkdir("clients/north/labeled"), "north/labeled: unknown folder"),
        (mkdir("clients/north/labelled/cat"), "north/labelled/cat: no images in it"),
        (mkdir("labelled"), "use one of the two layouts"),
        (lambda root: (remove("clients")(root), mkdir("clients")(root)), "clients: is empty"),
    ],
)
def test_a_mistake_in_the_sites_is_one_error(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(write_sites(tmp_path))
    with pytest.raises(DataError, match=message):
        sources.load(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("?colour=3", "unknown option 'colour'; there are: size, channels"),
        ("?size=big", "size is 'big', expected a whole number"),
        ("?size=-8", "expected a whole number"),
        ("?size=0", "size is 0, expected 1 to 4096"),
        ("?channels=4", "channels is 4, expected 1 .* or 3"),
        ("?size", "expected options like"),
    ],
)
def test_a_mistake_in_the_options_is_explained(tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sources.load(f"folder:{write_folder(tmp_path)}{options}")


@pytest.mark.parametrize("path", ["", "no/such/folder"])
def test_a_folder_that_is_not_there_is_an_error(path: str) -> None:
    with pytest.raises(DataError, match="there is no"):
        sources.load(f"folder:{path}")


def test_images_are_decoded_by_the_rule(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "labelled" / "ant" / "0.png")
    dataset = sources.load(f"folder:{root}?size=20")
    np.testing.assert_array_equal(dataset.images[0], images.read(root / "labelled" / "ant" / "0.png", 20, 3))
