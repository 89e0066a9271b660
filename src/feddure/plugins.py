"""A user's own method, network or data set, named by `package.module:name`."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from feddure.errors import FeddureError, did_you_mean


def find(path: str, what: str, known: Iterable[str], error: type[FeddureError]) -> Any:
    """The object that a path names, or an `error` that says what `what` accepts."""
    known = list(known)
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        hint = did_you_mean(path, known)
        raise error(f"{what} '{path}': expected one of {', '.join(known)}, or package.module:name{hint}")
    try:
        with _looking_here():
            module = importlib.import_module(module_name)
    except ImportError as problem:
        raise error(f"{what} '{path}': cannot import {module_name} ({problem})") from problem
    found = getattr(module, name, None)
    if not callable(found):
        raise error(f"{what} '{path}': {module_name} has no class or function '{name}'")
    return found


def own_code(*paths: str) -> str:
    """Those of these names that are import paths, each with a hash of its file as this process first saw it."""
    found = {path: _hash(path.partition(":")[0]) for path in paths if ":" in path}
    return ", ".join(f"{path} {found[path]}" for path in sorted(found) if found[path])


@cache
def _hash(module: str) -> str | None:
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    try:
        with _looking_here():
            spec = importlib.util.find_spec(module)
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12] if spec and spec.origin else None
    except (ImportError, ValueError, OSError):
        return None  # what is wrong with it is told when it is needed


@contextmanager
def _looking_here() -> Iterator[None]:
    """The installed command, unlike `python -m`, does not look for modules where the user stands."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
