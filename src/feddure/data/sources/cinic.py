"""CINIC-10 (Darlow et al., 2018): 90,000 images each to train and to test; `valid` is not used.

The PNG tree is decoded once into `cinic10-decoded.npz`, beside the tree or, where that cannot be written, in
the user's cache folder. That file is made anew when the name, size or time of change of any image differs.
"""

import contextlib
import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from feddure.data.dataset import Dataset
from feddure.data.sources.base import Download, File, Source, cache_dir, missing
from feddure.data.sources.cifar import CLASSES
from feddure.data.sources.images import Rule, decode_all
from feddure.data.sources.layouts import entries
from feddure.data.sources.npz import DAMAGE
from feddure.errors import DataError, FeddureWarning
from feddure.files import write_whole

MEAN = (0.47889522, 0.47227842, 0.43047404)
STD = (0.24205776, 0.23828046, 0.25874835)
FOLDERS = ("cinic10", "CINIC-10")
SPLITS = ("train", "test")
_RULE = Rule(size=32, channels=3, resize=False)
_ARRAYS = ("images", "labels", "test_images", "test_labels")  # as in a Dataset


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
    signature = _signature(files)
    stores = _stores(folder)
    arrays = next((found for store in stores if (found := _recall(store, signature))), None)
    if arrays is None:
        arrays = {}
        for split, prefix in zip(SPLITS, ("", "test_"), strict=True):
            paths = [path for path, _ in files[split]]
            arrays[f"{prefix}images"] = decode_all(paths, _RULE, f"decoding {split} images", progress)
            arrays[f"{prefix}labels"] = np.array([label for _, label in files[split]], dtype=np.int64)
        _keep(stores, signature, arrays)
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


def _signature(files: dict[str, list[tuple[Path, int]]]) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        for path, label in files[split]:
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror})") from None
            facts = f"{split}/{label}/{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(facts.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _stores(folder: Path) -> tuple[Path, Path]:
    tree = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return folder.parent / "cinic10-decoded.npz", cache_dir() / f"cinic10-decoded-{tree}.npz"


def _recall(store: Path, signature: str) -> dict[str, Any] | None:
    """The arrays of a decoded file, or None if it is missing, damaged or of another tree."""
    try:
        # Opened here because numpy leaves a damaged file open when it gives up on it.
        with store.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if str(arrays["signature"]) == signature:
                return {name: arrays[name] for name in _ARRAYS}
    except (OSError, *DAMAGE):
        pass
    return None


def _keep(stores: tuple[Path, ...], signature: str, arrays: dict[str, Any]) -> None:
    content = io.BytesIO()
    np.savez(content, **{"signature": np.array(signature), **arrays})
    for store in stores:
        with contextlib.suppress(OSError, DataError):
            store.parent.mkdir(parents=True, exist_ok=True)
            write_whole(store, content.getbuffer(), DataError)
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
