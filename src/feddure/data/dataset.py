"""A data set in memory: uint8 images, integer labels, and what is known about them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from feddure.errors import DataError

UNKNOWN = -1
"""The label of an image whose class nobody knows."""

_IMAGES_AT_ONCE = 1000


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test images, never copied, never normalised in memory.

    `labelled` marks the images whose labels the learner may see, where the data come with such a split
    (a user's own folder); it is None where a partition decides it (the benchmark data sets).
    `site` numbers the owner of each training image where the data come with owners, named in `sites`; `test_site` does
    so for test images, where some are a site's own.
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
    test_site: np.ndarray | None = None  # int64 [M], UNKNOWN where an image is no site's own
    notes: tuple[str, ...] = ()  # what makes results look better or worse than they are
    damaged: tuple[str, ...] = ()  # "path: reason" of files that gave no image and were left out
    flip: bool = True  # whether views may be mirrored: not where left and right tell classes apart

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
        if not self.flip:
            digest.update(b"no flip")
        return digest.hexdigest()


def measure(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of images / 255, from a histogram of the 256 values.

    A channel without any variation gets the standard deviation 1, so that dividing by it is harmless.
    """
    counts = np.zeros((images.shape[-1], 256), dtype=np.int64)
    # In portions, because bincount widens what it is given to eight bytes a pixel.
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        portion = images[start : start + _IMAGES_AT_ONCE]
        for channel, values in enumerate(np.moveaxis(portion, -1, 0)):
            counts[channel] += np.bincount(values.ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    means = weights @ values
    deviations = np.sqrt((weights * (values - means[:, None]) ** 2).sum(axis=1))
    return tuple(means.tolist()), tuple(np.where(deviations > 0, deviations, 1.0).tolist())


def check(dataset: Dataset, where: str) -> Dataset:
    """The data set if it is whole, with mean and std measured on its training images where it has none.

    `where` names the file or function in the error.
    """
    for problem in _problems(dataset):
        raise DataError(f"{where}: {problem}")
    if len(dataset.mean) and len(dataset.std):
        return dataset
    mean, std = measure(dataset.images)
    return replace(
        dataset,
        mean=dataset.mean if len(dataset.mean) else mean,
        std=dataset.std if len(dataset.std) else std,
    )


def _problems(data: Dataset) -> Iterator[str]:
    """What is wrong with a data set; each check relies on those before it, so only the first counts."""
    optional = ("labelled", "site", "test_site")
    for name in ("images", "labels", "test_images", "test_labels", *optional):
        array = getattr(data, name)
        if not isinstance(array, np.ndarray) and not (array is None and name in optional):
            yield f"{name} is a {type(array).__name__}, expected a numpy array"
    for name, images in (("images", data.images), ("test_images", data.test_images)):
        if images.dtype != np.uint8:
            yield f"{name} have dtype {images.dtype}, expected uint8 (0 to 255)"
        if images.ndim != 4 or images.shape[3] not in (1, 3):
            expected = "[images, height, width, channels] with 1 or 3 channels"
            yield f"{name} have shape {list(images.shape)}, expected {expected}"
        if images.size == 0 and (name == "images" or len(images)):
            yield f"{name} are empty: shape {list(images.shape)}"
    train, test = list(data.images.shape[1:]), list(data.test_images.shape[1:])
    if train != test:
        yield f"images are {train} but test_images are {test}: they must agree"
    if len(data.classes) < 2:
        yield f"classes: {', '.join(data.classes) or 'none'}; expected 2 or more"
    if len(set(data.classes)) < len(data.classes):
        yield f"classes repeat a name: {', '.join(data.classes)}"
    yield from _label_problems("labels", data.labels, len(data.images), UNKNOWN, len(data.classes))
    yield from _label_problems("test_labels", data.test_labels, len(data.test_images), 0, len(data.classes))
    yield from _labelled_problems(data)
    yield from _site_problems(data)
    for name, values in (("mean", data.mean), ("std", data.std)):
        channels = data.shape[2]
        if len(values) and (len(values) != channels or not np.isfinite(values).all()):
            yield f"{name} is {list(values)}, expected {channels} finite number(s), one for each channel"
    if min(data.std, default=1.0) <= 0:
        yield f"std is {list(data.std)}, expected numbers above 0"


def _label_problems(
    name: str, labels: np.ndarray, images: int, lowest: int, number: int, what: str = "classes"
) -> Iterator[str]:
    if labels.dtype != np.int64:
        yield f"{name} have dtype {labels.dtype}, expected int64"
    if labels.shape != (images,):
        yield f"{name} have shape {list(labels.shape)}, expected [{images}], one for each image"
    unknown = f", or {UNKNOWN} where it is not known" if lowest == UNKNOWN else ""
    for wrong in np.flatnonzero((labels < lowest) | (labels >= number)):
        yield f"{name}[{wrong}] is {labels[wrong]}, expected 0 to {number - 1} for {number} {what}{unknown}"


def _labelled_problems(data: Dataset) -> Iterator[str]:
    unknown = np.flatnonzero(data.labels == UNKNOWN)
    if data.labelled is None:
        for image in unknown:
            yield f"labels[{image}] is not known, and `labelled` does not say so"
        return
    if data.labelled.dtype != np.bool_ or data.labelled.shape != data.labels.shape:
        yield f"labelled is {data.labelled.dtype} {list(data.labelled.shape)}, expected bool [{len(data.labels)}]"
    if not data.labelled.any():
        yield "labelled marks no image at all: at least one must carry a label"
    for image in unknown[data.labelled[unknown]]:
        yield f"labelled[{image}] is true but labels[{image}] is {UNKNOWN}"


def _site_problems(data: Dataset) -> Iterator[str]:
    if data.site is None:
        if data.sites or data.test_site is not None:
            yield "sites are named but `site` does not say which image is whose"
        return
    if data.site.dtype != np.int64 or data.site.shape != data.labels.shape:
        yield f"site is {data.site.dtype} {list(data.site.shape)}, expected int64 [{len(data.labels)}]"
    for image in np.flatnonzero((data.site < 0) | (data.site >= len(data.sites))):
        yield f"site[{image}] is {data.site[image]}, expected 0 to {len(data.sites) - 1}"
    for site in np.flatnonzero(np.bincount(data.site, minlength=len(data.sites)) == 0):
        yield f"site '{data.sites[site]}' owns no image"
    if data.test_site is not None:
        yield from _label_problems(
            "test_site", data.test_site, len(data.test_images), UNKNOWN, len(data.sites), "sites"
        )
