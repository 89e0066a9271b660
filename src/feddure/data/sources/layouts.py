"""How people lay out their images: `look` finds what is there, before any of it is decoded.

    labelled/CLASS/, unlabelled/, test/CLASS/        ours: images whose class is known, is not, and those to test on
    CLASS/                                           torchvision's ImageFolder; unlabelled/ and test/ may lie beside
    train/CLASS/, val/CLASS/, test/CLASS/            with or without val/, test/ and unlabelled/
    clients/SITE/, test/CLASS/                       a folder a site, each laid out in one of these ways
    SITE/labelled/CLASS/, SITE/unlabelled/           the same without clients/
    a .csv or .json file                             a row an image: path, label, and perhaps split and site

Folders may be called otherwise (unlabeled, training, validation, sites, …: `_NAMES`). Deeper folders are searched,
files are taken in the order of their names, and files that are no images are counted and passed over.
"""

import csv
import difflib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from feddure.data.sources.images import MOST_PROBLEMS, looks_like_image
from feddure.errors import DataError
from feddure.files import read_regular, readable

_LITTER = {"thumbs.db", "desktop.ini", "__macosx"}
_NAMES = {
    "labelled": ("labelled", "labeled"),
    "unlabelled": ("unlabelled", "unlabeled", "unsup", "unsupervised"),
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
    "sites": ("clients", "sites"),
}
_PART = {name: part for part, names in _NAMES.items() for name in names}
_TABLES = (".csv", ".tsv", ".json", ".jsonl")
_COLUMNS = {
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "filepath"),
    "label": ("label", "class", "target", "category"),
    "split": ("split", "set", "subset", "part"),
    "site": ("site", "client", "hospital"),
}
_COLUMN = {name: column for column, names in _COLUMNS.items() for name in names}
EXPECTED = (
    "CLASS/ folders; labelled/CLASS/, unlabelled/ and test/CLASS/; train/CLASS/ and test/CLASS/; clients/SITE/, with "
    "one of these in it; or a list, as manifest.csv or by its path"
)


class File(NamedTuple):
    """An image's file, and what its place says of it."""

    path: Path
    kind: str | None  # the class; None where it is not known
    part: str = "train"  # or validation or test
    site: str | None = None
    where: str = ""  # what names the class, for errors


@dataclass
class Listing:
    """The files of a data set."""

    layout: str
    files: list[File] = field(default_factory=list)
    sites: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def look(path: Path) -> Listing:
    """What a folder or a table of images holds; all that is wrong with it is one error."""
    table = path if path.is_file() else _table_in(path)
    listing = _of_table(table) if table is not None else _of_folder(path)
    _place_validation(listing)
    listing.problems += _spelling_problems([(file.kind, file.where) for file in listing.files if file.kind], "class")
    kinds = {file.kind for file in listing.files if file.kind is not None and file.part == "train"}
    if not listing.problems:  # or else these would follow from them
        listing.problems += _class_problems(path, listing, kinds)
    if listing.problems:
        raise DataError("\n".join(listing.problems))
    numbers = table is not None and all(re.fullmatch("[0-9]{1,9}", kind) for kind in kinds)
    listing.classes = tuple(sorted(kinds, key=int) if numbers else sorted(kinds))
    return listing


def is_table(path: Path) -> bool:
    """Whether a file's name is that of a list of images."""
    return path.suffix.lower() in _TABLES


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


# --- folders --------------------------------------------------------------------------------------------------
class _Parts(NamedTuple):
    known: dict[str, Path]  # by part
    others: list[Path]  # classes, sites, or a mistake
    twice: list[Path]  # a part under a second name


