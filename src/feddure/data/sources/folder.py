"""A folder of the user's own images, with or without sites.

    PATH/labelled/<class>/**          images whose class is known
    PATH/unlabelled/**                images whose class is not (may be missing)
    PATH/test/<class>/**              images to test on

or, where each site is to be one client, PATH/clients/<site>/labelled/ and PATH/clients/<site>/unlabelled/ in
place of the first two. Files are taken in the order of their names; hidden files are passed over. The name of
the data set may end in options: `folder:PATH?size=32&channels=3` (these are the defaults); `images.py` states
how a file becomes a square of that size. Mean and standard deviation are measured on the training images.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.sources.decode import Rule, decode_all
from feddure.data.sources.listing import entries, files_below
from feddure.data.sources.normalisation import measure
from feddure.errors import DataError


@dataclass(frozen=True)
class _Image:
    path: Path
    kind: str | None  # the class, or None where it is not known
    site: int = 0


def load(where: str, progress: bool = False) -> Dataset:
    """The data set in a folder; `where` is the path with its options."""
    root, rule = _parse(where)
    sites, images = _training(root)
    tests = list(_labelled(root / "test"))
    classes = tuple(sorted({image.kind for image in images if image.kind is not None}))
    if len(classes) < 2:
        found = ", ".join(classes) or "none"
        raise DataError(f"{root}: classes in labelled/: {found}; expected 2 or more: labelled/<class>/")
    for image in tests:
        if image.kind not in classes:
            raise DataError(
                f"{root / 'test' / str(image.kind)}: no labelled folder has this class; there are: {', '.join(classes)}"
            )
    number: dict[str | None, int] = {kind: position for position, kind in enumerate(classes)}
    number[None] = UNKNOWN
    pixels = decode_all([image.path for image in images], rule, "decoding training images", progress)
    mean, std = measure(pixels)
    return Dataset(
        name=f"folder:{where}",
        images=pixels,
        labels=np.array([number[image.kind] for image in images], dtype=np.int64),
        test_images=decode_all([image.path for image in tests], rule, "decoding test images", progress),
        test_labels=np.array([number[image.kind] for image in tests], dtype=np.int64),
        classes=classes,
        mean=mean,
        std=std,
        labelled=np.array([image.kind is not None for image in images]),
        sites=sites,
        site=np.array([image.site for image in images], dtype=np.int64) if sites else None,
    )


def _parse(where: str) -> tuple[Path, Rule]:
    location, _, query = where.partition("?")
    options = {"size": 32, "channels": 3}
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DataError(f"folder:{where}: expected options like ?size=32&channels=3 after the path") from None
    for key, value in given:
        if key not in options:
            raise DataError(f"folder:{where}: unknown option '{key}'; there are: {', '.join(options)}")
        if not (value.isascii() and value.isdigit()):
            raise DataError(f"folder:{where}: {key} is '{value}', expected a whole number")
        options[key] = int(value)
    if not 1 <= options["size"] <= 4096:
        raise DataError(f"folder:{where}: size is {options['size']}, expected 1 to 4096 pixels")
    if options["channels"] not in (1, 3):
        raise DataError(f"folder:{where}: channels is {options['channels']}, expected 1 (grey) or 3 (colour)")
    root = Path(location).expanduser()
    if not location or not root.is_dir():
        raise DataError(f"folder:{where}: there is no folder '{location}'; expected labelled/ and test/ in it")
    return root, Rule(size=options["size"], channels=options["channels"])


def _training(root: Path) -> tuple[tuple[str, ...], list[_Image]]:
    parts = _parts(root, {"labelled", "unlabelled", "test", "clients"})
    if "test" not in parts:
        raise DataError(f"{root}: no test/ folder; expected test/<class>/ with the images to test on")
    if "clients" not in parts:
        return (), list(_owned(root, parts))
    if parts & {"labelled", "unlabelled"}:
        raise DataError(f"{root}: both clients/ and labelled/ or unlabelled/ are there: use one of the two layouts")
    folders = _subfolders(root / "clients", "site")
    images: list[_Image] = []
    for site, folder in enumerate(folders):
        images += _owned(folder, _parts(folder, {"labelled", "unlabelled"}), site)
    return tuple(folder.name for folder in folders), images


def _owned(folder: Path, parts: set[str], site: int = 0) -> Iterator[_Image]:
    """The training images of one owner, the labelled ones first."""
    if not parts & {"labelled", "unlabelled"}:
        raise DataError(f"{folder}: neither labelled/ nor unlabelled/; expected labelled/<class>/ with images")
    if "labelled" in parts:
        yield from _labelled(folder / "labelled", site)
    if "unlabelled" in parts:
        for path in _images_below(folder / "unlabelled"):
            yield _Image(path, None, site)


def _labelled(folder: Path, site: int = 0) -> Iterator[_Image]:
    for class_folder in _subfolders(folder, "class"):
        for path in _images_below(class_folder):
            yield _Image(path, class_folder.name, site)


def _parts(folder: Path, known: set[str]) -> set[str]:
    """The known folders that are there; any other is an error, or a misspelt one would be left out unseen."""
    found = {entry.name for entry in entries(folder) if entry.is_dir()}
    for name in sorted(found - known):
        raise DataError(f"{folder / name}: unknown folder; expected {', '.join(sorted(known))}")
    return found


def _subfolders(folder: Path, what: str) -> list[Path]:
    found = entries(folder)
    for entry in found:
        if not entry.is_dir():
            raise DataError(f"{entry}: expected only folders here; move it into the folder of its {what}")
    if not found:
        raise DataError(f"{folder}: is empty; expected a folder for each {what}")
    return found


def _images_below(folder: Path) -> list[Path]:
    paths = list(files_below(folder))
    if not paths:
        raise DataError(f"{folder}: no images in it; add some or remove the folder")
    return paths
