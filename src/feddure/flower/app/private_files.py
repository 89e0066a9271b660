"""Files at a site that nobody but the node's own user may read: pixels of its images, and what its client learnt."""

from pathlib import Path

from feddure.errors import FeddureError
from feddure.files import write_whole


def make_folder(folder: Path, error: type[FeddureError]) -> None:
    """Make a folder, and those above it that are missing, for its owner alone; one that is there becomes so."""
    try:
        for missing in reversed([above for above in folder.parents if not above.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    except OSError as problem:
        raise error(
            f"{folder}: cannot be made private ({problem.strerror}); name a state folder that this user can write"
        ) from None


def write_file(path: Path, content: bytes, error: type[FeddureError], durable: bool = False) -> None:
    """Write a file whole, for its owner alone; until it has its mode, only its private folder protects it."""
    write_whole(path, content, error, durable)
    path.chmod(0o600)
