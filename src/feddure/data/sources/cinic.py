"""CINIC-10 (Darlow et al., 2018): 90,000 images each to train and to test; `valid` is not used.

The PNG tree is decoded once into `cinic10-decoded.npz`, beside the tree or, where that cannot be written, in
the user's cache folder. That file is made anew when the name, size or time of change of any image differs.
"""

import contextlib
import hashlib
import warnings
from pathlib import Path

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources import cache
from feddure.data.sources.base import Download, File, Source, cache_dir, missing
from feddure.data.sources.cifar import CIFAR10
from feddure.data.sources.images import Rule, decode
from feddure.data.sources.layouts import entries
from feddure.data.sources.own import refuse_damaged
from feddure.errors import DataError, FeddureWarning
from feddure.files import shown, write_whole

MEAN = (0.47889522, 0.47227842, 0.43047404)
STD = (0.24205776, 0.23828046, 0.25874835)
CLASSES = CIFAR10.classes
FOLDERS = ("cinic10", "CINIC-10")
SPLITS = ("train", "test")
_RULE = Rule(size=32, channels=3, resize=False)


def find(data_dir: Path) -> Path | None:
    """The folder that holds train and test."""
    folders = [data_dir / name for name in FOLDERS]
    return next((folder for folder in folders if all((folder / split).is_dir() for split in SPLITS)), None)


def load(data_dir: Path, progress: bool = False) -> Dataset:
    """CINIC-10 from the decoded file, which is written first if need be."""
    folder = find(data_dir)
    if folder is None:
        raise missing("cinic10", data_dir, "cinic10/ or CINIC-10/ with train/<class>/ and test/<class>/")
    files = {split: _list(folder / split) for split in SPLITS}
    named = ((f"{split}/{label}/{path.name}", path) for split in SPLITS for path, label in files[split])
    signature, stores = cache.sign(named), _stores(folder)
    arrays = next((found for store in stores if (found := cache.read(store, signature))), None)
    if arrays is None:
        arrays = {}
        for split, prefix in zip(SPLITS, ("", "test_"), strict=True):
            paths = [path for path, _ in files[split]]
            decoded = decode(paths, _RULE, f"decoding {split} images", progress)
            if decoded.problems:
                damaged = [f"{shown(paths[number])}: {text}" for number, text in decoded.problems.items()]
                raise refuse_damaged(damaged, "remove what is not of CINIC-10, and unpack it again")
            arrays[f"{prefix}images"] = decoded.images
            arrays[f"{prefix}labels"] = np.array([label for _, label in files[split]], dtype=np.int64)
        _keep(stores, cache.pack(signature, arrays))
    return Dataset("cinic10", **arrays, classes=CLASSES, mean=MEAN, std=STD)


def _list(split: Path) -> list[tuple[Path, int]]:
    """The images of a split with their labels, class by class and by name."""
    found = []
    for label, name in enumerate(CLASSES):
        paths = entries(split / name)
        if not paths:
            raise DataError(f"{split / name}: no images in it; unpack CINIC-10 again")
        found += [(path, label) for path in paths]
    return found


def _stores(folder: Path) -> tuple[Path, Path]:
    tree = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return folder.parent / "cinic10-decoded.npz", cache_dir() / f"cinic10-decoded-{tree}.npz"


def _keep(stores: tuple[Path, ...], content: memoryview) -> None:
    for store in stores:
        with contextlib.suppress(OSError, DataError):
            store.parent.mkdir(parents=True, exist_ok=True)
            write_whole(store, content, DataError)
            return
    warnings.warn(
        f"the decoded CINIC-10 could be written neither to {stores[0]} nor to {stores[1]}: "
        "the next load decodes every image again",
        FeddureWarning,
        stacklevel=3,
    )


SOURCE = Source(
    name="cinic10",
    title="CINIC-10",
    about="CIFAR-10's classes, mostly from ImageNet",
    load=load,
    find=find,
    classes=10,
    train=90_000,
    test=90_000,
    download=Download(
        (
            File(
                "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "6ee4d0c996905fe93221de577967a372",
                "CINIC-10.tar.gz",
            ),
        ),
        folder="CINIC-10",
        members=r"(?:CINIC-10/)?((?:train|valid|test)/[a-z]+/[^/\\]+\.png)",
    ),
)
