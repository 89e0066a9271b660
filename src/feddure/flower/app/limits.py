"""How large a message of a site may be, from the sizes of what its method sends; the proxy reads it from a file."""

import math
from pathlib import Path

from feddure.errors import RunError
from feddure.files import write_json
from feddure.flower.app.messages import Shapes

FILE = "upload.json"
METADATA_BYTES = 256 << 10
_PART_BYTES = 5 << 20
"""Flower sends arrays in parts of this size, and a part again where a connection was lost."""


def upload_bytes(shapes: Shapes) -> int:
    """The most bytes that an answer with these arrays may take: the arrays, and some of them a second time."""
    exact = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    return exact + 2 * min(exact, _PART_BYTES) + METADATA_BYTES


def tell_proxy(folder: Path, run_name: str, round_number: int, limit: int) -> None:
    """Let each site send so many bytes in this round."""
    write_json(folder / FILE, {"run": run_name, "round": round_number, "bytes": limit}, RunError)
