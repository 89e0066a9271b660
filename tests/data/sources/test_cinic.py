"""CINIC-10's tree of PNG files and the file it is decoded into."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddure.data import sources
from feddure.data.sources import cinic
from feddure.errors import DataError, FeddureWarning


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cinic, "cache_dir", lambda: tmp_path / "cache")


def pixels(label: int, number: int) -> np.ndarray:
    return np.random.default_rng((label, number)).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def write_cinic(data_dir: Path, name: str = "CINIC-10") -> Path:
    for split, numbers in (("train", (0, 1)), ("valid", (5,)), ("test", (2,))):
        for label, kind in enumerate(cinic.CLASSES):
            (data_dir / name / split / kind).mkdir(parents=True)
            for number in numbers:
                Image.fromarray(pixels(label, number)).save(data_dir / name / split / kind / f"{number}.png")
    return data_dir


def no_decoding(*_: object) -> np.ndarray:
    raise AssertionError("decoded although the decoded file was there")


@pytest.mark.parametrize("name", ["cinic10", "CINIC-10"])
def test_train_and_test_are_read_and_valid_is_not(tmp_path, name):
    dataset = sources.load("cinic10", write_cinic(tmp_path / "data", name))
    assert dataset.images.shape == (20, 32, 32, 3)
    assert dataset.labels.tolist() == [label for label in range(10) for _ in range(2)]
    np.testing.assert_array_equal(dataset.images[7], pixels(3, 1))
    np.testing.assert_array_equal(dataset.test_images[4], pixels(4, 2))
    assert dataset.test_labels.tolist() == list(range(10))


def test_the_second_load_decodes_nothing_and_is_the_same(tmp_path, monkeypatch):
    data_dir = write_cinic(tmp_path / "data")
    first = sources.load("cinic10", data_dir)
    assert sorted(path.name for path in data_dir.iterdir()) == ["CINIC-10", "cinic10-decoded.npz"]
    monkeypatch.setattr(cinic, "decode", no_decoding)
    second = sources.load("cinic10", data_dir)
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(second.test_images, first.test_images)
    np.testing.assert_array_equal(second.test_labels, first.test_labels)


def replace(folder: Path) -> None:
    path = folder / "old.png"
    status = path.stat()
    Image.fromarray(pixels(99, 99)).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))  # older than before, not newer


def add(folder: Path) -> None:
    shutil.copy2(folder / "old.png", folder / "new.png")


def remove(folder: Path) -> None:
    (folder / "old.png").unlink()


@pytest.mark.parametrize(("change", "split"), [(replace, "train"), (replace, "test"), (add, "train"), (remove, "test")])
def test_a_changed_tree_is_decoded_again(tmp_path, change, split):
    data_dir = write_cinic(tmp_path / "data")
    folder = data_dir / "CINIC-10" / split / "bird"
    Image.fromarray(pixels(2, 7)).save(folder / "old.png")
    sources.load("cinic10", data_dir)
    change(folder)
    again = sources.load("cinic10", data_dir)
    (data_dir / "cinic10-decoded.npz").unlink()
    fresh = sources.load("cinic10", data_dir)
    np.testing.assert_array_equal(again.images, fresh.images)
    np.testing.assert_array_equal(again.test_images, fresh.test_images)


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_a_damaged_decoded_file_is_made_again(tmp_path, content):
    data_dir = write_cinic(tmp_path / "data")
    first = sources.load("cinic10", data_dir)
    store = data_dir / "cinic10-decoded.npz"
    raw = bytearray(store.read_bytes())
    raw[len(raw) // 2] ^= 255
    store.write_bytes(bytes(raw) if content is None else content)
    assert sources.load("cinic10", data_dir).fingerprint == first.fingerprint
    with np.load(store) as arrays:
        np.testing.assert_array_equal(arrays["images"], first.images)


def test_a_folder_that_cannot_be_written_leaves_the_decoded_file_in_the_cache(tmp_path, monkeypatch):
    data_dir = write_cinic(tmp_path / "data")
    (data_dir / "cinic10-decoded.npz").mkdir()  # a file cannot take this name now
    first = sources.load("cinic10", data_dir)
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(cinic, "decode", no_decoding)
        assert sources.load("cinic10", data_dir).fingerprint == first.fingerprint
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(FeddureWarning, match="decodes every image again"):
        assert sources.load("cinic10", data_dir).fingerprint == first.fingerprint


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: shutil.rmtree(root / "train" / "dog"), "train/dog: cannot be read"),
        (lambda root: empty(root / "train" / "dog"), "train/dog: no images in it"),
        (lambda root: (root / "test" / "cat" / "2.png").write_bytes(b"x"), "test/cat/2.png: is not an image"),
        (
            lambda root: (root / "train" / "cat" / "notes.txt").write_text("x"),
            "cat/notes.txt: is not an image",
        ),
        (
            lambda root: Image.new("RGB", (33, 32)).save(root / "train" / "cat" / "0.png"),
            "train/cat/0.png: is 33×32 pixels, expected 32×32",
        ),
        (
            lambda root: (root / "train" / "cat" / "l.png").symlink_to(root / "none"),
            "cat/l.png: cannot be read",
        ),
    ],
)
def test_a_damaged_tree_is_one_error_and_nothing_is_written(tmp_path, damage, message):
    data_dir = write_cinic(tmp_path / "data")
    damage(data_dir / "CINIC-10")
    with pytest.raises(DataError, match=message):
        sources.load("cinic10", data_dir)
    assert [path.name for path in data_dir.iterdir()] == ["CINIC-10"]
    assert not (tmp_path / "cache").exists()
