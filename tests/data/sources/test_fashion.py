"""Fashion-MNIST's idx files, and the part that comes with the package."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure.data import sources
from feddure.data.sources import fashion
from feddure.errors import DataError

LABELS = {"train-labels-idx1-ubyte": [9, 0, 3, 3], "t10k-labels-idx1-ubyte": [1, 2]}


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def pictures(name: str) -> np.ndarray:
    count = 4 if name.startswith("train") else 2
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def content(name: str) -> bytes:
    return idx_bytes(np.array(LABELS[name]) if "labels" in name else pictures(name))


def write_fashion(folder: Path, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in fashion.FILES:
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content(name)))
        else:
            (folder / name).write_bytes(content(name))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["FashionMNIST/raw", "fashion-mnist", "."])
def test_the_files_are_found_where_people_put_them(tmp_path, place, zipped):
    write_fashion(tmp_path / place, zipped)
    dataset = sources.load("fashion-mnist", tmp_path)
    np.testing.assert_array_equal(dataset.images[..., 0], pictures("train"))
    np.testing.assert_array_equal(dataset.test_images[..., 0], pictures("t10k"))
    assert dataset.labels.tolist() == [9, 0, 3, 3]
    assert dataset.test_labels.tolist() == [1, 2]
    assert dataset.labels.dtype == np.int64
    assert dataset.images.flags.writeable
    assert (dataset.mean, dataset.std) == ((0.2860,), (0.3530,))


def test_a_missing_file_is_named(tmp_path):
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte missing"):
        sources.load("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        ("train-images-idx3-ubyte", b"", "begins with nothing, expected 00000803"),
        ("train-images-idx3-ubyte", content("train-labels-idx1-ubyte"), "begins with 00000801, expected 00000803"),
        ("train-images-idx3-ubyte", content("train-images-idx3-ubyte")[:-1], "3135 bytes after the header"),
        ("train-images-idx3-ubyte", content("train-images-idx3-ubyte") + b"x", "more than 3136 bytes after the header"),
        ("train-images-idx3-ubyte", struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3), "expected 7922816"),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((4, 27, 28))), r"shape \[4, 27, 28\], expected .* 28 by 28"),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((0, 28, 28))), r"shape \[0, 28, 28\]"),
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(3)), "3 labels"),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.array([0, 10])), "label 1 is 10, expected 0 to 9"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_bad_file_is_one_error_that_names_it(tmp_path, name, damaged, message, zipped):
    write_fashion(tmp_path, zipped)
    path = tmp_path / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(damaged) if zipped else damaged)
    with pytest.raises(DataError, match=message) as caught:
        sources.load("fashion-mnist", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: b"plain", lambda raw: raw[:40] + b"?" * 9 + raw[49:]]
)
def test_a_damaged_gzip_file_is_one_error(tmp_path, damage):
    write_fashion(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match="not a whole gzip file") as caught:
        sources.load("fashion-mnist", tmp_path)
    assert str(path) in str(caught.value)


@settings(deadline=None, max_examples=40)
@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), data=st.data())
def test_idx_files_are_read_back(tmp_path_factory, shape, data):
    size = int(np.prod(shape))
    array = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).reshape(shape)
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(idx_bytes(array))
    np.testing.assert_array_equal(fashion.read_idx(path, len(shape)), array)


def test_fashion_mini_needs_nothing_and_is_balanced(tmp_path):
    dataset = sources.load("fashion-mini", tmp_path / "absent")
    assert dataset.images.shape == (6000, 28, 28, 1)
    assert dataset.test_images.shape == (1000, 28, 28, 1)
    assert np.bincount(dataset.labels).tolist() == [600] * 10
    assert np.bincount(dataset.test_labels).tolist() == [100] * 10
    # Fashion-MNIST begins with an ankle boot and two T-shirts: the original order was kept.
    assert dataset.labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert dataset.classes[9] == "Ankle boot"
    assert len(np.unique(dataset.images.reshape(6000, -1), axis=0)) > 5990


def test_a_changed_fashion_mini_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "fashion-mini.npz"
    raw = bytearray(fashion.MINI.read_bytes())
    raw[len(raw) // 2] ^= 1
    copy.write_bytes(raw)
    monkeypatch.setattr(fashion, "MINI", copy)
    with pytest.raises(DataError, match="install the package again"):
        sources.load("fashion-mini")


@pytest.mark.skipif("FEDDURE_DATA" not in os.environ, reason="FEDDURE_DATA does not name the real data sets")
def test_fashion_mini_is_the_first_images_of_each_class_in_file_order():
    if sources.find_source("fashion-mnist").find(sources.default_data_dir()) is None:
        pytest.skip("fashion-mnist is not there")
    full, mini = sources.load("fashion-mnist"), sources.load("fashion-mini")
    for split, count in (("", 600), ("test_", 100)):
        labels, images = getattr(full, f"{split}labels"), getattr(full, f"{split}images")
        seen = [0] * 10
        chosen = []
        for position, label in enumerate(labels):
            if seen[label] < count:
                seen[label] += 1
                chosen.append(position)
        np.testing.assert_array_equal(getattr(mini, f"{split}images"), images[chosen])
        np.testing.assert_array_equal(getattr(mini, f"{split}labels"), labels[chosen])
