"""Model files that experiments start from: safetensors alone, known by their hash; no code that a file names is run."""

import errno
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from feddure.errors import ConfigError
from feddure.files import read_regular

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE, AVERAGED_FILE = "model.safetensors", "averaged.safetensors"
"""Of a run's folder: the last global model, and its average over rounds where the server keeps one."""

MOST_BYTES = 2**32
"""Of a model file: it is read into memory."""


def identify(source: str | None) -> dict[str, str | None]:
    """The fields of a configuration that starts from here: the model's file, absolute, and its hash."""
    if not source:
        return {"init": None, "init_sha256": None}
    path = Path(source).expanduser().resolve()
    if path.is_dir():
        if not (path / MODEL_FILE).is_file():
            raise ConfigError(
                f"init (--init) {source}: {MODEL_FILE} is not in this folder; expected the folder of a finished run"
            )
        path /= AVERAGED_FILE if (path / AVERAGED_FILE).is_file() else MODEL_FILE
    try:
        about = path.stat()
        if not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        return {"init": str(path), "init_sha256": _sha256(path, about.st_mtime_ns, about.st_size)}
    except OSError as problem:
        raise _unreadable(path, problem) from None


def read(path: Path, sha256: str | None) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """The tensors of a file, and what feddure wrote about them, if it did; refused where its hash is another."""
    try:
        content = read_regular(path, MOST_BYTES)
    except OSError as problem:
        raise _unreadable(path, problem) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ConfigError(
            f"init (--init) {path}: the file has changed since this experiment was made of it; bring the old one back, "
            "or name the new one with --init for another experiment"
        )
    try:
        tensors, text = parse(content)
        about = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"init (--init) {path}: not a whole safetensors file ({problem}); "
            "`feddure export --format safetensors` writes one"
        ) from None
    return tensors, about if isinstance(about, dict) else {}


def parse(content: bytes) -> "tuple[dict[str, Tensor], str]":
    """The tensors of a safetensors file, and feddure's JSON about them; a ValueError where it is damaged."""
    from safetensors.torch import load  # seconds to import, and not all who ask for names need it

    try:
        tensors = load(content)
    except SafetensorError as problem:
        raise ValueError(str(problem)) from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return tensors, (header.get("__metadata__") or {}).get("feddure", "{}")


@lru_cache(maxsize=64)
def _sha256(path: Path, modified: int, size: int) -> str:
    """Grids ask for the same file with every cell."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreadable(path: Path, problem: OSError) -> ConfigError:
    return ConfigError(
        f"init (--init) {path}: cannot be read ({problem.strerror}); expected a run's folder or a .safetensors file"
    )
