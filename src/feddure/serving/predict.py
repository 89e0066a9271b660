"""Image files in, classes with probabilities out.

A file becomes pixels by the rule of training's own folders (`data/sources/images.py`), in the size and number of
channels that the model was trained with.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feddure.data.sources.base import bar
from feddure.data.sources.images import Rule, Unreadable, note_narrow, read
from feddure.data.sources.layouts import composed, files_below
from feddure.errors import ConfigError, DataError
from feddure.serving.load import Model, load_model
from feddure.tracking import metrics

BATCH = 64
"""Images that are decoded and classified at once."""


@dataclass(frozen=True)
class Prediction:
    """What a model says about one image, or why it says nothing."""

    file: Path
    ranking: tuple[tuple[str, float], ...]  # every class with its probability, the most probable first
    problem: str | None = None  # why the file gives no image; then there is no ranking

    @property
    def label(self) -> str | None:
        """The most probable class."""
        return self.ranking[0][0] if self.ranking else None

    @property
    def probability(self) -> float | None:
        """The probability of the most probable class."""
        return self.ranking[0][1] if self.ranking else None


def predict(
    source: Path | str | Model,
    images: Path | str | Sequence[Path | str],
    *,
    batch: int = BATCH,
    device: str = "auto",
    model: str = "auto",
    progress: bool = False,
    allow_modules: bool = False,
) -> list[Prediction]:
    """The classes of image files, and of all files in folders.

    `source` is a run's folder, an exported file, or what `load_model` returned. A file that cannot be decoded has its
    `problem` and no ranking; the others go on. `allow_modules` is as in `load_model`.
    """
    paths = [images] if isinstance(images, Path | str) else images
    if not isinstance(source, Model):
        source = load_model(source, device=device, model=model, allow_modules=allow_modules)
    files = find_images([Path(path) for path in paths])
    return list(classify(source, files, batch, progress))


def find_images(paths: Sequence[Path]) -> list[Path]:
    """The files that were named, and those in the folders that were named, by name; hidden ones are passed over."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such image or folder")
        found += files_below(path) if path.is_dir() else [path]
    if not found:
        raise DataError(f"{', '.join(map(str, paths)) or 'nothing was given'}: no image in it; name files or folders")
    return found


def classify(model: Model, files: Sequence[Path], batch: int = BATCH, progress: bool = False) -> Iterator[Prediction]:
    """A prediction for each file, in order, as soon as its batch is done; a warning if files look too dark."""
    if batch < 1:
        raise ConfigError(f"batch: {batch} was given, expected 1 or more")
    about = model.description
    rule = Rule(about.size, about.channels, depth=about.depth)
    peaks: list[int] = []
    with ThreadPoolExecutor() as threads, bar("classifying images", len(files), progress) as advance:
        for start in range(0, len(files), batch):
            part = files[start : start + batch]
            decoded = list(threads.map(_decode, part, [rule] * len(part)))
            pixels = [image[0] for image in decoded if not isinstance(image, str)]
            peaks += [0 if isinstance(image, str) else image[1] for image in decoded]
            rows = iter(model(np.stack(pixels)) if pixels else ())
            for file, image in zip(part, decoded, strict=True):
                if isinstance(image, str):
                    yield Prediction(file, (), image)
                else:
                    shares = zip(model.classes, next(rows).tolist(), strict=True)
                    yield Prediction(file, tuple(sorted(shares, key=lambda share: -share[1])))
            advance(len(part))
    advice = "The model knows files of 16 bits: scale them, or train with folder:PATH?depth={bits} and predict again"
    note_narrow(files, peaks, rule, advice)


def evaluate(found: Sequence[Prediction], folders: Sequence[Path], classes: Sequence[str]) -> dict[str, Any] | None:
    """How good predictions are of the images in sub-folders that are called as classes; None where there are none.

    Intervals are Wilson's, of 95 %. A class that was neither seen nor predicted is left out.
    """
    known = set(classes)
    labelled = [(_folder_of(one.file, folders), one.label) for one in found if one.label is not None]
    answers = [(true, label) for true, label in labelled if true in known]
    if not answers:
        return None
    named = {name for answer in answers for name in answer}
    seen = {name: place for place, name in enumerate(name for name in classes if name in named)}
    counts = np.zeros((len(seen), len(seen)), dtype=np.int64)
    for true, label in answers:
        counts[seen[true], seen[label]] += 1
    said, images = metrics.from_confusion(counts), counts.sum(1)
    rows = zip(seen, images.tolist(), said["per_class"], said["specificity"], strict=True)
    return {
        "images": len(answers),
        "other_folders": sorted({true for true, _ in labelled} - known - {""}),
        "accuracy": said["accuracy"],
        "accuracy_interval": _wilson(said["accuracy"], len(answers)),
        "classes": [
            {
                "class": name,
                "images": number,
                "sensitivity": sensitivity if number else None,
                "sensitivity_interval": _wilson(sensitivity, number),
                "specificity": specificity,
                "specificity_interval": _wilson(specificity, len(answers) - number),
            }
            for name, number, sensitivity, specificity in rows
        ],
    }


def _folder_of(file: Path, folders: Sequence[Path]) -> str:
    """The name of the sub-folder in which a file lies, of the folder that was given."""
    below = [file.relative_to(folder) for folder in folders if file.is_relative_to(folder)]
    return composed(below[0].parts[0]) if below and len(below[0].parts) > 1 else ""


def _wilson(share: float | None, number: int) -> list[float] | None:
    from scipy.stats import binomtest  # takes a second: only when it is needed

    if share is None or not number:
        return None
    return list(binomtest(round(share * number), number).proportion_ci(method="wilson"))


def _decode(file: Path, rule: Rule) -> tuple[np.ndarray, int] | str:
    """The image's pixels and brightest value, or what is wrong with the file."""
    try:
        return read(file, rule)
    except Unreadable as problem:
        return str(problem)
