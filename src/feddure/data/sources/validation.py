"""What must be true of a data set that somebody else made."""

from dataclasses import replace

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.sources.normalisation import measure
from feddure.errors import DataError


def check(dataset: Dataset, where: str) -> Dataset:
    """The data set if it is whole, with mean and std measured on its training images where it has none.

    `where` names the file or function in the error.
    """
    problem = _problem(dataset)
    if problem:
        raise DataError(f"{where}: {problem}")
    given = {name: values for name in ("mean", "std") if len(values := getattr(dataset, name))}
    if len(given) == 2:
        return dataset
    measured = dict(zip(("mean", "std"), measure(dataset.images), strict=True))
    return replace(dataset, **(measured | given))


def _problem(dataset: Dataset) -> str | None:
    return (
        _type_problem(dataset)
        or _images_problem("images", dataset.images)
        or _images_problem("test_images", dataset.test_images)
        or _shape_problem(dataset)
        or _classes_problem(dataset)
        or _labels_problem("labels", dataset.labels, len(dataset.images), UNKNOWN, dataset)
        or _labels_problem("test_labels", dataset.test_labels, len(dataset.test_images), 0, dataset)
        or _labelled_problem(dataset)
        or _sites_problem(dataset)
        or _normalisation_problem(dataset)
    )


def _type_problem(dataset: Dataset) -> str | None:
    for name in ("images", "labels", "test_images", "test_labels", "labelled", "site"):
        array = getattr(dataset, name)
        if not isinstance(array, np.ndarray) and not (array is None and name in ("labelled", "site")):
            return f"{name} is a {type(array).__name__}, expected a numpy array"
    return None


def _images_problem(name: str, images: np.ndarray) -> str | None:
    if images.dtype != np.uint8:
        return f"{name} have dtype {images.dtype}, expected uint8 (0 to 255)"
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        expected = "[images, height, width, channels] with 1 or 3 channels"
        return f"{name} have shape {list(images.shape)}, expected {expected}"
    return f"{name} are empty: shape {list(images.shape)}" if images.size == 0 else None


def _shape_problem(dataset: Dataset) -> str | None:
    train, test = list(dataset.images.shape[1:]), list(dataset.test_images.shape[1:])
    return f"images are {train} but test_images are {test}: they must agree" if train != test else None


def _classes_problem(dataset: Dataset) -> str | None:
    if len(dataset.classes) < 2:
        return f"classes: {', '.join(dataset.classes) or 'none'}; expected 2 or more"
    if len(set(dataset.classes)) < len(dataset.classes):
        return f"classes repeat a name: {', '.join(dataset.classes)}"
    return None


def _labels_problem(name: str, labels: np.ndarray, expected: int, lowest: int, dataset: Dataset) -> str | None:
    if labels.dtype != np.int64:
        return f"{name} have dtype {labels.dtype}, expected int64"
    if labels.shape != (expected,):
        return f"{name} have shape {list(labels.shape)}, expected [{expected}], one for each image"
    wrong = np.flatnonzero((labels < lowest) | (labels >= len(dataset.classes)))
    if len(wrong):
        unknown = f", or {UNKNOWN} where it is not known" if lowest == UNKNOWN else ""
        return (
            f"{name}[{wrong[0]}] is {labels[wrong[0]]}, expected 0 to {len(dataset.classes) - 1} "
            f"for {len(dataset.classes)} classes{unknown}"
        )
    return None


def _labelled_problem(dataset: Dataset) -> str | None:
    labelled = dataset.labelled
    if labelled is None:
        unknown = np.flatnonzero(dataset.labels == UNKNOWN)
        return f"labels[{unknown[0]}] is not known, and `labelled` does not say so" if len(unknown) else None
    if labelled.dtype != np.bool_ or labelled.shape != dataset.labels.shape:
        return f"labelled is {labelled.dtype} {list(labelled.shape)}, expected bool [{len(dataset.labels)}]"
    if not labelled.any():
        return "labelled marks no image at all: at least one must carry a label"
    wrong = np.flatnonzero(labelled & (dataset.labels == UNKNOWN))
    return f"labelled[{wrong[0]}] is true but labels[{wrong[0]}] is {UNKNOWN}" if len(wrong) else None


def _sites_problem(dataset: Dataset) -> str | None:
    if dataset.site is None:
        return "sites are named but `site` does not say which image is whose" if dataset.sites else None
    if dataset.site.dtype != np.int64 or dataset.site.shape != dataset.labels.shape:
        return f"site is {dataset.site.dtype} {list(dataset.site.shape)}, expected int64 [{len(dataset.labels)}]"
    wrong = np.flatnonzero((dataset.site < 0) | (dataset.site >= len(dataset.sites)))
    if len(wrong):
        return f"site[{wrong[0]}] is {dataset.site[wrong[0]]}, expected 0 to {len(dataset.sites) - 1}"
    idle = np.flatnonzero(np.bincount(dataset.site, minlength=len(dataset.sites)) == 0)
    return f"site '{dataset.sites[idle[0]]}' owns no image" if len(idle) else None


def _normalisation_problem(dataset: Dataset) -> str | None:
    channels = dataset.images.shape[3]
    for name, values in (("mean", dataset.mean), ("std", dataset.std)):
        if len(values) and (len(values) != channels or not np.isfinite(values).all()):
            return f"{name} is {list(values)}, expected {channels} finite number(s), one for each channel"
    return f"std is {list(dataset.std)}, expected numbers above 0" if min(dataset.std, default=1.0) <= 0 else None
