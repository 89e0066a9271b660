"""SVHN (Netzer et al., 2011), cropped digits: `train_32x32.mat` and `test_32x32.mat`; `extra` is not used.

Class 0 is the digit 0, which the files call 10. A mirrored digit is another sign, so these images are not flipped.
"""

from pathlib import Path

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources.base import Download, File, Source, lacking, missing
from feddure.errors import DataError

MEAN = (0.4377, 0.4438, 0.4728)
STD = (0.1980, 0.2010, 0.1970)
MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
TRAIN = (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659)
TEST = (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595)
_WHOLE = "if it is damaged, a broken download say, delete it and fetch it again"
_MOST = 10**6  # images in a file: extra_32x32.mat has half as many


def find(data_dir: Path) -> Path | None:
    """The folder with both files."""
    return next((folder for folder, absent in _parts(data_dir).items() if not absent), None)


def load(data_dir: Path, progress: bool = False) -> Dataset:
    """SVHN from its two MATLAB files."""
    folder = find(data_dir)
    if folder is None:
        raise missing("svhn", data_dir, f"svhn/ or SVHN/ with {' and '.join(MD5)}", _parts(data_dir))
    train, test = (read_mat(folder / name) for name in MD5)
    return Dataset("svhn", *train, *test, tuple("0123456789"), MEAN, STD, flip=False)


def read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The images [N, 32, 32, 3] and labels [N] of a file."""
    import scipy.io  # a tenth of a second: only when it is needed

    try:
        # What it says of itself first: a few bytes can unfold into more than there is memory.
        told = {name: (shape, kind) for name, shape, kind in scipy.io.whosmat(str(path), appendmat=False)}
        number = told.get("X", ((0,), ""))[0][-1]
        if told.get("X") != ((32, 32, 3, number), "uint8") or not 0 < number <= _MOST:
            raise DataError(f"{path}: X is {_shown(told.get('X'))}, expected uint8 [32, 32, 3, images]; {_WHOLE}")
        if told.get("y", ((),))[0] != (number, 1):
            raise DataError(f"{path}: y is {_shown(told.get('y'))}, expected [{number}, 1]; {_WHOLE}")
        arrays = scipy.io.loadmat(str(path), appendmat=False, variable_names=("X", "y"))
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # a damaged file fails in every imaginable way, and each means the same
        raise DataError(f"{path}: not a readable MATLAB file ({type(error).__name__}: {error}); {_WHOLE}") from None
    images, labels = arrays["X"].transpose(3, 0, 1, 2), arrays["y"][:, 0]
    wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
    if len(wrong):
        raise DataError(f"{path}: label {wrong[0]} is {labels[wrong[0]]}, expected 1 to 10")
    return np.ascontiguousarray(images), labels.astype(np.int64) % 10


def _shown(told: tuple[tuple[int, ...], str] | None) -> str:
    return f"{told[1]} {list(told[0])}" if told else "not there"


def _parts(data_dir: Path) -> dict[Path, list[str]]:
    return lacking((data_dir / "svhn", data_dir / "SVHN", data_dir), tuple(MD5))


SOURCE = Source(
    name="svhn",
    title="SVHN",
    about="32×32 photographs of house numbers' digits",
    load=load,
    find=find,
    classes=10,
    train=sum(TRAIN),
    test=sum(TEST),
    uneven={"train": TRAIN, "test": TEST},
    download=Download(
        tuple(File(f"http://ufldl.stanford.edu/housenumbers/{name}", md5, f"svhn/{name}") for name, md5 in MD5.items())
    ),
)
