"""CIFAR-10 (Krizhevsky, 2009), from the official "python version": a folder of batches or the archive."""

import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources.base import Download, File, Source, lacking, missing
from feddure.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def find(data_dir: Path) -> Path | None:
    """The folder with all six batches, or the archive."""
    folders = [folder for folder, absent in _parts(data_dir).items() if not absent]
    archives = [path for path in (data_dir / ARCHIVE, data_dir / "cifar10" / ARCHIVE) if path.is_file()]
    return next(iter(folders + archives), None)


def load(data_dir: Path, progress: bool = False) -> Dataset:
    """CIFAR-10 from its folder or its archive."""
    path = find(data_dir)
    if path is None:
        raise missing("cifar10", data_dir, f"{FOLDER}/ or {ARCHIVE}", _parts(data_dir))
    opened = _from_folder(path) if path.is_dir() else _from_archive(path)
    batches = {name: read_batch(file, where) for name, file, where in opened}
    absent = [name for name in BATCHES if name not in batches]
    if absent:
        raise DataError(f"{path}: {', '.join(absent)} not in the archive; delete it and fetch it again")
    images, labels = (np.concatenate(parts) for parts in zip(*(batches[name] for name in BATCHES[:-1]), strict=True))
    return Dataset("cifar10", images, labels, *batches[BATCHES[-1]], CLASSES, MEAN, STD)


def read_batch(file: BinaryIO, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The images [N, 32, 32, 3] and labels [N] of a batch; `where` names the file in errors."""
    try:
        batch = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle fails in every imaginable way, and each means the same
        raise DataError(
            f"{where}: not a readable CIFAR batch ({type(error).__name__}: {error}); "
            "the file is damaged or is something else: delete it and fetch it again"
        ) from None
    if not isinstance(batch, dict):
        raise DataError(f"{where}: holds a {type(batch).__name__}, expected a dictionary with data and labels")
    pixels, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", "labels"))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        given = list(pixels.shape) if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"{where}: 'data' is {given}, expected bytes [images, 3072]")
    if not isinstance(labels, list) or not labels or len(labels) != len(pixels):
        raise DataError(f"{where}: 'labels' is not a list of {len(pixels)} numbers, one for each image")
    for position, label in enumerate(labels):
        if type(label) is not int or not 0 <= label <= 9:
            raise DataError(f"{where}: label {position} is {label!r}, expected 0 to 9")
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, np.array(labels, dtype=np.int64)


def _empty(*_: Any) -> np.ndarray:
    return np.empty(0, np.uint8)  # the pickle fills it afterwards


def _byte(code: Any, *_: Any) -> np.dtype:
    # The one type there is, and shared, so that a pickle cannot alter it: numpy trusts a type of the pickle's own
    # making, which may declare bytes to be pointers.
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"has numbers of type {code!r}, expected bytes (u1)")
    return np.dtype(np.uint8)


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    return np.frombuffer(raw, kind).reshape(shape, order=order)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _empty,
    ("numpy", "dtype"): _byte,
    ("_codecs", "encode"): str.encode,  # how Python 3 writes bytes into pickles of protocol 2
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    """A pickle is a program that may call any function by name: this one knows what makes an array of bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no CIFAR batch needs; it was not run")
        return _ALLOWED[module, name]


def _parts(data_dir: Path) -> dict[Path, list[str]]:
    return lacking((data_dir / FOLDER, data_dir / "cifar10" / FOLDER, data_dir), BATCHES)


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
                    yield name, packed, f"{archive}: {member.name}"  # type: ignore[misc]  # a file in all but type
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive}: not a whole .tar.gz ({error}); delete it and fetch it again") from None


SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
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
    download=Download(
        (File(f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}", "c58f30108f718f92721af3b95e74349a", ARCHIVE),),
        folder=FOLDER,
        members=rf"{FOLDER}/({'|'.join(BATCHES)}|batches\.meta)",
    ),
)