def _of_folder(root: Path) -> Listing:
    parts = _parts(root)
    owners = [folder for folder in parts.others if {"labelled", "unlabelled"} & _parts(folder).known.keys()]
    if "sites" in parts.known:
        listing = Listing(f"a folder a site in {parts.known['sites'].name}/")
        listing.problems += _unknown(root, parts.others, "test")
        if {"labelled", "unlabelled", "train"} & parts.known.keys():
            listing.problems.append(
                f"{root}: both {parts.known['sites'].name}/ and other parts are there: use one of the two layouts"
            )
        _add_sites(listing, _subfolders(parts.known["sites"], "site", listing))
    elif owners and owners == parts.others and not {"labelled", "train"} & parts.known.keys():
        listing = Listing("a folder a site")
        _add_sites(listing, owners)
    else:
        listing = Listing(_layout(parts))
        _add_owned(listing, root, parts)
        return listing
    tests = parts.known.get("test") or parts.known.get("validation")
    if tests is not None:
        _add_classes(listing, tests, "test")
    if "validation" in parts.known and tests != parts.known["validation"]:
        listing.problems += _unknown(root, [parts.known["validation"]], "test")  # whose would it be?
    return listing


def _layout(parts: _Parts) -> str:
    names = [f"{folder.name}/" for part, folder in parts.known.items() if part != "sites"]
    if "labelled" in parts.known or "train" in parts.known:
        return ", ".join(names)
    return " beside ".join(["a folder a class (ImageFolder)", *([", ".join(names)] if names else [])])


def _parts(folder: Path) -> _Parts:
    """The folders in a folder whose names say what they are, and the others."""
    found = _Parts({}, [], [])
    for entry in entries(folder):
        if not entry.is_dir():
            continue
        part = _PART.get(name_of(entry).casefold())
        # A folder `train` of pictures, beside `car` and `bus`, is a class.
        holds_classes = part not in ("train", "validation", "test") or _has_folders(entry) or not entries(entry)
        if part is None or not holds_classes:
            found.others.append(entry)
        elif part not in found.known:
            found.known[part] = entry
        else:
            found.twice.append(entry)
    return found


def _has_folders(folder: Path) -> bool:
    return any(entry.is_dir() for entry in entries(folder))


def _add_sites(listing: Listing, folders: list[Path]) -> None:
    listing.problems += _spelling_problems([(name_of(folder), str(folder)) for folder in folders], "site")
    listing.sites = tuple(map(name_of, folders))
    for folder in folders:
        _add_owned(listing, folder, _parts(folder), name_of(folder))


def _add_owned(listing: Listing, folder: Path, parts: _Parts, site: str | None = None) -> None:
    """The images of one owner, the labelled ones first."""
    known, others, twice = parts
    for second in twice:
        first = known[_PART[name_of(second).casefold()]]
        listing.problems.append(f"{second}: {first.name}/ is there too; keep one of the two")
    labelled = known.get("labelled") or known.get("train")
    if labelled is not None:
        own = "labelled" if "labelled" in known else "train"
        beside = {"labelled": ("labelled", "unlabelled", "test"), "train": ("train", "val", "test", "unlabelled")}[own]
        taken = {_PART[name] for name in beside}
        strange = [path for part, path in known.items() if part not in taken]
        listing.problems += _unknown(folder, [*strange, *others], *beside)
        _add_classes(listing, labelled, "train", site)
    elif others:
        _subfolders(folder, "class", listing)
        listing.problems += [*_sites_as_classes(folder, others), *_misspelt(others)]
        _add_class_folders(listing, others, "train", site)
    elif "unlabelled" not in known:
        listing.problems.append(f"{folder}: neither labelled/ nor unlabelled/ nor class folders; expected {EXPECTED}")
    if "validation" in known and (labelled is None or "train" in known):
        _add_classes(listing, known["validation"], "validation", site)
    if "unlabelled" in known:
        listing.files += [File(path, None, site=site) for path in _images_below(known["unlabelled"], listing)]
    if "test" in known:
        _add_classes(listing, known["test"], "test", site)


def _add_classes(listing: Listing, folder: Path, part: str, site: str | None = None) -> None:
    _add_class_folders(listing, _subfolders(folder, "class", listing), part, site)


def _add_class_folders(listing: Listing, folders: list[Path], part: str, site: str | None) -> None:
    for folder in folders:
        meant = difflib.get_close_matches(name_of(folder).casefold(), _PART, n=1, cutoff=0.8)
        if meant and all(entry.is_dir() for entry in entries(folder)) and entries(folder):
            listing.problems.append(
                f"{folder}: unknown folder, with folders in it; a class holds images. Did you mean '{meant[0]}', "
                f"and at another place? Expected {EXPECTED}"
            )
            continue
        for path in _images_below(folder, listing):
            listing.files.append(File(path, name_of(folder), part, site, str(folder)))


