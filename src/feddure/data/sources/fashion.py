"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), and the small part of it that comes with this package.

fashion-mini is real Fashion-MNIST: the first 600 training images and the first 100 test images of each class,
in the order of the original files, written with numpy.savez_compressed (images, labels, test_images and
test_labels, all uint8; images [N, 28, 28]). The licence of the images is in NOTICE.
"""

import gzip
import hashlib
import io
import struct
import zlib
from importlib import resources
from pathlib import Path

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources.base import Download, File, Source, lacking, missing
from feddure.errors import DataError

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MEAN = (0.2860,)
STD = (0.3530,)
MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
FILES = tuple(MD5)
_MOST_BYTES = 2**28  # of a file; the largest has 47 million
MINI = resources.files("feddure") / "data" / "embedded" / "fashion-mini.npz"
MINI_SHA256 = "e92d12a9cb02fd61dc1c5fafe5fdb5faaa167a3f0bd19227f23af51dd1466412"


def find(data_dir: Path) -> Path | None:
    """The folder with all four files, gzipped or not."""
    return next((folder for folder, absent in _parts(data_dir).items() if not absent), None)


def load(data_dir: Path, progress: bool = False) -> Dataset:
    """Fashion-MNIST from its four idx files."""
    folder = find(data_dir)
    if folder is None:
        expected = "FashionMNIST/raw/ or fashion-mnist/ with the four idx files, .gz or not"
        raise missing("fashion-mnist", data_dir, expected, _parts(data_dir))
    return _dataset("fashion-mnist", *_pair(folder, *FILES[:2]), *_pair(folder, *FILES[2:]))


def load_mini(data_dir: Path, progress: bool = False) -> Dataset:
    """fashion-mini, from inside the package."""
    raw = MINI.read_bytes()
    if hashlib.sha256(raw).hexdigest() != MINI_SHA256:
        raise DataError(f"{MINI}: not the file that was released with this package; install the package again")
    with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
        return _dataset("fashion-mini", **arrays)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file (a magic number, the sizes, the bytes) of so many dimensions."""
    header = 4 + 4 * dimensions
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(header)
            if len(start) < header or start[:4] != bytes((0, 0, 8, dimensions)):
                raise DataError(
                    f"{path}: begins with {start[:4].hex() or 'nothing'}, expected 000008{dimensions:02x}: "
                    f"an idx file of bytes in {dimensions} dimension(s)"
                )
            shape = struct.unpack(f">{dimensions}I", start[4:])
            expected = int(np.prod(shape, dtype=object))
            # No more than one too many: a small file can unfold into more than there is memory.
            raw = file.read(min(expected, _MOST_BYTES) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); delete it and fetch it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) != expected:
        more = "more than " if len(raw) > expected else ""
        raise DataError(
            f"{path}: {more}{min(len(raw), expected)} bytes after the header, expected {expected} "
            f"for the shape {list(shape)}; the file is damaged: delete it and fetch it again"
        )
    # A copy, because an array over immutable bytes could not be handed to torch.
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape).copy()


def _dataset(
    name: str, images: np.ndarray, labels: np.ndarray, test_images: np.ndarray, test_labels: np.ndarray
) -> Dataset:
    labels, test_labels = labels.astype(np.int64), test_labels.astype(np.int64)
    return Dataset(name, images[..., None], labels, test_images[..., None], test_labels, CLASSES, MEAN, STD)


def _pair(folder: Path, images_name: str, labels_name: str) -> tuple[np.ndarray, np.ndarray]:
    images_path, labels_path = _path(folder, images_name), _path(folder, labels_name)
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28) or len(images) == 0:
        raise DataError(f"{images_path}: shape {list(images.shape)}, expected images of 28 by 28 pixels")
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels)} labels for the {len(images)} images of {images_path.name}")
    wrong = np.flatnonzero(labels >= len(CLASSES))
    if len(wrong):
        raise DataError(f"{labels_path}: label {wrong[0]} is {labels[wrong[0]]}, expected 0 to 9")
    return images, labels


def _parts(data_dir: Path) -> dict[Path, list[str]]:
    folders = (data_dir / "FashionMNIST" / "raw", data_dir / "fashion-mnist", data_dir)
    return lacking(folders, FILES, ("", ".gz"))


def _path(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


SOURCE = Source(
    name="fashion-mnist",
    title="Fashion-MNIST",
    about="28×28 grey pictures of clothing",
    load=load,
    find=find,
    classes=10,
    train=60_000,
    test=10_000,
    sha256={
        "images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "test_images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
    download=Download(
        tuple(
            File(
                f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}.gz",
                md5,
                f"FashionMNIST/raw/{name}.gz",
            )
            for name, md5 in MD5.items()
        )
    ),
)
MINI_SOURCE = Source(
    name="fashion-mini",
    title="Fashion-Mini",
    about="a tenth of Fashion-MNIST, part of this package",
    load=load_mini,
    find=lambda data_dir: Path(str(MINI)),
    classes=10,
    train=6_000,
    test=1_000,
)
