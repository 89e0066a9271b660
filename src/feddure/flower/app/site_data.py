"""A site's own images under the federation's description.

    PATH/labelled/<class>/**      images whose class is known
    PATH/unlabelled/**            images whose class is not
    PATH/test/<class>/**          images to test the received model on, at the site (may be missing)

A site may have some of the classes only, and labelled or unlabelled images only. A file that is no readable image is
left out and reported. Flower starts a process for each message, so pixels are kept in a cache; it is made again
when a file's name, size or time of change differs.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.sources import images as image_files
from feddure.data.sources.folder import entries, files_below, name_of
from feddure.data.sources.images import FULL_DEPTH, Rule, decode_all
from feddure.errors import DataError
from feddure.flower.app import private_files as private
from feddure.flower.app.description import Description, did_you_mean
from feddure.flower.app.sanitize import sayable

_PARTS = ("labelled", "unlabelled", "test")
_BLOCK = 1024  # files that are decoded together; one that is unreadable costs its block a second pass
_FORMAT = 2


@dataclass(frozen=True)
class Unreadable:
    """A file that gives no image."""

    file: str  # relative to the site's folder
    reason: str


@dataclass(frozen=True, eq=False)
class SiteData:
    """A site's images; positions in `dataset.images` say which are labelled and which are not."""

    dataset: Dataset
    labelled: np.ndarray
    unlabelled: np.ndarray
    unreadable: tuple[Unreadable, ...]

    def counts(self) -> dict[str, int]:
        """Labelled images of each class of the description."""
        found = np.bincount(self.dataset.labels[self.labelled], minlength=len(self.dataset.classes))
        return dict(zip(self.dataset.classes, found.tolist(), strict=True))


@dataclass(frozen=True)
class _File:
    path: Path
    part: str
    kind: str | None  # the class, or None where it is not known


def load(
    folder: Path,
    description: Description,
    cache: Path | None = None,
    progress: bool = False,
    depth: int = FULL_DEPTH,
) -> SiteData:
    """The images in a site's folder; `cache` is a folder in which to keep their pixels.

    `depth` is the number of bits that grey values in 16-bit files use; it is a matter of each site's own files.
    """
    parts = _find_parts(folder)
    if not {"labelled", "unlabelled"} & set(parts):
        raise sayable(
            DataError(f"{folder}: neither labelled/ nor unlabelled/; expected labelled/<class>/ with images"),
            "its folder has neither labelled/ nor unlabelled/",
        )
    data = _read(folder, parts, description, Rule(description.size, description.channels, depth=depth), cache, progress)
    if not len(data.labelled) + len(data.unlabelled):
        raise sayable(
            DataError(
                f"{folder}: no readable image in labelled/ or unlabelled/{_first(data.unreadable)}; "
                "expected at least one image"
            ),
            "no readable image in labelled/ or unlabelled/",
        )
    return data


def load_tests(
    folder: Path, description: Description, progress: bool = False, depth: int = FULL_DEPTH
) -> tuple[Dataset, tuple[Unreadable, ...]]:
    """The images in `folder/<class>/**` as the test set of a data set without training images."""
    files = list(_of_classes(folder, "test", description))
    rule = Rule(description.size, description.channels, depth=depth)
    data = _assemble(folder.name, folder, files, description, *_decode(folder, files, rule, progress))
    if not len(data.dataset.test_images):
        raise DataError(
            f"{folder}: no readable image to test on{_first(data.unreadable)}; expected <class>/ with images"
        )
    return data.dataset, data.unreadable


def without_images(description: Description) -> Dataset:
    """A data set that says how images look and what classes there are."""
    none = np.empty((0, description.size, description.size, description.channels), dtype=np.uint8)
    nothing = np.empty(0, dtype=np.int64)
    return Dataset(
        description.name, none, nothing, none, nothing, description.classes, description.mean, description.std
    )


