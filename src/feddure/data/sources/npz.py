"""A data set in one .npz file.

Required: images, labels; optional: test_images, test_labels, classes, mean, std, labelled, site, sites, test_site; they
mean what the fields of `Dataset` mean. Images are uint8 [N, height, width] or [N, height, width, channels]; a label of
-1 says that the class is not known, and where `labelled` is missing, exactly those images are unlabelled. MedMNIST's
names are read too: train_images, train_labels, val_images, val_labels, test_images, test_labels, labels [N, 1]. The
name of the data set may end in `?flip=1&test=0.2&split_seed=0` (`own.py`); the split counts where there are no test
images.
"""

import os
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil

from feddure.data.dataset import UNKNOWN, Dataset, check
from feddure.data.sources import repeats
from feddure.data.sources.layouts import composed
from feddure.data.sources.own import Found, Split, choose_tests, parse
from feddure.errors import DataError

_DAMAGE = (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""What reading a damaged .npz file raises."""
REQUIRED, TESTS = ("images", "labels"), ("test_images", "test_labels")
OPTIONAL = ("classes", "mean", "std", "labelled", "site", "sites", "test_site")
MEDMNIST = ("train_images", "train_labels")
_VALIDATION = ("val_images", "val_labels")


def read(where: str, progress: bool = False) -> tuple[Dataset, Found]:
    """The data set in an .npz file, checked, and what was understood of it."""
    path, options = parse("npz", where, ("test", "split_seed", "flip"))
    arrays = _read(path)
    theirs = MEDMNIST[0] in arrays
    layout = "one .npz file, MedMNIST's names" if theirs else "one .npz file"
    try:
        split, remarks = None, _rename(arrays) if theirs else []
        if TESTS[0] not in arrays:
            split = _split(arrays, options.test, options.split_seed)
        dataset = check(_dataset(f"npz:{where}", arrays, bool(options.flip)), str(path))
        if dataset.labelled is None:
            remarks.append(
                "every training image has a label, of which the partition uses some: 5 a class and client, or what "
                "--set partition.labels_per_class or partition.label_fraction says"
            )
        return dataset, Found(layout, tuple(remarks), split, repeats=tuple(repeats.find(dataset)))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _rename(arrays: dict[str, np.ndarray]) -> list[str]:
    """MedMNIST's arrays by our names; validation images join the training ones where there are test images."""
    remarks = []
    for name in arrays:
        if name.endswith("_labels"):
            arrays[name] = _whole(name, arrays[name])
    if _VALIDATION[0] in arrays:
        validation = [arrays.pop(name) for name in _VALIDATION]
        if TESTS[0] in arrays:
            for name, more in zip(MEDMNIST, validation, strict=True):
                arrays[name] = np.concatenate([arrays[name], more])
            text = "join the training ones; --set validation=0.1 sets labelled images aside"
        else:
            arrays |= dict(zip(TESTS, validation, strict=True))
            text = "are the test part, as there is no other"
        remarks.append(f"{len(validation[0]):,} validation images {text}")
    for ours, theirs in zip(REQUIRED, MEDMNIST, strict=True):
        arrays[ours] = arrays.pop(theirs)
    return remarks


def _split(arrays: dict[str, np.ndarray], share: float, seed: int) -> Split | None:
    """Set labelled images aside as the test part."""
    images = np.atleast_1d(arrays["images"])
    arrays |= {name: _whole(name, arrays[name]) for name in ("labels", "site") if name in arrays}
    for name in ("labels", "labelled", "site"):
        if name in arrays and (shape := arrays[name].shape) != images.shape[:1]:
            raise ValueError(f"{name} have shape {list(shape)}, expected [{len(images)}], one for each image")
    labels, site = arrays["labels"], arrays.get("site")
    usable = labels.copy()
    if "labelled" in arrays:
        usable[~arrays["labelled"].astype(bool)] = UNKNOWN
    chosen = choose_tests(usable, site, share, seed)
    chosen = chosen if share else chosen[:0]
    arrays |= {"test_images": images[chosen], "test_labels": labels[chosen]}
    if site is not None:
        arrays["test_site"] = site[chosen]
    for name in ("images", "labels", "labelled", "site"):
        if name in arrays and len(chosen):
            arrays[name] = np.delete(arrays[name], chosen, axis=0)
    return Split(len(chosen), share, seed) if len(chosen) else None


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        # Opened here because numpy leaves a damaged file open when it gives up on it.
        if not path.is_file() and path.exists():
            raise DataError(f"{path}: cannot be read (not a regular file); expected one made by numpy.savez")
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise DataError(f"{path}: not a whole .npz file; expected one made by numpy.savez")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                _check_directory(path, file, archive.zip)
                _check_names(path, archive.files)
                _check_size(path, archive.zip)
                arrays = {name: np.asarray(archive[name]) for name in archive.files}
        for name, array in arrays.items():
            if array.nbytes < array.size:  # of names without letters there can be any number in no bytes
                raise DataError(f"{path}: {name} has {array.size:,} values of no length")
        return arrays
    except MemoryError:
        raise DataError(f"{path}: its arrays need more memory than there is") from None
    except _DAMAGE as error:
        raise DataError(f"{path}: not a whole .npz file of plain arrays ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _check_directory(path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> None:
    """One wrong byte in its directory can hide arrays; the file's end says how many there are."""
    file.seek(-22, os.SEEK_END)
    end = file.read()
    if end.startswith(b"PK\5\6") and int.from_bytes(end[10:12], "little") != len(archive.infolist()):
        raise DataError(f"{path}: not a whole .npz file: its directory is damaged")


def _check_size(path: Path, archive: zipfile.ZipFile) -> None:
    """A file of a few kilobytes can unpack to any size."""
    size, most = sum(member.file_size for member in archive.infolist()), psutil.virtual_memory().available
    if size > most:
        raise DataError(
            f"{path}: its arrays take {size / 2**30:,.1f} GiB, and {most / 2**30:,.1f} GiB of memory are free; "
            "make it smaller, or use a larger machine"
        )


def _check_names(path: Path, names: list[str]) -> None:
    theirs = any(name in names for name in MEDMNIST)
    wanted = MEDMNIST if theirs else REQUIRED
    pairs = [TESTS, *([_VALIDATION] if theirs else [])]
    absent = [name for name in wanted if name not in names]
    absent += [name for pair in pairs if set(pair) & set(names) for name in pair if name not in names]
    if absent:
        raise DataError(f"{path}: no array {', '.join(absent)}; it has: {', '.join(names) or 'none'}")
    known = (*wanted, *(name for pair in pairs for name in pair), *(() if theirs else OPTIONAL))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DataError(f"{path}: unknown array {', '.join(unknown)}; expected {', '.join(known)}")


def _dataset(name: str, arrays: dict[str, np.ndarray], flip: bool) -> Dataset:
    images, test_images = (
        array[..., None] if array.ndim == 3 else array for array in (arrays["images"], arrays["test_images"])
    )
    labels, test_labels = (_whole(name, arrays[name]) for name in ("labels", "test_labels"))
    unknown = labels == UNKNOWN
    site = _whole("site", arrays["site"]) if "site" in arrays else None
    return Dataset(
        name=name,
        images=images,
        labels=labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=_names("classes", arrays, labels, test_labels),
        mean=_numbers("mean", arrays),
        std=_numbers("std", arrays),
        labelled=arrays.get("labelled", ~unknown if unknown.any() else None),
        sites=_names("sites", arrays, *([] if site is None else [site])),
        site=site,
        test_site=_whole("test_site", arrays["test_site"]) if "test_site" in arrays else None,
        flip=flip,
    )


def _whole(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} have dtype {array.dtype}, expected whole numbers")
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} reach {array.max()}, expected the numbers of classes or sites")
    if array.ndim == 2 and array.shape[1] > 1:
        raise ValueError(f"{name} are {list(array.shape)}: several labels an image are not supported, expected one")
    return array.astype(np.int64).reshape(len(array)) if array.ndim == 2 else array.astype(np.int64)


def _names(name: str, arrays: dict[str, np.ndarray], *numbers: np.ndarray) -> tuple[str, ...]:
    """The names in the file, or else the numbers in use as names."""
    if name not in arrays:
        count = max((int(array.max(initial=-1)) + 1 for array in numbers), default=0)
        if count > sum(array.size for array in numbers):
            raise ValueError(f"{name} are not named and their numbers reach {count - 1}: count from 0")
        return tuple(str(number) for number in range(count))
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "US":
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, expected a list of names")
    return tuple(composed(text.decode() if isinstance(text, bytes) else text) for text in array.tolist())


def _numbers(name: str, arrays: dict[str, np.ndarray]) -> tuple[float, ...]:
    array = arrays.get(name, np.empty(0))
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {array.dtype}, expected numbers")
    return tuple(array.ravel().astype(float).tolist())
