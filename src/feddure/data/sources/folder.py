"""A folder of the user's own images, with or without sites.

    PATH/labelled/<class>/**          images whose class is known
    PATH/unlabelled/**                images whose class is not (may be missing)
    PATH/test/<class>/**              images to test on (may be missing where `validation` sets labelled ones aside)

or, where each site is to be one client, PATH/clients/<site>/labelled/ and PATH/clients/<site>/unlabelled/ in
place of the first two. Files are taken in the order of their names; hidden files are passed over. The name of
the data set may end in options: `folder:PATH?size=32&channels=3&depth=16` (these are the defaults); `images.py`
states how a file becomes a square of that size. Mean and standard deviation are measured on the training images.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset, measure
from feddure.data.sources.images import FULL_DEPTH, LEAST_DEPTH, Rule, decode_all
from feddure.errors import DataError
from feddure.files import readable

_LITTER = {"thumbs.db", "desktop.ini", "__macosx"}


@dataclass(frozen=True)
class _Image:
    path: Path
    class_folder: Path | None  # None where the class is not known
    site: int = 0

    @property
    def kind(self) -> str | None:
        return None if self.class_folder is None else name_of(self.class_folder)


def load(where: str, progress: bool = False) -> Dataset:
    """The data set in a folder; `where` is the path with its options."""
    root, rule = _parse(where)
    problems: list[str] = []
    sites, images = _training(root, problems)
    tests = list(_labelled(root / "test", problems)) if (root / "test").is_dir() else []
    known = dict.fromkeys(image.class_folder for image in (*images, *tests) if image.class_folder is not None)
    problems += _spelling_problems(known, "class")
    classes = tuple(sorted({image.kind for image in images if image.kind is not None}))
    if not problems:  # or else these would follow from them
        problems += _class_problems(root, classes, tests)
    if problems:
        raise DataError("\n".join(problems))
    number: dict[str | None, int] = {kind: position for position, kind in enumerate(classes)}
    number[None] = UNKNOWN
    pixels = decode_all([image.path for image in (*images, *tests)], rule, "decoding images", progress)
    mean, std = measure(pixels[: len(images)])
    return Dataset(
        name=f"folder:{where}",
        images=pixels[: len(images)],
        labels=np.array([number[image.kind] for image in images], dtype=np.int64),
        test_images=pixels[len(images) :],
        test_labels=np.array([number[image.kind] for image in tests], dtype=np.int64),
        classes=classes,
        mean=mean,
        std=std,
        labelled=np.array([image.kind is not None for image in images]),
        sites=sites,
        site=np.array([image.site for image in images], dtype=np.int64) if sites else None,
    )


def depth_of(name: str) -> int:
    """The bits of grey values in 16-bit files that a data set's name states."""
    query = name.partition("?")[2] if name.startswith("folder:") else ""
    return int(dict(parse_qsl(query)).get("depth", FULL_DEPTH))


def entries(folder: Path) -> list[Path]:
    """The files and folders in a folder by name, without the hidden ones that file managers leave behind."""
    try:
        found = [
            entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.name.lower() not in _LITTER
        ]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
    return sorted(found, key=lambda entry: (name_of(entry), entry.name))


