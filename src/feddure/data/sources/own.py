"""What the readers of people's own images share: the options in a name, what was found, and the split for tests.

A name ends in options: `folder:PATH?size=32&channels=3&depth=16&flip=1&test=0.2&split_seed=0&skip_damaged=0` (the
defaults). `flip=0` says that a mirrored image may be of another class.
Where the images come without a test part, a share `test` of the labelled ones becomes it; `split_seed` says which, so
that the name of a data set is all that its split depends on. `test=0` takes none.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

import numpy as np

from feddure import rng
from feddure.data.dataset import UNKNOWN
from feddure.data.sources.images import FULL_DEPTH, LEAST_DEPTH, MOST_PROBLEMS, Rule
from feddure.data.sources.repeats import Repeat
from feddure.errors import DataError

TEST_SHARE = 0.2
_WHOLE, _SHARE = "-?[0-9]{1,9}", "-?[0-9]{0,3}(?:[.][0-9]{1,9})?"
_ALLOWED = {
    "size": (range(5, 4097), "5 to 4096 pixels"),
    "channels": ((1, 3), "1 (grey) or 3 (colour)"),
    "depth": (range(LEAST_DEPTH, FULL_DEPTH + 1), f"{LEAST_DEPTH} to {FULL_DEPTH} bits"),
    "flip": ((0, 1), "1 or 0"),
    "split_seed": (range(10**9), "0 or more"),
    "skip_damaged": ((0, 1), "1 or 0"),
}


class Options(NamedTuple):
    """What the name of a data set says after its path."""

    size: int = 32
    channels: int = 3
    depth: int = FULL_DEPTH
    test: float = TEST_SHARE
    split_seed: int = 0
    skip_damaged: int = 0
    flip: int = 1

    @property
    def rule(self) -> Rule:
        return Rule(self.size, self.channels, depth=self.depth)


@dataclass(frozen=True)
class Split:
    """Labelled images that became the test part, as there was none."""

    images: int
    share: float
    seed: int


@dataclass(frozen=True)
class Found:
    """What was understood of somebody's own images."""

    layout: str
    remarks: tuple[str, ...] = ()  # what was done with parts of them
    split: Split | None = None
    ignored: Mapping[str, int] = field(default_factory=dict)  # files that are no images, by their ending
    sizes: Mapping[str, int] = field(default_factory=dict)  # files by width × height, the most frequent first
    modes: Mapping[str, int] = field(default_factory=dict)  # by Pillow's mode
    shorter_side: int | None = None  # the median of the files'
    repeats: tuple[Repeat, ...] = ()
    depth: int | None = None  # bits that 16-bit files look like, where the name does not say so

    def sentences(self) -> list[str]:
        """What a person should know before these images are trained on; damaged files apart."""
        told = list(self.remarks)
        if self.split is not None:
            told.append(
                f"no test part: {self.split.images:,} labelled images ({self.split.share:.0%} of each class, "
                f"split_seed={self.split.seed}) are set aside to test on"
            )
        if self.ignored:
            kinds = ", ".join(f"{number:,} {ending}" for ending, number in self.ignored.items())
            told.append(f"files that are no images, ignored: {kinds}")
        return told


def parse(kind: str, where: str, known: Iterable[str]) -> tuple[Path, Options]:
    """The path and the options of a name after its "folder:" or "npz:"."""
    location, _, query = where.partition("?")
    known, found = tuple(known), Options()
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DataError(f"{kind}:{where}: expected options like ?{known[0]}={found._asdict()[known[0]]}") from None
    for key, value in given:
        if key not in known:
            raise DataError(f"{kind}:{where}: unknown option '{key}'; there are: {', '.join(known)}")
        if key == "test":
            if not re.fullmatch(_SHARE, value) or not value or not 0 <= float(value) < 1:
                raise DataError(f"{kind}:{where}: test is '{value}', expected a share from 0 to below 1, such as 0.2")
            found = found._replace(test=float(value))
            continue
        if not re.fullmatch(_WHOLE, value):
            raise DataError(f"{kind}:{where}: {key} is '{value}', expected a whole number")
        allowed, text = _ALLOWED[key]
        if int(value) not in allowed:
            raise DataError(f"{kind}:{where}: {key} is {value}, expected {text}")
        found = found._replace(**{key: int(value)})
    return Path(location).expanduser(), found


def options_of(name: str) -> Options:
    """What the name of a user's own images says after its path."""
    kind, _, where = name.partition(":")
    return parse(kind, where, Options._fields)[1]


def with_options(name: str, **options: object) -> str:
    """The name of a data set with these options in place of those it has."""
    where, _, query = name.partition("?")
    merged = {pair.partition("=")[0]: pair.partition("=")[2] for pair in query.split("&") if pair}
    merged |= {key: str(value) for key, value in options.items()}
    return where + ("?" + "&".join(f"{key}={value}" for key, value in merged.items()) if merged else "")


def choose_tests(labels: np.ndarray, site: np.ndarray | None, share: float, seed: int) -> np.ndarray:
    """Positions of the images that become the test part: of each class its share, but one at least.

    Of a class at a site the last image stays, and larger sites give more.
    """
    chosen: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    owners = np.zeros(len(labels), dtype=np.int64) if site is None else site
    for number in np.unique(labels[labels != UNKNOWN]).tolist():
        members = np.flatnonzero(labels == number)
        members = members[rng.permutation(len(members), "test split", seed, number)]
        totals, seen = Counter(owners[members].tolist()), Counter[int]()
        order = []
        for place, image in enumerate(members.tolist()):
            owner = int(owners[image])
            seen[owner] += 1
            if seen[owner] < totals[owner]:
                order.append(((seen[owner] - 0.5) / totals[owner], place, image))
        wanted = max(1, round(share * len(members)))
        chosen.append(np.array([image for _, _, image in sorted(order)[:wanted]], dtype=np.int64))
    return np.sort(np.concatenate(chosen))


def refuse_damaged(problems: list[str], advice: str) -> DataError:
    """The error for files that cannot be read: the first few, how many, and what to do."""
    more = [f"and {len(problems) - MOST_PROBLEMS:,} more files"] if len(problems) > MOST_PROBLEMS else []
    count = (
        "1 file is damaged or no image" if len(problems) == 1 else f"{len(problems):,} files are damaged or no images"
    )
    return DataError("\n".join([*problems[:MOST_PROBLEMS], *more, f"{count}: {advice}"]))
