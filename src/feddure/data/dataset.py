"""A data set in memory: uint8 images, integer labels, and what is known about them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

UNKNOWN = -1
"""The label of an image whose class nobody knows."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test images, never copied, never normalised in memory.

    `labelled` marks the images whose labels the learner may see, where the data come with such a split
    (a user's own folder); it is None where a partition decides it (the benchmark data sets).
    `site` numbers the owner of each training image where the data come with owners, named in `sites`.
    """

    name: str
    images: np.ndarray  # uint8 [N, height, width, channels]
    labels: np.ndarray  # int64 [N], UNKNOWN where the class is not known
    test_images: np.ndarray  # uint8 [M, height, width, channels]
    test_labels: np.ndarray  # int64 [M]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel, of images / 255; a run measures what is not given
    std: tuple[float, ...] = ()
    labelled: np.ndarray | None = None  # bool [N]
    sites: tuple[str, ...] = ()
    site: np.ndarray | None = None  # int64 [N]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the training images and all that says what they are."""
        digest = hashlib.sha256(repr((self.images.shape, self.classes, self.sites)).encode())
        for array in (self.images, self.labels, self.labelled, self.site):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
