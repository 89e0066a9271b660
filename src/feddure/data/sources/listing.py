"""What is in a folder, the same on every system."""

from collections.abc import Iterator
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
    return sorted(found, key=lambda entry: entry.name)


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
