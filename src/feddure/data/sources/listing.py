"""What is in a folder, the same on every system."""

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from feddure.errors import DataError

_LITTER = {"thumbs.db", "desktop.ini", "__macosx"}


def entries(folder: Path) -> list[Path]:
    """The files and folders in a folder by name, without the hidden ones that file managers leave behind."""
    try:
        found = [
            entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.name.lower() not in _LITTER
        ]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
    return sorted(found, key=lambda entry: (name_of(entry), entry.name))


def name_of(folder: Path) -> str:
    """What a class or site is called after its folder: composed (NFC), whichever system made the folder.

    A Mac writes "ä" as "a" and a combining mark. Files are opened under the name that the folder really has.
    """
    return composed(folder.name)


def composed(name: str) -> str:
    """A name in the form in which names that look alike are equal (NFC)."""
    return unicodedata.normalize("NFC", name)


def spelling_problems(folders: Iterable[Path], what: str) -> Iterator[str]:
    """Folders whose names differ in capital and small letters alone: nobody means two classes by them."""
    known: dict[str, Path] = {}
    for folder in folders:
        other = known.setdefault(name_of(folder).casefold(), folder)
        if name_of(other) != name_of(folder):
            yield (
                f"{folder}: the {what} '{name_of(folder)}' is written '{name_of(other)}' in {other}; give both "
                "folders one name"
            )


def files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files in a folder and in the folders below it, in the order of their names."""
    here = folder.resolve()
    if here in above:
        raise DataError(f"{folder}: a link to a folder that it lies in; remove it")
    for entry in entries(folder):
        if entry.is_dir():
            yield from files_below(entry, (*above, here))
        else:
            yield entry