def _sites_as_classes(root: Path, folders: list[Path]) -> Iterator[str]:
    """Folders of the same folders, without images, are sites rather than classes; whose image it is would be learnt."""
    inner = [{name_of(entry) for entry in entries(folder) if entry.is_dir()} for folder in folders]
    held = Counter(name for names in inner for name in names)
    shared = sorted(name for name, count in held.items() if count > 1)
    if len(shared) > 1 and all(inner) and not any(map(looks_like_image, chain.from_iterable(map(entries, folders)))):
        yield (
            f"{root}: {_first(map(name_of, folders))} hold the same folders ({_first(shared)}); if they are sites, "
            "move them into clients/, and if they are classes, into labelled/"
        )


def _misspelt(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        name = name_of(folder).casefold()
        if name.startswith("unlabel") or difflib.get_close_matches(name, _NAMES["unlabelled"][:2], cutoff=0.85):
            yield f"{folder}: did you mean unlabelled/? A class needs a name that is less like it"


def _first(names: Iterable[str]) -> str:
    """Some names and how many more there are."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _subfolders(folder: Path, what: str, listing: Listing) -> list[Path]:
    found = entries(folder)
    for entry in found:
        if entry.is_dir():
            continue
        if looks_like_image(entry):
            listing.problems.append(f"{entry}: expected only folders here; move it into the folder of its {what}")
        else:
            listing.ignored[_ending(entry)] += 1
    if not found:
        listing.problems.append(f"{folder}: is empty; expected a folder for each {what}")
    return [entry for entry in found if entry.is_dir()]


def _images_below(folder: Path, listing: Listing) -> list[Path]:
    images: list[Path] = []
    others: list[Path] = []
    for path in files_below(folder):
        (images if looks_like_image(path) else others).append(path)
    listing.ignored.update(map(_ending, others))
    if not images:
        kinds = f", but {', '.join(sorted(set(map(_ending, others))))}: convert those to PNG" if others else ""
        listing.problems.append(f"{folder}: no images in it{kinds}; add some or remove the folder")
    return images


def _ending(path: Path) -> str:
    return readable(path.suffix.lower()) or "without ending"


def _unknown(folder: Path, found: Iterable[Path], *known: str) -> list[str]:
    """A misspelt folder would be left out unseen."""
    return [f"{path}: unknown folder in {folder}; expected {', '.join(sorted(known))}" for path in found]


# --- tables ---------------------------------------------------------------------------------------------------
def _table_in(root: Path) -> Path | None:
    """The list of images that lies in a folder, where its folders do not say it all."""
    tables = [root / f"manifest{ending}" for ending in _TABLES if (root / f"manifest{ending}").is_file()]
    return tables[0] if tables and not {"labelled", "train", "sites"} & _parts(root).known.keys() else None


def _of_table(path: Path) -> Listing:
    listing = Listing(f"the list {path.name}")
    seen: dict[str, int] = {}
    for number, row in _rows(path):
        where = f"{path}: row {number}"
        if not row.get("path"):
            listing.problems.append(f"{where}: has no path")
            continue
        before = seen.setdefault(os.path.normpath(row["path"]), number)
        if before != number:
            listing.problems.append(f"{where}: {row['path']} is in row {before} too; keep one of the two")
        given = (row.get("split") or "train").casefold()
        part = {"labelled": "train"}.get(_PART.get(given, ""), _PART.get(given))
        kind = composed(row["label"]) if row.get("label") and part != "unlabelled" else None
        if part is None or part == "sites":
            listing.problems.append(f"{where}: split is '{given}', expected train, val, test or unlabelled")
        elif part == "test" and kind is None:
            listing.problems.append(f"{where}: a test image without label; give it one or remove the row")
        else:
            part = part if kind is not None and part != "unlabelled" else "train"
            site = composed(row["site"]) if row.get("site") else None
            listing.files.append(File(path.parent / row["path"], kind, part, site, where))
    owned = [file.site is not None for file in listing.files if file.part != "test"]
    if any(owned) and not all(owned):
        listing.problems.append(f"{path}: {owned.count(False)} of {len(owned)} training images have no site")
    listing.sites = tuple(sorted({file.site for file in listing.files if file.site and file.part != "test"}))
    absent = [file.path for file in listing.files if not file.path.exists()]
    if absent:
        first = ", ".join(str(image) for image in absent[:3])
        listing.problems.append(
            f"{path}: {len(absent):,} of {len(listing.files):,} images are not there, such as {first}; paths count "
            f"from {path.parent}"
        )
    if len(listing.problems) > MOST_PROBLEMS:
        listing.problems[MOST_PROBLEMS:] = [f"and {len(listing.problems) - MOST_PROBLEMS:,} more problems"]
    return listing


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table, by the names of `_COLUMNS`."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")  # names may be any bytes
    try:
        records = list(_records(path.suffix.lower(), text))
    except (ValueError, csv.Error, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:].upper()} ({error})") from None
    if not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: expected a row (in JSON an object) an image, with path and label")
    columns = {str(name): _COLUMN.get(str(name).strip().casefold()) for record in records for name in record}
    for wanted in ("path", "label"):
        if wanted not in columns.values():
            raise DataError(
                f"{path}: no column {wanted} (or {', '.join(_COLUMNS[wanted][1:])}); there are: "
                f"{', '.join(map(readable, columns))}"
            )
    for number, record in enumerate(records, 1):
        found: dict[str, str] = {}
        for name, value in record.items():
            column = columns[str(name)]
            if column is not None and value is not None and not isinstance(value, dict | list):
                found.setdefault(column, value if column == "path" else str(value).strip())
        yield number, {name: str(value) for name, value in found.items()}


def _records(ending: str, text: str) -> Iterator[Any]:
    if ending == ".json":
        found = json.loads(text)
        yield from found if isinstance(found, list) else [found]
    elif ending == ".jsonl":
        yield from (json.loads(line) for line in text.splitlines() if line.strip())
    else:
        header = text.partition("\n")[0]
        delimiter = max("\t;,", key=header.count)
        yield from csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)


# --- what all have in common ----------------------------------------------------------------------------------
def _class_problems(root: Path, listing: Listing, kinds: set[str]) -> Iterator[str]:
    if len(kinds) < 2:
        inner = [entry for entry in entries(root) if entry.is_dir()] if root.is_dir() else []
        meant = inner if len(inner) == 1 and _has_folders(inner[0]) else []
        meant += [entry for entry in entries(root) if is_table(entry)] if root.is_dir() else []
        hint = f"; did you mean {meant[0]}?" if meant else ""
        yield f"{root}: classes: {', '.join(kinds) or 'none'}; expected 2 or more: {EXPECTED}{hint}"
    strange = {file.where: file.kind for file in listing.files if file.part == "test" and file.kind not in kinds}
    for where, kind in list(strange.items())[:MOST_PROBLEMS]:
        yield f"{where}: no labelled image has the class '{kind}'; there are: {', '.join(sorted(kinds))}"


def _spelling_problems(named: Iterable[tuple[str, str]], what: str) -> Iterator[str]:
    """Names that differ in capital and small letters alone; of two sites' folders, in their characters."""
    known: dict[str, tuple[str, str]] = {}
    told = set()
    for name, where in named:
        other, there = known.setdefault(name.casefold(), (name, where))
        if (other != name or (what == "site" and there != where)) and where not in told:
            told.add(where)
            yield f"{where}: the {what} '{name}' is written '{other}' in {there}; give both one name"


def _place_validation(listing: Listing) -> None:
    """A validation part is the test part where there is no other, and else joins the training images."""
    count = sum(file.part == "validation" for file in listing.files)
    if not count:
        return
    tested = any(file.part == "test" for file in listing.files)
    part = "train" if tested else "test"
    listing.files = [file._replace(part=part) if file.part == "validation" else file for file in listing.files]
    listing.remarks.append(
        f"{count:,} validation images join the training ones; --set validation=0.1 sets labelled images aside"
        if tested
        else f"{count:,} validation images are the test part, as there is no other"
    )
