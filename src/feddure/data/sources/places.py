"""Where data sets live when nobody says otherwise."""

import os
import sys
from pathlib import Path


def default_data_dir() -> Path:
    """$FEDDURE_DATA, or else the user's cache folder."""
    chosen = os.environ.get("FEDDURE_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir()


def cache_dir() -> Path:
    """The folder for this package's files that the platform lets programs make again."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "feddure" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "feddure"
    # The XDG rules say that a relative path is to be ignored.
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if shared.startswith("/") else Path.home() / ".cache") / "feddure"


def missing(name: str, data_dir: Path, expected: str) -> str:
    """The message for a data set that is not there."""
    return (
        f"{name} is not in {data_dir}: expected {expected}. "
        f"`feddure data fetch {name}` downloads it; --data-dir or FEDDURE_DATA names another folder"
    )
