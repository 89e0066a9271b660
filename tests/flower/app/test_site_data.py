"""A site's folder: what is taken, what is refused, what is left out, and what is kept in the cache."""

import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import federated
from feddure.data.dataset import check
from feddure.errors import ConfigError, DataError
from feddure.flower.app import site_data
from feddure.flower.app.site_data import ImageFolder


@pytest.fixture
def folder(tmp_path):
    return federated.write_images(tmp_path) / "images" / "clients" / "north"


def load(folder, cache=None):
    return site_data.load(ImageFolder(folder), federated.DESCRIPTION, cache)


def test_images_come_in_the_simulators_order(tmp_path):
    root = federated.write_images(tmp_path)
    simulated = federated.simulator(root, federated.experiment())
    for client, site in enumerate(federated.SITES):
        found = load(root / "images" / "clients" / site)
        for kind in ("labelled", "unlabelled"):
            own, theirs = getattr(found, kind), getattr(simulated.partition, kind)[client]
            assert np.array_equal(found.dataset.images[own], simulated.dataset.images[theirs])
            assert np.array_equal(found.dataset.labels[own], simulated.dataset.labels[theirs])


def test_class_numbers_are_the_descriptions_not_the_alphabets(folder):
    other = federated.DESCRIPTION.model_copy(update={"classes": ("d", "c", "b", "a")})
    found = site_data.load(ImageFolder(folder), other)
    expected = load(folder)
    assert np.array_equal(found.dataset.labels[found.labelled], 3 - expected.dataset.labels[expected.labelled])


def test_the_description_says_whether_views_may_be_mirrored(folder):
    never = federated.DESCRIPTION.model_copy(update={"flip": False})
    assert load(folder).dataset.flip
    assert not site_data.load(ImageFolder(folder), never).dataset.flip
    assert not site_data.without_images(never).flip


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("labelled/A", r"labelled/A: .* has no class 'A'; there are: a, b, c, d; did you mean 'a'\?"),
        ("unlabeled", r"unlabeled: unknown folder; .*did you mean 'unlabelled'\?"),
    ],
)
def test_a_folder_that_the_description_does_not_know_is_refused(folder, name, problem):
    (folder / name).mkdir()
    with pytest.raises(DataError, match=problem):
        load(folder)


def test_a_class_folder_made_on_a_mac_is_its_class(folder):
    (folder / "labelled" / "a").rename(folder / "labelled" / unicodedata.normalize("NFD", "Läsion"))
    umlaut = federated.DESCRIPTION.model_copy(update={"classes": ("Läsion", "b", "c", "d")})
    assert site_data.load(ImageFolder(folder), umlaut).counts()["Läsion"] > 0


def test_an_unreadable_file_is_left_out_and_named(folder):
    whole = load(folder)
    (folder / "labelled" / "a" / "000.txt").write_text("no image")
    (folder / "unlabelled" / "zzz.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    found = load(folder)
    assert [file for file, _ in found.unreadable] == ["labelled/a/000.txt", "unlabelled/zzz.png"]
    assert "not an image" in found.unreadable[0][1]
    assert np.array_equal(found.dataset.images, whole.dataset.images)
    assert np.array_equal(found.dataset.labels, whole.dataset.labels)


def test_own_test_images_are_no_training_images(folder):
    shutil.move(folder / "labelled" / "c", folder / "test" / "c")
    found = load(folder)
    assert set(found.dataset.test_labels) == {2}
    assert 2 not in found.dataset.labels
    check(found.dataset, "site")


# --- the cache ---------------------------------------------------------------------------------------------
def forget_decoding(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("decoded again")

    monkeypatch.setattr(site_data, "decode", fail)


def same(one, other):
    return all(
        np.array_equal(getattr(one.dataset, name), getattr(other.dataset, name))
        for name in ("images", "labels", "test_images", "test_labels")
    )


def test_the_second_time_nothing_is_decoded(folder, tmp_path, monkeypatch):
    (folder / "unlabelled" / "broken.png").write_bytes(b"no image")
    first = load(folder, tmp_path / "cache")
    forget_decoding(monkeypatch)
    second = load(folder, tmp_path / "cache")
    assert same(first, second)
    assert second.unreadable == first.unreadable


def test_a_changed_file_is_decoded_again_and_the_old_cache_goes(folder, tmp_path):
    load(folder, tmp_path / "cache")
    file = next((folder / "unlabelled").iterdir())
    federated.write(file, np.full((16, 16, 1), 7, dtype=np.uint8))
    found = load(folder, tmp_path / "cache")
    assert (found.dataset.images[found.unlabelled] == 7).all(axis=(1, 2, 3)).any()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_damaged_cache_is_made_again(folder, tmp_path):
    first = load(folder, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert same(load(folder, tmp_path / "cache"), first)


# --- the server's test folder ------------------------------------------------------------------------------
def test_the_servers_test_images(tmp_path):
    root = federated.write_images(tmp_path)
    (root / "images" / "test" / "a" / "broken.png").write_bytes(b"no image")
    dataset, unreadable = site_data.load_tests(ImageFolder(root / "images" / "test"), federated.DESCRIPTION)
    assert len(dataset.images) == 0
    assert np.bincount(dataset.test_labels).tolist() == [6, 6, 6, 6]
    assert [file for file, _ in unreadable] == ["a/broken.png"]
    for path in (root / "images" / "test").rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match="no readable image to test on"):
        site_data.load_tests(ImageFolder(root / "images" / "test"), federated.DESCRIPTION)


def test_nobody_else_can_read_the_pixels(folder, tmp_path):
    """Also where an earlier cache was open to all."""
    cache = tmp_path / "state" / "cache"
    load(folder, cache)
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent)] == [0o700, 0o700]
    cache.chmod(0o755)
    load(folder, cache)
    assert cache.stat().st_mode & 0o777 == 0o700


# --- files of fewer bits --------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::feddure.errors.FeddureWarning")
def test_greys_of_12_bits_become_white_and_have_a_cache_of_their_own(folder, tmp_path):
    deep = np.full((12, 12), 4095, dtype=np.uint16)
    Image.fromarray(deep).save(folder / "unlabelled" / "deep.png")
    brightest = [
        load_deep(folder, tmp_path / "cache", depth).dataset.images.max(axis=(1, 2, 3)) for depth in (16, 12, 16)
    ]
    assert [(values == 255).sum() - (brightest[0] == 255).sum() for values in brightest] == [0, 1, 0]


def load_deep(folder, cache, depth):
    return site_data.load(ImageFolder(folder, depth), federated.DESCRIPTION, cache)


# --- folders as options name them ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/images", ImageFolder(Path("/images"), 16)),
        ("/what?depth=12", ImageFolder(Path("/what?depth=12"), 16)),  # a folder may be called so
        ("folder:/images", ImageFolder(Path("/images"), 16)),
        ("folder:/images?depth=12", ImageFolder(Path("/images"), 12)),
    ],
)
def test_a_place_is_read(text, expected):
    assert ImageFolder.parse(text, "--data") == expected


@pytest.mark.parametrize("text", ["folder:a?depth", "folder:a?depth=7", "folder:a?depth=x", "folder:a?size=32"])
def test_a_mistake_is_explained(text):
    with pytest.raises(ConfigError, match=rf"--data {re.escape(text)}: .*depth.* federation.yaml"):
        ImageFolder.parse(text, "--data")
