"""What is in a data set, counted and measured, and how it compares with the official one."""

import hashlib
from dataclasses import dataclass

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.sources.normalisation import measure
from feddure.data.sources.source import Source


@dataclass(frozen=True)
class Counts:
    """Images of one class or site; `labelled` counts those whose label the learner may see."""

    name: str
    train: int
    labelled: int
    test: int


@dataclass(frozen=True)
class Inspection:
    """A data set's description; `official` is None where there is nothing to compare with."""

    name: str
    shape: tuple[int, int, int]
    train: int
    test: int
    unlabelled: int | None  # None where a partition decides it
    classes: list[Counts]
    sites: list[Counts]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    measured_mean: tuple[float, ...]
    measured_std: tuple[float, ...]
    fingerprint: str
    official: bool | None
    deviations: list[str]
    notes: list[str]  # what is allowed, but perhaps not meant


def inspect(dataset: Dataset, source: Source | None = None) -> Inspection:
    """Count and measure a data set; `source` says what the official one looks like."""
    labelled = dataset.labels != UNKNOWN if dataset.labelled is None else dataset.labelled
    classes = [
        Counts(
            name,
            train=int((dataset.labels == number).sum()),
            labelled=int((labelled & (dataset.labels == number)).sum()),
            test=int((dataset.test_labels == number).sum()),
        )
        for number, name in enumerate(dataset.classes)
    ]
    sites = [] if dataset.site is None else _sites(dataset.sites, dataset.site, labelled)
    known = source is not None and source.train is not None
    deviations = _deviations(dataset, classes, source) if source is not None and known else []
    mean, std = measure(dataset.images)
    return Inspection(
        name=dataset.name,
        shape=dataset.shape,
        train=len(dataset.images),
        test=len(dataset.test_images),
        unlabelled=None if dataset.labelled is None else int((~labelled).sum()),
        classes=classes,
        sites=sites,
        mean=dataset.mean,
        std=dataset.std,
        measured_mean=mean,
        measured_std=std,
        fingerprint=dataset.fingerprint,
        official=not deviations if known else None,
        deviations=deviations,
        notes=[f"class '{counts.name}' has no test image" for counts in classes if not counts.test],
    )


def _sites(names: tuple[str, ...], site: np.ndarray, labelled: np.ndarray) -> list[Counts]:
    owned = [site == number for number in range(len(names))]
    return [
        Counts(name, train=int(mine.sum()), labelled=int((labelled & mine).sum()), test=0)
        for name, mine in zip(names, owned, strict=True)
    ]


def _deviations(dataset: Dataset, classes: list[Counts], source: Source) -> list[str]:
    found = []
    for split in ("train", "test"):
        total = getattr(source, split)
        # Every data set that has an official size has as many images of each class.
        expected = total // len(classes)
        wrong = [counts for counts in classes if getattr(counts, split) != expected]
        if wrong:
            given = ", ".join(f"{counts.name} {getattr(counts, split)}" for counts in wrong)
            found.append(f"{split} images: expected {expected} of each class, found {given}")
    for field, official in source.sha256.items():
        array = np.ascontiguousarray(getattr(dataset, field).astype(np.uint8, copy=False))
        if hashlib.sha256(array.data).hexdigest() != official:
            found.append(f"{field}: the SHA-256 of the decoded array is not the official one")
    return found
