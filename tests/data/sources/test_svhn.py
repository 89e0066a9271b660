"""SVHN in its real format: two MATLAB files, whole and damaged."""

from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure.data import sources
from feddure.data.sources import svhn
from feddure.errors import DataError

LABELS = {"train_32x32.mat": [1, 10, 9, 2], "test_32x32.mat": [10, 5]}


def pixels(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def write_mat(path: Path, images: np.ndarray, labels: np.ndarray, compressed: bool = True) -> None:
    arrays = {"X": images.transpose(1, 2, 3, 0), "y": labels}
    scipy.io.savemat(path, arrays, do_compression=compressed)


def write_svhn(folder: Path, compressed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, labels in LABELS.items():
        write_mat(folder / name, pixels(len(labels)), np.array(labels, np.uint8)[:, None], compressed)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("place", ["svhn", "SVHN", "."])
def test_the_files_are_found_where_people_put_them(tmp_path, place, compressed):
    write_svhn(tmp_path / place, compressed)
    dataset = sources.load("svhn", tmp_path)
    np.testing.assert_array_equal(dataset.images, pixels(4))
    np.testing.assert_array_equal(dataset.test_images, pixels(2))
    assert dataset.labels.tolist() == [1, 0, 9, 2]  # 10 stands for the digit 0
    assert dataset.test_labels.tolist() == [0, 5]
    assert dataset.images.flags.c_contiguous
    assert not dataset.flip
    assert "1: 1 of 13,861" in sources.find_source("svhn").deviations(dataset)[0]


def test_a_missing_file_is_named(tmp_path):
    write_svhn(tmp_path)
    (tmp_path / "test_32x32.mat").unlink()
    with pytest.raises(DataError, match=r"test_32x32\.mat missing"):
        sources.load("svhn", tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (pixels(2)[:, :28], [[1], [2]], r"X is uint8 \[28, 32, 3, 2\]"),
        (pixels(2).astype(np.float32), [[1], [2]], r"X is single \[32, 32, 3, 2\]"),
        (pixels(2), [[1], [2], [3]], r"y is int64 \[3, 1\], expected \[2, 1\]"),
        (pixels(2), [[1], [11]], "label 1 is 11, expected 1 to 10"),
        (pixels(2), [[0], [1]], "label 0 is 0, expected 1 to 10"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, images, labels, message):
    write_svhn(tmp_path)
    bad = tmp_path / "train_32x32.mat"
    write_mat(bad, images, np.array(labels))
    with pytest.raises(DataError, match=message) as caught:
        sources.load("svhn", tmp_path)
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no MATLAB file at all", bytes(200)])
def test_what_is_no_matlab_file_is_one_error(tmp_path, content):
    write_svhn(tmp_path)
    (tmp_path / "test_32x32.mat").write_bytes(content)
    with pytest.raises(DataError, match=r"test_32x32\.mat: "):
        sources.load("svhn", tmp_path)


@settings(deadline=None, max_examples=60)
@given(where=st.floats(0, 1), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_read_or_refused_but_never_crashes(tmp_path_factory, where, value, cut):
    path = tmp_path_factory.mktemp("svhn") / "train_32x32.mat"
    write_mat(path, pixels(1), np.array([[3]]))
    whole = bytearray(path.read_bytes())
    position = int(where * (len(whole) - 1))
    whole[position] = value
    path.write_bytes(bytes(whole[:position] if cut else whole))
    try:
        images, labels = svhn.read_mat(path)
    except DataError:
        return
    assert images.shape == (len(labels), 32, 32, 3)
