"""What the registry knows about a data set before anyone loads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from feddure.data.dataset import Dataset


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
