"""What all sources of data share: what is known of one, where data live, and a bar while they come."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import platformdirs
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from feddure.data.dataset import Dataset
from feddure.errors import DataError
from feddure.terminal import Console

_MOST_SHOWN = 10


@dataclass(frozen=True)
class File:
    """One file to download: where from, its MD5 sum, and where to, under the data folder."""

    url: str
    md5: str
    path: str


@dataclass(frozen=True)
class Download:
    """The files of a data set; an archive is unpacked into `folder`, taking only what `members` matches."""

    files: tuple[File, ...]
    folder: str | None = None
    members: str = ""


@dataclass(frozen=True)
class Source:
    """A data set with a name: what it is, where it may lie, and how it is read.

    `find` returns where the complete data set lies under a data folder, or None; `load` reads it.
    `sha256` holds the official hashes of the decoded arrays (uint8, C order) by the names of their fields.
    """

    name: str
    about: str
    load: Callable[[Path, bool], Dataset]
    find: Callable[[Path], Path | None]
    classes: int | None = None
    train: int | None = None
    test: int | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    download: Download | None = None
    title: str = ""  # as people write the name, where that differs
    uneven: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Images of each class in "train" and "test"; where nothing is said, all classes have as many."""

    def deviations(self, dataset: Dataset) -> list[str]:
        """In what a loaded data set differs from the official one."""
        found = []
        for split, labels, total in (("train", dataset.labels, self.train), ("test", dataset.test_labels, self.test)):
            number = len(dataset.classes)
            expected = self.uneven.get(split, [(total or 0) // number] * number)
            counts = zip(dataset.classes, np.bincount(labels, minlength=number), expected, strict=True)
            wrong = [f"{name}: {count:,} of {wanted:,}" for name, count, wanted in counts if count != wanted]
            if wrong:
                more = [f"and {len(wrong) - _MOST_SHOWN} more classes"] if len(wrong) > _MOST_SHOWN else []
                found.append(f"{split} images found of {', '.join(wrong[:_MOST_SHOWN] + more)}")
        for name, official in self.sha256.items():
            array = np.ascontiguousarray(getattr(dataset, name).astype(np.uint8, copy=False))
            if hashlib.sha256(array.data).hexdigest() != official:
                found.append(f"{name}: the SHA-256 of the decoded array is not the official one")
        return found


def default_data_dir() -> Path:
    """$FEDDURE_DATA, or else the user's cache folder."""
    chosen = os.environ.get("FEDDURE_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir()


def cache_dir() -> Path:
    """The folder for this package's files that the platform lets programs make again."""
    return platformdirs.user_cache_path("feddure", appauthor=False)


def lacking(folders: Iterable[Path], names: Sequence[str], endings: Sequence[str] = ("",)) -> dict[Path, list[str]]:
    """What is missing of a data set's files, for each folder that has any; they may have one of several endings."""
    found = {}
    for folder in folders:
        absent = [name for name in names if not any((folder / f"{name}{ending}").is_file() for ending in endings)]
        if len(absent) < len(names):
            found[folder] = absent
    return found


def missing(name: str, data_dir: Path, expected: str, parts: Mapping[Path, Sequence[str]] | None = None) -> DataError:
    """The error for a data set that is not there, or of which `parts` are: folders, and the files that they lack."""
    if parts:
        folder, absent = next(iter(parts.items()))
        advice = f"bring them back, or move the folder away and `feddure data fetch {name}`"
        return DataError(f"{folder}: {', '.join(absent)} missing; {advice}")
    return DataError(
        f"{name} is not in {data_dir}: expected {expected}. "
        f"`feddure data fetch {name}` downloads it; --data-dir or FEDDURE_DATA names another folder"
    )


@contextmanager
def bar(
    description: str, total: int | None, shown: bool, start: int = 0, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields the function that moves it on by so many images or bytes."""
    counts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(description, total=total, completed=start)
        yield lambda amount: progress.advance(task, amount)
