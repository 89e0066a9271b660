"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), from the official "python version": a folder of batches or the archive."""

import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources.base import Download, File, Source, lacking, missing
from feddure.errors import DataError


@dataclass(frozen=True)
class Cifar:
    """One of the two: what its files are called and hold."""

    name: str
    folder: str
    archive: str
    train: tuple[str, ...]  # files
    test: str
    key: str  # of the labels in a file
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def batches(self) -> tuple[str, ...]:
        """All files with images."""
        return (*self.train, self.test)

    def find(self, data_dir: Path) -> Path | None:
        """The folder with all files, or the archive."""
        folders = [folder for folder, absent in self._parts(data_dir).items() if not absent]
        archives = [path for path in (data_dir / self.archive, data_dir / self.name / self.archive) if path.is_file()]
        return next(iter(folders + archives), None)

    def load(self, data_dir: Path, progress: bool = False) -> Dataset:
        """The data set from its folder or its archive."""
        path = self.find(data_dir)
        if path is None:
            raise missing(self.name, data_dir, f"{self.folder}/ or {self.archive}", self._parts(data_dir))
        opened = self._from_folder(path) if path.is_dir() else self._from_archive(path)
        batches = {name: self.read_batch(file, where) for name, file, where in opened}
        absent = [name for name in self.batches if name not in batches]
        if absent:
            raise DataError(f"{path}: {', '.join(absent)} not in the archive; delete it and fetch it again")
        images, labels = (np.concatenate(parts) for parts in zip(*(batches[name] for name in self.train), strict=True))
        return Dataset(self.name, images, labels, *batches[self.test], self.classes, self.mean, self.std)

    def read_batch(self, file: BinaryIO, where: str) -> tuple[np.ndarray, np.ndarray]:
        """The images [N, 32, 32, 3] and labels [N] of a file; `where` names it in errors."""
        try:
            batch = _Unpickler(file, encoding="bytes").load()
        except Exception as error:  # a damaged pickle fails in every imaginable way, and each means the same
            raise DataError(
                f"{where}: not a readable CIFAR batch ({type(error).__name__}: {error}); "
                "the file is damaged or is something else: delete it and fetch it again"
            ) from None
        if not isinstance(batch, dict):
            raise DataError(f"{where}: holds a {type(batch).__name__}, expected a dictionary with data and {self.key}")
        pixels, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", self.key))
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
            given = list(pixels.shape) if isinstance(pixels, np.ndarray) else type(pixels).__name__
            raise DataError(f"{where}: 'data' is {given}, expected bytes [images, 3072]")
        if not isinstance(labels, list) or not labels or len(labels) != len(pixels):
            raise DataError(f"{where}: '{self.key}' is not a list of {len(pixels)} numbers, one for each image")
        for position, label in enumerate(labels):
            if type(label) is not int or not 0 <= label < len(self.classes):
                plain = type(label) in (int, float) and abs(label) < 2**63
                given = label if plain else f"a {type(label).__name__}"
                raise DataError(f"{where}: label {position} is {given}, expected 0 to {len(self.classes) - 1}")
        images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return images, np.array(labels, dtype=np.int64)

    def source(self, title: str, about: str, sha256: Mapping[str, str], md5: str) -> Source:
        """What the registry knows of it."""
        url = f"https://www.cs.toronto.edu/~kriz/{self.archive}"
        return Source(
            name=self.name,
            title=title,
            about=about,
            load=self.load,
            find=self.find,
            classes=len(self.classes),
            train=50_000,
            test=10_000,
            sha256=sha256,
            download=Download(
                (File(url, md5, self.archive),),
                folder=self.folder,
                members=rf"{self.folder}/({'|'.join(self.batches)}|(?:batches\.)?meta)",
            ),
        )

    def _parts(self, data_dir: Path) -> dict[Path, list[str]]:
        folders = [data_dir / self.folder, data_dir / self.name / self.folder]
        # Files called `train` and `test` in the data folder itself would be anything.
        return lacking((*folders, data_dir) if len(self.train) > 1 else folders, self.batches)

    def _from_folder(self, folder: Path) -> Iterator[tuple[str, BinaryIO, str]]:
        for name in self.batches:
            path = folder / name
            try:
                with path.open("rb") as file:
                    yield name, file, str(path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror})") from None

    def _from_archive(self, archive: Path) -> Iterator[tuple[str, BinaryIO, str]]:
        # One pass in the archive's own order: going back would mean decompressing from the start again.
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    folder, _, name = member.name.removeprefix("./").rpartition("/")
                    if folder == self.folder and name in self.batches and (packed := tar.extractfile(member)):
                        yield name, packed, f"{archive}: {member.name}"  # type: ignore[misc]  # a file in all but type
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise DataError(f"{archive}: not a whole .tar.gz ({error}); delete it and fetch it again") from None


def _empty(*_: Any) -> np.ndarray:
    return np.empty(0, np.uint8)  # the pickle fills it afterwards


def _byte(code: Any, *_: Any) -> np.dtype:
    # The one type there is, and shared, so that a pickle cannot alter it: numpy trusts a type of the pickle's own
    # making, which may declare bytes to be pointers.
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"has numbers of type {code!r}, expected bytes (u1)")
    return np.dtype(np.uint8)


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    # Not of an array: the pickle could fill that anew, and the memory that was shared with it would be somebody else's.
    if not isinstance(raw, bytes | bytearray):
        raise pickle.UnpicklingError(f"has an array of a {type(raw).__name__}, expected bytes")
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


_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = Cifar(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    key="labels",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = Cifar(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train=("train",),
    test="test",
    key="fine_labels",
    classes=tuple(_HUNDRED.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
SOURCE = CIFAR10.source(
    "CIFAR-10",
    "32×32 photographs of animals and vehicles",
    {
        "images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
    "c58f30108f718f92721af3b95e74349a",
)
# The arrays' hashes are not stated: nobody has had the files here.
SOURCE_100 = CIFAR100.source(
    "CIFAR-100", "32×32 photographs of a hundred kinds of things", {}, "eb9058c3a382ffc7106e4002c42a8d85"
)
