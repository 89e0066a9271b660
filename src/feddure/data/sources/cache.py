"""Decoded images, kept in a file with the signature of the files they came from, so that each is decoded once."""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

_SIGNATURE = "signature"


def sign(files: Iterable[tuple[str, Path]], about: str = "") -> str:
    """A hash that differs when the name, size or time of change of any file does, or what is said about all."""
    digest = hashlib.sha256(about.encode())
    for name, path in files:
        try:
            status = path.stat()
            facts = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
        except OSError:  # a link to nothing, say: decoding says what is wrong with it
            facts = f"{name}\n"
        digest.update(facts.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read(path: Path, signature: str) -> dict[str, Any] | None:
    """The arrays that were kept, or None where they are missing, damaged or of other files."""
    try:
        # Opened here because numpy leaves a damaged file open when it gives up on it.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            if str(kept[_SIGNATURE]) == signature:
                return {name: kept[name] for name in kept.files if name != _SIGNATURE}
    except Exception:  # numpy and zipfile fail in many ways on a damaged file, which is made again
        pass
    return None


def pack(signature: str, arrays: dict[str, Any]) -> memoryview:
    """The content of the file that keeps these arrays."""
    content = io.BytesIO()
    np.savez(content, **{_SIGNATURE: np.array(signature), **arrays})
    return content.getbuffer()