def _find_parts(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise sayable(
            DataError(f"{folder}: there is no such folder; expected labelled/<class>/ and unlabelled/ in it"),
            "its folder of images is not there",
        )
    found = [entry.name for entry in entries(folder) if entry.is_dir()]
    for name in found:
        if name not in _PARTS:
            raise sayable(
                DataError(f"{folder / name}: unknown folder; expected {', '.join(_PARTS)}{did_you_mean(name, _PARTS)}"),
                f"a folder of another name beside {', '.join(_PARTS)}",
            )
    return found


def _read(
    folder: Path, parts: Sequence[str], description: Description, rule: Rule, cache: Path | None, progress: bool
) -> SiteData:
    files: list[_File] = []
    for part in parts:
        if part == "unlabelled":
            files += [_File(path, part, None) for path in files_below(folder / part)]
        else:
            files += _of_classes(folder / part, part, description)
    if cache is None:
        return _assemble(folder.name, folder, files, description, *_decode(folder, files, rule, progress))
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    path = cache / f"pixels-{place}-{_key(folder, files, description, rule)[:24]}.npz"
    private.make_folder(cache, DataError)
    kept = _read_cache(path, files)
    if kept is None:
        kept = _decode(folder, files, rule, progress)
        _write_cache(path, *kept)
        for old in cache.glob(f"pixels-{place}-*.npz"):
            if old != path:
                old.unlink(missing_ok=True)
    return _assemble(folder.name, folder, files, description, *kept)


def _of_classes(folder: Path, part: str, description: Description) -> Iterator[_File]:
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; expected a folder for each class")
    for entry in entries(folder):
        if not entry.is_dir():
            raise sayable(
                DataError(f"{entry}: expected only folders here; move it into the folder of its class"),
                f"a file in {part}/ that is in no class folder",
            )
        kind = name_of(entry)
        if kind not in description.classes:
            raise sayable(
                DataError(
                    f"{entry}: the federation '{description.name}' has no class '{kind}'; there are: "
                    f"{', '.join(description.classes)}{did_you_mean(kind, description.classes)}"
                ),
                "a class folder that the federation does not have",
            )
        for path in files_below(entry):
            yield _File(path, part, kind)


def _decode(folder: Path, files: Sequence[_File], rule: Rule, progress: bool) -> tuple[np.ndarray, list[str]]:
    """Pixels of the readable files in their order, and for each file why it is not readable, or nothing."""
    pixels, problems = [np.empty((0, rule.size, rule.size, rule.channels), dtype=np.uint8)], []
    for start in range(0, len(files), _BLOCK):
        paths = [file.path for file in files[start : start + _BLOCK]]
        try:
            pixels.append(decode_all(paths, rule, f"decoding {folder.name}", progress))
            problems += [""] * len(paths)
        except DataError:
            for path in paths:
                try:
                    pixels.append(image_files.read(path, rule)[None])
                    problems.append("")
                except image_files.Unreadable as problem:
                    problems.append(str(problem))
    return np.concatenate(pixels), problems


def _assemble(
    name: str,
    folder: Path,
    files: Sequence[_File],
    description: Description,
    pixels: np.ndarray,
    problems: Sequence[str],
) -> SiteData:
    number: dict[str | None, int] = {kind: position for position, kind in enumerate(description.classes)}
    number[None] = UNKNOWN
    readable = [file for file, problem in zip(files, problems, strict=True) if not problem]
    labels = np.array([number[file.kind] for file in readable], dtype=np.int64)
    tests = np.array([file.part == "test" for file in readable], dtype=bool)
    training = labels[~tests]
    dataset = Dataset(
        name=name,
        images=pixels[~tests],
        labels=training,
        test_images=pixels[tests],
        test_labels=labels[tests],
        classes=description.classes,
        mean=description.mean,
        std=description.std,
        labelled=training != UNKNOWN,
    )
    return SiteData(
        dataset,
        labelled=np.flatnonzero(training != UNKNOWN),
        unlabelled=np.flatnonzero(training == UNKNOWN),
        unreadable=tuple(
            Unreadable(file.path.relative_to(folder).as_posix(), problem)
            for file, problem in zip(files, problems, strict=True)
            if problem
        ),
    )


def _key(folder: Path, files: Sequence[_File], description: Description, rule: Rule) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {rule.depth} {description.fingerprint()}".encode())
    for file in files:
        name = file.path.relative_to(folder).as_posix()
        try:
            about = file.path.stat()
            found = [name, about.st_size, about.st_mtime_ns]
        except OSError:  # a link to nothing, say: it is left out with the other unreadable ones
            found = [name]
        digest.update(json.dumps(found).encode())
    return digest.hexdigest()


def _read_cache(path: Path, files: Sequence[_File]) -> tuple[np.ndarray, list[str]] | None:
    """What was kept, or None where nothing usable was: a cache that is damaged is made again."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            pixels, problems = kept["pixels"], json.loads(kept["problems"].tobytes())
    except Exception:  # numpy and zipfile fail in many ways on a damaged file
        return None
    whole = len(problems) == len(files) and len(pixels) == problems.count("")
    return (pixels, problems) if whole else None


def _write_cache(path: Path, pixels: np.ndarray, problems: Sequence[str]) -> None:
    content = io.BytesIO()
    np.savez(content, pixels=pixels, problems=np.frombuffer(json.dumps(list(problems)).encode(), dtype=np.uint8))
    private.write_file(path, content.getvalue(), DataError)


def _first(unreadable: Sequence[Unreadable]) -> str:
    return f" ({unreadable[0].file}: {unreadable[0].reason})" if unreadable else ""
