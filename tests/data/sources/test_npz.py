"""Data sets in .npz files."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feddure.data import sources
from feddure.data.sources import npz
from feddure.errors import DataError


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    plain = {
        "images": rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
        "labels": np.array([0, 1, 2, 0, 1, 2], dtype=np.int32),
        "test_images": rng.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8),
        "test_labels": np.array([2, 0], dtype=np.uint8),
    }
    merged = {**plain, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "mine.npz"
    np.savez_compressed(path, **arrays(**changes))
    return path


def test_four_arrays_make_a_data_set(tmp_path):
    dataset = sources.load(f"npz:{write(tmp_path)}")
    np.testing.assert_array_equal(dataset.images, arrays()["images"])
    assert dataset.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.labels.dtype == dataset.test_labels.dtype == np.int64
    assert dataset.classes == ("0", "1", "2")
    assert (dataset.labelled, dataset.site, dataset.sites) == (None, None, ())
    assert (dataset.flip, sources.load(f"npz:{tmp_path / 'mine.npz'}?flip=0").flip) == (True, False)


def test_every_optional_array_is_used(tmp_path):
    given = {
        "classes": np.array(["cafe\u0301", "y", "z", "never seen"]),
        "mean": np.array([0.1, 0.2, 0.3]),
        "std": np.array([1, 2, 3]),
        "labelled": np.array([True, False, True, True, True, True]),
        "site": np.array([1, 1, 0, 0, 1, 1]),
        "sites": np.array(["north", "south"]),
        "test_site": np.array([1, -1]),
    }
    dataset = sources.load(f"npz:{write(tmp_path, **given)}")
    assert dataset.classes == ("caf\u00e9", "y", "z", "never seen")  # composed, as the names of folders are
    for name in ("mean", "std", "labelled", "site", "sites", "test_site"):
        np.testing.assert_array_equal(getattr(dataset, name), given[name])


def test_grey_images_need_no_channel_axis_and_sites_no_names(tmp_path):
    images = np.zeros((6, 5, 7), dtype=np.uint8)
    grey = {"images": images, "test_images": images[:2], "mean": np.float64(0.5), "std": np.float64(0.5)}
    dataset = sources.load(f"npz:{write(tmp_path, **grey, site=np.array([0, 1, 2, 0, 1, 2]))}")
    assert dataset.shape == (5, 7, 1)
    assert dataset.sites == ("0", "1", "2")


def test_unknown_labels_are_unlabelled_images(tmp_path):
    dataset = sources.load(f"npz:{write(tmp_path, labels=np.array([0, -1, 1, -1, 1, 2]))}")
    assert dataset.labelled.tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "no array images"),
        ({"test_labels": None, "labels": None}, "no array labels, test_labels"),
        ({"lables": np.zeros(6)}, "unknown array lables"),
        ({"images": np.zeros((6, 8, 8, 3))}, "float64, expected uint8"),
        ({"labels": np.zeros(6)}, "labels have dtype float64, expected whole numbers"),
        ({"labels": np.array([0, 1, 2, 0, 1, 10**12])}, "count from 0"),
        ({"labels": np.array([0, 1, 2, 0, 1, 2**64 - 1], dtype=np.uint64)}, "labels reach 1844"),
        ({"classes": np.array([1, 2, 3])}, "classes is int64"),
        ({"std": np.array(["a", "b", "c"])}, "std is <U1, expected numbers"),
        ({"labelled": np.ones(6)}, r"labelled is float64 \[6\], expected bool"),
        ({"site": np.zeros(6)}, "site have dtype float64"),
        ({"site": np.array([0, 0, 0, 0, 0, 2])}, "site '1' owns no image"),
    ],
)
def test_a_wrong_array_is_one_error_that_names_the_file(tmp_path, changes, message):
    path = write(tmp_path, **changes)
    with pytest.raises(DataError, match=message) as caught:
        sources.load(f"npz:{path}")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": np.array([0, 1, 0])}, r"site have shape \[3\], expected \[6\]"),
        ({"site": np.array(0)}, r"site have shape \[\], expected \[6\]"),
        ({"labelled": np.array([True, False, True])}, r"labelled have shape \[3\], expected \[6\]"),
        ({"labels": np.array([0, 1])}, r"labels have shape \[2\], expected \[6\]"),
        ({"images": np.array(0)}, r"labels have shape \[6\], expected \[1\]"),
        ({"images": np.array(0), "labels": np.array(0)}, r"labels have shape \[\], expected \[1\]"),
    ],
)
def test_a_wrong_array_is_told_before_tests_are_set_aside(tmp_path, changes, message):
    path = write(tmp_path, test_images=None, test_labels=None, **changes)
    with pytest.raises(DataError, match=message):
        sources.load(f"npz:{path}")


def test_pickled_objects_are_never_loaded(tmp_path):
    marker = tmp_path / "marker"

    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    path = write(tmp_path, labels=np.array([Attack()] * 6, dtype=object))
    with pytest.raises(DataError, match="plain arrays"):
        sources.load(f"npz:{path}")
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x05\x06" + bytes(18)])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mine\.npz"):
        sources.load(f"npz:{path}")


def test_a_member_that_is_no_array_is_refused(tmp_path):
    path = write(tmp_path, labels=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("labels", b"0 1 2 0 1 2")
    with pytest.raises(DataError, match="labels"):
        sources.load(f"npz:{path}")


@pytest.mark.parametrize("name", ["", "absent.npz", "."])
def test_a_file_that_is_not_there_is_an_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        sources.load(f"npz:{name}")


@settings(deadline=None, max_examples=80)
@given(where=st.floats(0, 1), value=st.integers(0, 255), cut=st.booleans())
@example(where=0.9308700601769535, value=122, cut=False)  # hides arrays
def test_a_damaged_file_is_read_or_refused_but_never_crashes(tmp_path_factory, where, value, cut):
    path = write(tmp_path_factory.mktemp("npz"))
    whole = bytearray(path.read_bytes())
    position = int(where * (len(whole) - 1))
    whole[position] = value
    path.write_bytes(whole[:position] if cut else whole)
    try:
        dataset = npz.read(str(path))[0]
    except DataError:
        return
    np.testing.assert_array_equal(dataset.images, arrays()["images"])


def medmnist(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for part, count in (("train", 8), ("val", 4), ("test", 4)):
        found[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        found[f"{part}_labels"] = (np.arange(count, dtype=np.uint8) % 2)[:, None]
    return {name: value for name, value in {**found, **changes}.items() if value is not None}


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_medmnist(tmp_path, kind):
    np.savez(tmp_path / "mnist.npz", **medmnist())
    dataset, found = sources.read(f"{kind}:{tmp_path / 'mnist.npz'}")
    assert dataset.images.shape == (12, 28, 28, 1)
    assert dataset.labels.tolist() == [0, 1] * 6
    assert dataset.test_labels.tolist() == [0, 1] * 2
    assert "MedMNIST" in found.layout
    np.savez(tmp_path / "mnist.npz", **medmnist(test_images=None, test_labels=None))
    dataset, found = sources.read(f"{kind}:{tmp_path / 'mnist.npz'}")
    assert (len(dataset.images), len(dataset.test_images)) == (8, 4)
    np.savez(tmp_path / "mnist.npz", **medmnist(train_labels=np.zeros((8, 14), np.uint8)))
    with pytest.raises(DataError, match="several labels an image"):
        sources.read(f"{kind}:{tmp_path / 'mnist.npz'}")
    np.savez(tmp_path / "mnist.npz", **medmnist(val_labels=None))
    with pytest.raises(DataError, match="no array val_labels"):
        sources.read(f"{kind}:{tmp_path / 'mnist.npz'}")


def test_a_file_without_tests_gives_its_own(tmp_path):
    path = write(tmp_path, test_images=None, test_labels=None, labelled=np.array([True] * 5 + [False]))
    dataset, found = sources.read(f"npz:{path}")
    assert found.split.images == 2
    assert (sorted(dataset.labels.tolist()), sorted(dataset.test_labels.tolist())) == ([0, 1, 2, 2], [0, 1])
    assert len(dataset.labelled) == len(dataset.images) == 4
    assert not dataset.labelled[-1]
    assert len(sources.load(f"npz:{path}?test=0").test_images) == 0


def test_labels_and_sites_may_be_columns(tmp_path):
    given = {"labels": arrays()["labels"], "site": np.array([0, 0, 0, 0, 0, 1])}
    flat, column = (
        sources.load(f"npz:{write(tmp_path, test_images=None, test_labels=None, **changes)}")
        for changes in (given, {name: array[:, None] for name, array in given.items()})
    )
    assert column.fingerprint == flat.fingerprint
    assert column.test_site.tolist() == flat.test_site.tolist() == [0, 0]
