"""How large a site's message may become when it is put together, whatever it took to send.

Flower cuts arrays into parts, and a message names the parts of each array by number: one part may be named any number
of times, since equal parts are sent once. So a megabyte can stand for terabytes. Here the sizes of all arrays of a
message are added up before the first byte of one is put together. Nor does the grid wait for parts that were
announced, and do not come, any longer than for an answer.
"""

import threading
from functools import partial
from typing import Any

from flwr.app import Array
from flwr.superlink.grid import http_grid

from feddure.flower.app.limits import METADATA_BYTES, named_parts

# Fails, and the run with it, where another version of Flower puts messages together in another way.
_whole_message, _array = http_grid.inflate_object_from_contents, Array.inflate.__func__  # type: ignore[attr-defined]
_parts = http_grid.pull_objects
_left = threading.local()
_most = METADATA_BYTES


def allow(most: int) -> None:
    """Let the arrays of a message take so many bytes together from now on."""
    global _most
    _most = most


def guard(seconds: float) -> None:
    """Let Flower's grid refuse messages that would become larger, with a ValueError, and not wait longer for parts."""
    http_grid.pull_objects = partial(_parts, max_time=seconds)
    http_grid.inflate_object_from_contents = bounded_message  # type: ignore[assignment]
    Array.inflate = classmethod(_bounded_array)  # type: ignore[assignment, method-assign]


def bounded_message(object_id: str, contents: dict[str, bytes], **options: Any) -> Any:
    """Flower's function, for one message at a time in each thread."""
    _left.bytes = _most
    try:
        return _whole_message(object_id, contents, **options)
    finally:
        del _left.bytes


def _bounded_array(kind: type[Array], content: bytes, children: dict[str, Any] | None = None) -> Array:
    if hasattr(_left, "bytes"):
        _left.bytes -= sum(len((children or {})[name].data) for name in named_parts(content))
        if _left.bytes < 0:
            raise ValueError(f"its arrays take more than {_most:,} bytes")
    return _array(kind, content, children)
