"""The file of a partition: equal bytes for equal partitions, and an error for anything but what was saved."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure import config
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition, _seal, make
from feddure.errors import DataError


def dataset(images: int = 18, name: str = "synthetic") -> Dataset:
    pixels = np.arange(images * 4, dtype=np.uint8).reshape(-1, 2, 2, 1)
    labels = np.arange(images) % 3
    return Dataset(name, pixels, labels, pixels[:1], labels[:1], ("a", "b", "c"), (0.5,), (0.25,))


def small() -> Partition:
    return make(dataset(), config.Partition(clients=2, labels_per_class=1), 0)


def test_equal_partitions_are_equal_files(tmp_path):
    for name in ("one.npz", "two.npz"):
        small().save(tmp_path / name)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.npz", "two.npz"]


def test_numpy_reads_the_file_without_this_package(tmp_path):
    partition = small()
    partition.save(tmp_path / "partition.npz")
    with np.load(tmp_path / "partition.npz", allow_pickle=False) as arrays:
        sizes = arrays["labelled_sizes"]
        parts = np.split(arrays["labelled"], np.cumsum(sizes)[:-1])
        assert json.loads(arrays["about"].item())["sha256"] == partition.sha256
    assert all(np.array_equal(one, other) for one, other in zip(parts, partition.labelled, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "partition.npz"
    small().save(path)
    return path


@settings(deadline=None, max_examples=150)
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_an_error(saved, tmp_path_factory, position, flip):
    content = bytearray(saved.read_bytes())
    content[int(position * len(content))] ^= flip
    damaged = tmp_path_factory.getbasetemp() / "damaged.npz"
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.npz: not a partition, or damaged"):
        Partition.load(damaged, dataset())


@settings(deadline=None, max_examples=20)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_an_error(saved, tmp_path_factory, share):
    content = saved.read_bytes()
    damaged = tmp_path_factory.getbasetemp() / "short.npz"
    damaged.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="damaged"):
        Partition.load(damaged, dataset())


def rewritten(path: Path, **changes: np.ndarray) -> bytes:
    """The file with other arrays in it, sealed as if it were genuine."""
    with np.load(path) as arrays:
        kept = {**dict(arrays), **changes}
    buffer = io.BytesIO()
    np.savez(buffer, **kept)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = bytes(64)
    content = buffer.getvalue()[:-64]
    return content + _seal(content)


def test_indices_that_do_not_match_the_hash_are_an_error(saved, tmp_path):
    with np.load(saved) as arrays:
        unlabelled = arrays["unlabelled"].copy()
    unlabelled[[0, -1]] = unlabelled[[-1, 0]]
    (tmp_path / "forged.npz").write_bytes(rewritten(saved, unlabelled=unlabelled))
    with pytest.raises(DataError, match=r"forged\.npz: its indices do not match its hash"):
        Partition.load(tmp_path / "forged.npz", dataset())


def test_a_file_of_another_format_is_an_error(saved, tmp_path):
    with np.load(saved) as arrays:
        about = {**json.loads(arrays["about"].item()), "format": 99}
    (tmp_path / "later.npz").write_bytes(rewritten(saved, about=np.array(json.dumps(about).encode())))
    with pytest.raises(DataError, match="written in format 99"):
        Partition.load(tmp_path / "later.npz", dataset())


def test_a_partition_of_another_data_set_is_an_error(saved):
    with pytest.raises(DataError, match=r"made for data set 'synthetic' with fingerprint .* 'other'"):
        Partition.load(saved, dataset(19, "other"))


def test_files_that_cannot_be_read_or_written_are_errors(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        Partition.load(tmp_path / "none.npz", dataset())
    with pytest.raises(DataError, match="cannot be written"):
        small().save(tmp_path / "missing" / "partition.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        small().save(tmp_path / "folder.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.npz"]
