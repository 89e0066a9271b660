"""What is in a folder, the same on every system."""

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
