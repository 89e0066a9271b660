"""Images that look exactly the same after reading where that misleads: in both parts, under two classes, at two sites.

Images of a single colour are left out: that two are black says nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset

_SAME = "that look exactly the same after reading as"
_KINDS = {
    "test": (f"test images {_SAME} training images", "accuracies come out too good: keep one of each"),
    "classes": (f"images {_SAME} one of another class", "is a label wrong, or do they differ at a larger size alone?"),
    "sites": (f"images {_SAME} one of another site", "did one site's images reach the other?"),
    "copies": (f"training images {_SAME} an earlier one of their class", "each copy counts in training"),
}


@dataclass(frozen=True)
class Repeat:
    """So many images that repeat others, and the first two that are the same, where they have files."""

    kind: str  # of `_KINDS`
    images: int
    files: tuple[str, ...] = ()

    @property
    def misleads(self) -> bool:
        """Whether whoever trains should know: accuracies or labels are not what they seem."""
        return self.kind in ("test", "classes")

    def sentence(self) -> str:
        what, advice = _KINDS[self.kind]
        first = f", such as {' and '.join(self.files)}" if self.files else ""
        return f"{what}: {self.images:,}{first}; {advice}"


def find(dataset: Dataset, files: Sequence[str] = ()) -> list[Repeat]:
    """What repeats in a data set; `files` names its training images, then its test images."""
    train = len(dataset.labels)
    same = _hashes([*dataset.images, *dataset.test_images])
    labels = np.concatenate([dataset.labels, dataset.test_labels])
    owners = np.full(len(same), UNKNOWN)
    if dataset.site is not None:
        owners[:train] = dataset.site
    if dataset.test_site is not None:
        owners[train:] = dataset.test_site
    alike = np.stack([same, labels, owners])[:, :train]
    _, originals, groups = np.unique(alike, axis=1, return_index=True, return_inverse=True)
    places = np.arange(len(same))
    found = {  # images, what makes two the same, and in what they then differ
        "test": (places[train:][np.isin(same[train:], same[:train])], same, places >= train),
        "classes": (_mixed(same, labels), same, labels),
        "sites": (_mixed(same, owners), same, owners),
        "copies": (np.delete(places[:train], originals), groups.reshape(-1), places[:train]),
    }
    return [
        Repeat(kind, len(images), _first_two(files, images[0], key, differing))
        for kind, (images, key, differing) in found.items()
        if len(images)
    ]


def _hashes(images: Sequence[np.ndarray]) -> np.ndarray:
    """64 bits of each image: that any two of a million share them by chance has odds of one to 37 million."""
    digests = (hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=8).digest() for image in images)
    found = np.frombuffer(b"".join(digests), dtype=np.int64).copy()
    plain = [
        place for place, image in enumerate(images) if (image[0] == image[0, 0]).all() and (image == image[0, 0]).all()
    ]
    found[plain] = plain
    return found


def _mixed(same: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Positions of images that are the same as one with another value, where both are known."""
    known = np.flatnonzero(values != UNKNOWN)
    pairs = np.unique(np.stack([same[known], values[known]]), axis=1)
    hashes, numbers = np.unique(pairs[0], return_counts=True)
    return known[np.isin(same[known], hashes[numbers > 1])]


def _first_two(files: Sequence[str], first: int, key: np.ndarray, values: np.ndarray) -> tuple[str, ...]:
    """The names of an image and of the first with the same key and another value."""
    if not files:
        return ()
    others = np.flatnonzero((key == key[first]) & (values != values[first]) & (values != UNKNOWN))
    return files[first], files[others[0]]
