"""How large messages may be, from the size of what a run's method sends; who lets them through reads it from a file."""

import json
from pathlib import Path

from feddure.errors import RunError
from feddure.files import write_json

FILE = "upload.json"
"""At the server: what a site may send in the round under way; the proxy reads it."""
DOWNLOADS = "downloads.json"
"""At a site: what each run may send in a message; the SuperNode reads it."""
METADATA_BYTES = 256 << 10
_PART_BYTES = 5 << 20
"""Flower sends arrays in parts of this size, and a part again where a connection was lost."""
_TIMES = 4
"""A method may send more than in its first round, such as FedMatch's helpers, but not many times as much."""
_KEPT_RUNS = 16


def upload_bytes(exact: int) -> int:
    """The most bytes that an answer with arrays of this size may take: the arrays, and some of them a second time."""
    return exact + 2 * min(exact, _PART_BYTES) + METADATA_BYTES


def tell_proxy(folder: Path, run_name: str, round_number: int, limit: int) -> None:
    """Let each site send so many bytes in this round."""
    write_json(folder / FILE, {"run": run_name, "round": round_number, "bytes": limit}, RunError)


def allow_download(state: Path, run: int, first: int, helpers: int = 0) -> None:
    """Let a run's messages to this site take what its first one takes, a few times, and no more."""
    limit = (_TIMES + helpers) * first + METADATA_BYTES
    known = {name: size for name, size in _downloads(state).items() if name != str(run)}
    kept = dict(list(known.items())[1 - _KEPT_RUNS :])
    write_json(state / DOWNLOADS, kept | {str(run): limit}, RunError)


def allowed_download(state: Path, run: int) -> int:
    """How many bytes a message of a run may take; little where the site did not say."""
    return _downloads(state).get(str(run), METADATA_BYTES)


def _downloads(state: Path) -> dict[str, int]:
    try:
        return {str(run): int(size) for run, size in json.loads((state / DOWNLOADS).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