def files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and in the folders below it, in the order of their names."""
    seen: set[str] = set()
    left = [folder]
    while left:
        entry = left.pop()
        if entry != folder and not entry.is_dir():
            yield entry
            continue
        real = os.path.realpath(entry)
        if real in seen:  # a few links to each other could stand for any number of files
            raise DataError(f"{entry}: a link to a folder that is read already; remove it")
        seen.add(real)
        left += reversed(entries(entry))


def name_of(folder: Path) -> str:
    """What a class or site is called after its folder; files are opened under the name that the folder really has."""
    return composed(folder.name)


def composed(name: str) -> str:
    """A name in the form in which names that look alike are equal (NFC): a Mac writes "ä" as "a" and a mark."""
    return unicodedata.normalize("NFC", readable(name))


def _parse(where: str) -> tuple[Path, Rule]:
    location, _, query = where.partition("?")
    options = {"size": 32, "channels": 3, "depth": FULL_DEPTH}
    expected = {
        "size": (range(5, 4097), "5 to 4096 pixels"),
        "channels": ((1, 3), "1 (grey) or 3 (colour)"),
        "depth": (range(LEAST_DEPTH, FULL_DEPTH + 1), f"{LEAST_DEPTH} to {FULL_DEPTH} bits"),
    }
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DataError(f"folder:{where}: expected options like ?size=32&channels=3 after the path") from None
    for key, value in given:
        if key not in options:
            raise DataError(f"folder:{where}: unknown option '{key}'; there are: {', '.join(options)}")
        if not re.fullmatch("-?[0-9]{1,9}", value):
            raise DataError(f"folder:{where}: {key} is '{value}', expected a whole number")
        options[key] = int(value)
        allowed, text = expected[key]
        if options[key] not in allowed:
            raise DataError(f"folder:{where}: {key} is {value}, expected {text}")
    root = Path(location).expanduser()
    if not location or not root.is_dir():
        raise DataError(f"folder:{where}: there is no folder '{location}'; expected labelled/ and test/ in it")
    return root, Rule(options["size"], options["channels"], depth=options["depth"])


def _class_problems(root: Path, classes: tuple[str, ...], tests: list[_Image]) -> Iterator[str]:
    if len(classes) < 2:
        yield f"{root}: classes in labelled/: {', '.join(classes) or 'none'}; expected 2 or more: labelled/<class>/"
    for folder in dict.fromkeys(image.class_folder for image in tests if image.kind not in classes):
        yield f"{folder}: no labelled folder has this class; there are: {', '.join(classes)}"


def _spelling_problems(folders: Iterable[Path], what: str) -> Iterator[str]:
    """Folders whose names differ in capital and small letters, or two sites' in their characters, alone."""
    known: dict[str, Path] = {}
    for folder in folders:
        other = known.setdefault(name_of(folder).casefold(), folder)
        if name_of(other) != name_of(folder) or (what == "site" and other != folder):
            yield f"{folder}: the {what} '{folder.name}' is written '{other.name}' in {other}; give both one name"


def _training(root: Path, problems: list[str]) -> tuple[tuple[str, ...], list[_Image]]:
    parts = _parts(root, {"labelled", "unlabelled", "test", "clients"}, problems)
    if "clients" not in parts:
        return (), list(_owned(root, parts, problems))
    if parts & {"labelled", "unlabelled"}:
        problems.append(f"{root}: both clients/ and labelled/ or unlabelled/ are there: use one of the two layouts")
    folders = _subfolders(root / "clients", "site", problems)
    problems += _spelling_problems(folders, "site")
    images: list[_Image] = []
    for site, folder in enumerate(folders):
        images += _owned(folder, _parts(folder, {"labelled", "unlabelled"}, problems), problems, site)
    return tuple(map(name_of, folders)), images


def _owned(folder: Path, parts: set[str], problems: list[str], site: int = 0) -> Iterator[_Image]:
    """The training images of one owner, the labelled ones first."""
    if not parts & {"labelled", "unlabelled"}:
        problems.append(f"{folder}: neither labelled/ nor unlabelled/; expected labelled/<class>/ with images")
    if "labelled" in parts:
        yield from _labelled(folder / "labelled", problems, site)
    if "unlabelled" in parts:
        for path in _images_below(folder / "unlabelled", problems):
            yield _Image(path, None, site)


def _labelled(folder: Path, problems: list[str], site: int = 0) -> Iterator[_Image]:
    for class_folder in _subfolders(folder, "class", problems):
        for path in _images_below(class_folder, problems):
            yield _Image(path, class_folder, site)


def _parts(folder: Path, known: set[str], problems: list[str]) -> set[str]:
    """The known folders that are there; any other is an error, or a misspelt one would be left out unseen."""
    found = {entry.name for entry in entries(folder) if entry.is_dir()}
    for name in sorted(found - known):
        problems.append(f"{folder / name}: unknown folder; expected {', '.join(sorted(known))}")
    return found & known


def _subfolders(folder: Path, what: str, problems: list[str]) -> list[Path]:
    found = entries(folder)
    for entry in found:
        if not entry.is_dir():
            problems.append(f"{entry}: expected only folders here; move it into the folder of its {what}")
    if not found:
        problems.append(f"{folder}: is empty; expected a folder for each {what}")
    return [entry for entry in found if entry.is_dir()]


def _images_below(folder: Path, problems: list[str]) -> list[Path]:
    paths = list(files_below(folder))
    if not paths:
        problems.append(f"{folder}: no images in it; add some or remove the folder")
    return paths
