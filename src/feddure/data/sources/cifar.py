"""CIFAR-10 (Krizhevsky, 2009), from the official "python version": a folder of batches or the archive."""

import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources.pickled import read_batch
from feddure.data.sources.places import missing
from feddure.data.sources.source import Source
from feddure.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
BATCHES = (*TRAIN, TEST)


def find(data_dir: Path) -> Path | None:
    """The folder with all six batches, or the archive."""
    for folder in _folders(data_dir):
        if all((folder / name).is_file() for name in BATCHES):
            return folder
    archives = (data_dir / ARCHIVE, data_dir / "cifar10" / ARCHIVE)
    return next((archive for archive in archives if archive.is_file()), None)


def load(data_dir: Path, progress: bool = False) -> Dataset:
    """CIFAR-10, each batch written straight into its place so that memory holds the pixels once."""
    place = find(data_dir)
    if place is None:
        raise DataError(_absence(data_dir))
    pool = _Pool()
    for name, file, where in _from_folder(place) if place.is_dir() else _from_archive(place):
        pool.take(BATCHES.index(name), file, where)
    absent = [name for number, name in enumerate(BATCHES) if number not in pool.taken]
    if absent:
        raise DataError(f"{place}: {', '.join(absent)} not in the archive; delete it and fetch it again")
    train = len(TRAIN) * pool.batch_size
    return Dataset(
        "cifar10",
        pool.images[:train],
        pool.labels[:train],
        pool.images[train:],
        pool.labels[train:],
        CLASSES,
        MEAN,
        STD,
    )


class _Pool:
    """All six batches in one array, the test batch last."""

    images: np.ndarray
    labels: np.ndarray
    batch_size = 0

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def take(self, number: int, file: BinaryIO, where: str) -> None:
        pixels, labels = read_batch(file, where)
        if not self.taken:
            self.batch_size = len(pixels)
            self.images = np.empty((len(BATCHES) * len(pixels), 32, 32, 3), dtype=np.uint8)
            self.labels = np.empty(len(self.images), dtype=np.int64)
        if len(pixels) != self.batch_size:
            raise DataError(
                f"{where}: {len(pixels)} images where the batch before it has {self.batch_size}; all batches "
                "of CIFAR-10 have the same number, 10000: the file is damaged or is something else"
            )
        rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
        self.images[rows] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        self.labels[rows] = labels
        self.taken.add(number)


def _folders(data_dir: Path) -> tuple[Path, ...]:
    return (data_dir / FOLDER, data_dir / "cifar10" / FOLDER, data_dir)


def _absence(data_dir: Path) -> str:
    for folder in _folders(data_dir):
        absent = [name for name in BATCHES if not (folder / name).is_file()]
        if len(absent) < len(BATCHES):
            gone = ", ".join(absent)
            return f"{folder}: {gone} missing; move the folder away, then `feddure data fetch cifar10`"
    return missing("cifar10", data_dir, f"{FOLDER}/ or {ARCHIVE}")


def _from_folder(folder: Path) -> Iterator[tuple[str, BinaryIO, str]]:
    for name in BATCHES:
        path = folder / name
        try:
            with path.open("rb") as file:
                yield name, file, str(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _from_archive(archive: Path) -> Iterator[tuple[str, BinaryIO, str]]:
    # One pass in the archive's own order: going back would mean decompressing from the start again.
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                if folder == FOLDER and name in BATCHES and (packed := tar.extractfile(member)):
                    # By way of a file: tarfile would hold a batch in memory twice.
                    with tempfile.TemporaryFile() as file:
                        shutil.copyfileobj(packed, file, 1 << 20)
                        file.seek(0)
                        yield name, file, f"{archive}: {member.name}"
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive}: not a whole .tar.gz ({error}); delete it and fetch it again") from None


SOURCE = Source(
    name="cifar10",
    about="32×32 photographs of animals and vehicles",
    load=load,
    find=find,
    classes=10,
    train=50_000,
    test=10_000,
    sha256={
        "images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
)
