"""Folders of the user's own images."""

import os
import shutil
import sys
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddure.data import sources
from feddure.errors import DataError, FeddureWarning

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


def test_labelled_unlabelled_and_test_images_are_told_apart(tmp_path):
    dataset = sources.load(f"folder:{write_folder(tmp_path)}?size=8")
    assert dataset.classes == ("ant", "bee")
    assert dataset.labels.tolist() == [0, 0, 1, 1, -1, -1]
    assert dataset.labelled.tolist() == [True] * 4 + [False] * 2
    red, green = map(list, COLOURS.values())
    assert dataset.images[:, 0, 0].tolist() == [red, red, green, green, [0, 0, 99], [0, 0, 255]]
    assert dataset.test_labels.tolist() == [0, 1]
    assert dataset.test_images[:, 0, 0].tolist() == [red, green]
    assert (dataset.site, dataset.sites) == (None, ())
    np.testing.assert_allclose(dataset.mean, (dataset.images / 255).mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(dataset.std, (dataset.images / 255).std(axis=(0, 1, 2)))


@pytest.mark.parametrize(("options", "shape"), [("", (32, 32, 3)), ("?size=9&channels=1", (9, 9, 1))])
def test_size_and_channels_are_options_of_the_name(tmp_path, options, shape):
    name = f"folder:{write_folder(tmp_path)}{options}"
    dataset = sources.load(name)
    assert dataset.shape == shape
    assert dataset.test_images.shape[1:] == shape
    assert dataset.name == name


def test_a_name_may_say_that_left_and_right_differ(tmp_path):
    usual, never = (sources.load(f"folder:{write_folder(tmp_path)}{options}") for options in ("", "?flip=0"))
    assert (usual.flip, never.flip) == (True, False)
    assert usual.fingerprint != never.fingerprint  # they are not trained on alike


def test_sites_are_clients(tmp_path):
    dataset = sources.load(f"folder:{write_sites(tmp_path)}?size=8")
    assert dataset.sites == ("east", "north", "west")
    assert dataset.site.tolist() == [0, 1, 1, 2]
    assert dataset.classes == ("ant", "bee")
    assert dataset.labels.tolist() == [0, 1, -1, -1]
    assert dataset.labelled.tolist() == [True, True, False, False]


def mac(name: str) -> str:
    """A name as a Mac writes it: ä in two characters."""
    decomposed = unicodedata.normalize("NFD", name)
    assert decomposed != name
    return decomposed


def test_folders_made_on_a_mac_have_the_same_classes_and_sites(tmp_path):
    for name, write in (("linux", lambda name: name), ("mac", mac), ("mixed", None)):
        west = tmp_path / name / "clients" / (write or mac)("Köln")
        east = tmp_path / name / "clients" / (write or str)("Märkisch")
        paint(west / "labelled" / (write or mac)("Läsion klein") / "1.png", COLOURS["ant"])
        paint(west / "labelled" / "ohne" / "1.png", COLOURS["bee"])
        paint(east / "labelled" / (write or str)("Läsion klein") / "2.png", COLOURS["bee"])
        paint(tmp_path / name / "test" / (write or str)("Läsion klein") / "1.png", COLOURS["ant"])
    expected = sources.load(f"folder:{tmp_path / 'linux'}?size=8")
    assert expected.classes == ("Läsion klein", "ohne")
    assert expected.sites == ("Köln", "Märkisch")
    for name in ("mac", "mixed"):
        found = sources.load(f"folder:{tmp_path / name}?size=8")
        assert (found.classes, found.sites) == (expected.classes, expected.sites)
        assert found.fingerprint == expected.fingerprint
        assert found.test_labels.tolist() == [0]


def write_deep(root: Path, white: int) -> Path:
    """16-bit files whose brightest value is `white`, and one of 8 bits."""
    for number, place in enumerate(("labelled/ant/1", "labelled/bee/1", "unlabelled/1", "test/ant/1")):
        (root / place).parent.mkdir(parents=True)
        values = np.roll(np.linspace(0, white, 64), number).reshape(8, 8).astype(np.uint16)
        Image.fromarray(values).save(root / f"{place}.png")
    paint(root / "test" / "bee" / "1.png", (40, 40, 40))
    return root


def test_twelve_bit_images_are_scaled_where_the_user_says_so(tmp_path):
    name = f"folder:{write_deep(tmp_path, 4095)}?size=8&channels=1"
    with pytest.warns(
        FeddureWarning, match=r"4 16-bit image.* up to 4,095 .*ant/1.png.*: were they 12-bit\?.*depth=12"
    ) as noted:
        assert sources.load(name).images.max() == 16
    assert len(noted) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = sources.load(f"{name}&depth=12")
    assert dataset.images[0, :, :, 0].tolist() == np.linspace(0, 255, 64).reshape(8, 8).round().tolist()
    assert dataset.test_images[1].max() == 40
    with pytest.raises(DataError, match=r"ant/1.png: has pixels up to 4095, but depth=10"):
        sources.load(f"{name}&depth=10")


def test_images_that_use_their_sixteen_bits_are_not_noted(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sources.load(f"folder:{write_deep(tmp_path, 20000)}?size=8").images.max() == 78


def test_files_that_file_managers_leave_are_passed_over(tmp_path):
    before = sources.load(f"folder:{write_folder(tmp_path)}").fingerprint
    for litter in ("labelled/.DS_Store", "labelled/ant/Thumbs.db", "unlabelled/._u.png", "test/bee/desktop.ini"):
        (tmp_path / litter).write_text("litter")
    for other in ("labelled/labels.txt", "labelled/ant/README", "unlabelled/scan.dcm", "test/bee/notes.txt"):
        (tmp_path / other).write_text("no image")
    os.mkfifo(tmp_path / "unlabelled" / "pipe")
    (tmp_path / "README.txt").write_text("about these images")
    (tmp_path / ".git").mkdir()
    dataset, found = sources.read(f"folder:{tmp_path}")
    assert dataset.fingerprint == before
    assert found.ignored == {".txt": 2, "without ending": 2, ".dcm": 1}


def test_unlabelled_images_and_test_images_of_a_class_may_be_missing(tmp_path):
    write_folder(tmp_path)
    for part in ("unlabelled", "test/ant"):
        shutil.rmtree(tmp_path / part)
    dataset = sources.load(f"folder:{tmp_path}")
    assert dataset.labelled.tolist() == [True] * 4
    assert dataset.test_labels.tolist() == [1]


def test_a_linked_folder_is_followed(tmp_path):
    root = write_folder(tmp_path / "root")
    (root / "unlabelled").rename(tmp_path / "elsewhere")
    (root / "unlabelled").symlink_to(tmp_path / "elsewhere")
    assert len(sources.load(f"folder:{root}").images) == 6


def remove(path):
    return lambda root: shutil.rmtree(root / path)


def put(path, content=b"no image"):
    def write(root):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    return write


def add(path):
    return lambda root: paint(root / path)


def mkdir(path):
    return lambda root: (root / path).mkdir(parents=True)


def link(path, target):
    return lambda root: (root / path).symlink_to(root / target)


def truncate(path):
    def cut(root):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(root / path)
        (root / path).write_bytes((root / path).read_bytes()[:-600])

    return cut


def two_spellings(root):
    for name in ("Köln", mac("Köln")):
        paint(root / "clients" / name / "labelled" / "ant" / "1.png")


def test_a_folder_may_have_no_test_images(tmp_path):
    remove("test")(write_folder(tmp_path))
    assert sources.load(f"folder:{tmp_path}?size=8&test=0").test_images.shape == (0, 8, 8, 3)
    assert sources.load(f"folder:{tmp_path}?size=8").test_labels.tolist() == [0, 1]


MISTAKES = [
    (remove("labelled"), "classes: none; expected 2 or more"),
    (remove("labelled/bee"), "classes: ant; expected 2 or more"),
    (put("labelled/cat/notes.txt"), "labelled/cat: no images in it, but .txt"),
    (put("test/ant/empty.png", b""), "test/ant/empty.png: is empty"),
    (truncate("labelled/ant/0.png"), "labelled/ant/0.png: cannot be decoded"),
    (put("labelled/loose.png"), "labelled/loose.png: expected only folders here"),
    (put("test/loose.png"), "test/loose.png: expected only folders here"),
    (mkdir("labelled/cat"), "labelled/cat: no images in it"),
    (put("labelled/cat/.DS_Store"), "labelled/cat: no images in it"),
    (mkdir("unlabeled"), "unlabelled: unlabeled/ is there too; keep one"),
    (mkdir("unlabelt"), "unlabelt: unknown folder in .*; expected .*unlabelled"),
    (mkdir("clients/a"), "use one of the two layouts"),
    (add("test/cat/c.png"), "test/cat: no labelled image .* ant, bee"),
    (link("unlabelled/loop", "unlabelled"), "unlabelled/loop: a link to a folder that is read already"),
    (link("labelled/ant/gone.png", "nowhere.png"), "labelled/ant/gone.png: cannot be read"),
]
MISTAKES_OF_SITES = [
    (mkdir("clients/idle"), "idle: neither labelled/ nor unlabelled/"),
    (put("clients/loose.png"), "loose.png: expected only folders here; .* its site"),
    (mkdir("clients/north/labelt"), "north/labelt: unknown folder"),
    (mkdir("clients/north/labelled/cat"), "north/labelled/cat: no images in it"),
    (mkdir("labelled"), "use one of the two layouts"),
    (lambda root: (remove("clients")(root), mkdir("clients")(root)), "clients: is empty"),
    (add("clients/west/labelled/Ant/1.png"), "west/labelled/Ant: the class 'Ant' is written 'ant' in .*/ant"),
    (add("test/BEE/1.png"), "test/BEE: the class 'BEE' is written 'bee' in .*north/labelled/bee"),
    (add("clients/North/labelled/bee/1.png"), "clients/north: the site 'north' is written 'North' in .*/North"),
    (two_spellings, "the site '.*ln' is written"),
]


@pytest.mark.parametrize(
    ("write", "damage", "message"),
    [*((write_folder, *case) for case in MISTAKES), *((write_sites, *case) for case in MISTAKES_OF_SITES)],
)
def test_a_mistake_in_a_folder_is_one_error_that_names_it(tmp_path, write, damage, message):
    damage(write(tmp_path))
    with pytest.raises(DataError, match=message):
        sources.load(f"folder:{tmp_path}")


def test_all_mistakes_are_named_at_once(tmp_path):
    root = write_folder(tmp_path)
    for damage in (mkdir("labelled/cat"), put("test/loose.png"), mkdir("unlabelt"), mkdir("labelled/dog")):
        damage(root)
    paint(root / "test" / "Ant" / "1.png")
    with pytest.raises(DataError) as caught:
        sources.load(f"folder:{root}")
    places = [line.partition(": ")[0] for line in str(caught.value).splitlines()]
    expected = ("unlabelt", "labelled/cat", "labelled/dog", "test/loose.png", "test/Ant")
    assert sorted(places) == sorted(str(root / place) for place in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("?colour=3", "unknown option 'colour'; there are: size, channels, depth, test"),
        ("?size=big", "size is 'big', expected a whole number"),
        ("?size=-8", "size is -8, expected 5 to 4096"),
        ("?size=4", "size is 4, expected 5 to 4096"),
        ("?channels=4", "channels is 4, expected 1 .* or 3"),
        ("?depth=32", "depth is 32, expected 8 to 16 bits"),
        ("?size", "expected options like"),
        ("?test=1", "test is '1', expected a share"),
        ("?test=nan", "test is 'nan', expected a share"),
        ("?split_seed=-1", "split_seed is -1"),
        ("/nowhere", "there is no folder"),
    ],
)
def test_a_mistake_in_the_name_is_explained(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        sources.load(f"folder:{tmp_path}{options}")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf8_are_read_as_latin1(tmp_path):
    for name in (b"caf\xe9", b"th\xe9"):
        paint(tmp_path / "labelled" / os.fsdecode(name) / os.fsdecode(b"\xe9.png"))
    paint(tmp_path / "unlabelled" / "1.png")
    assert sources.load(f"folder:{tmp_path}?size=8").classes == ("café", "thé")
