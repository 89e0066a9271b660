"""Files that nobody but their owner may read: keys, pixels of a site's images, what its client learnt."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddure.errors import ConfigError, FeddureError
from feddure.files import write_whole
from feddure.flower.app.sanitize import disclosed


def state_folder(node: Mapping[str, Any]) -> Path:
    """Where a site keeps what must survive a restart, as its node's configuration says."""
    if not node.get("state"):
        raise disclosed(ConfigError("the node's configuration has no 'state': start it with `feddure federate site`"))
    return Path(str(node["state"]))


def make_private_folder(folder: Path, error: type[FeddureError]) -> None:
    """Make a folder, and those above it that are missing, for its owner alone; one that is there becomes so."""
    try:
        for missing in reversed([above for above in folder.parents if not above.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    except OSError as problem:
        raise error(f"{folder}: cannot be made private ({problem.strerror}); choose a place you can write to") from None


def write_private_file(
    path: Path, content: bytes | memoryview, error: type[FeddureError], durable: bool = False
) -> None:
    """Write a file whole, for its owner alone, also while it is being written."""
    before = os.umask(0o077)
    try:
        write_whole(path, content, error, durable)
    finally:
        os.umask(before)


def is_private(path: Path) -> bool:
    """Whether a file can be read by its owner alone; where the system knows no such thing, yes."""
    return os.name == "nt" or path.stat().st_mode & 0o077 == 0
