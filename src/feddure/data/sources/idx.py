"""The idx format of the MNIST family: a magic number, the sizes, then the bytes; gzipped or not."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from feddure.errors import DataError

_UNSIGNED_BYTES = 8


def read(path: Path, dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file with this number of dimensions."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); delete it and fetch it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
        raise DataError(
            f"{path}: begins with {raw[:4].hex() or 'nothing'}, expected 000008{dimensions:02x}: "
            f"an idx file of bytes in {dimensions} dimension(s)"
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    expected = int(np.prod(shape, dtype=object))
    if len(raw) - header != expected:
        raise DataError(
            f"{path}: {len(raw) - header} bytes after the header, expected {expected} "
            f"for the shape {list(shape)}; the file is damaged: delete it and fetch it again"
        )
    # A copy, because an array over immutable bytes could not be handed to torch.
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape).copy()
