"""How large messages may be, from the size of what a run's method sends; who lets them through reads it from a file."""

import json
from pathlib import Path

from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content

from feddure.errors import RunError
from feddure.files import write_json

FILE = "upload.json"
"""At the server: what a site may send in the round under way; the proxy reads it."""
DOWNLOADS = "downloads.json"
"""At a site: what each run may send in a message; the SuperNode reads it."""
METADATA_BYTES = 256 << 10
"""Of a message beside its arrays, and of a request that carries no part of one: asking for work, heartbeats."""
PART_BYTES = 8 << 20
"""Of one request with a part of a message."""
FLOWERS_PART = 5 << 20
"""Flower sends arrays in parts of this size at most, and a part again where a connection was lost."""
_TIMES = 4
"""A method may send more than in its first round, such as FedMatch's helpers, but not many times as much."""
_KEPT_RUNS = 16


def upload_bytes(exact: int) -> int:
    """The most bytes that an answer with arrays of this size may take: the arrays, and some of them a second time."""
    return exact + 2 * min(exact, FLOWERS_PART) + METADATA_BYTES


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


def named_parts(array: bytes) -> list[str]:
    """The parts of an array as Flower sends it, each as often as it is named: a part that is sent once may be many."""
    parts = get_object_children_ids_from_object_content(array)
    return [parts[number] for number in json.loads(get_object_body(array, Array))["arraychunk_ids"]]


def _downloads(state: Path) -> dict[str, int]:
    try:
        return {str(run): int(size) for run, size in json.loads((state / DOWNLOADS).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
