"""A user's own method, network or data set, named by `package.module:name`.

To import a module is to run it, so a name that stands in a file is never reason enough: only names that somebody has
allowed are imported. Commands and Python calls allow what their user names himself, and what a file names where he has
said so (`--allow-modules`).
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from feddure.errors import ConfigError, FeddureError, did_you_mean

_ALLOWED: set[str] = set()


def allow(*names: object) -> None:
    """Let these names be imported, where they are import paths: they are the user's own word."""
    _ALLOWED.update(name for name in names if isinstance(name, str) and ":" in name)


def expect_allowed(*names: str, error: type[FeddureError] = ConfigError) -> None:
    """Refuse import paths that only a file names."""
    refused = [name for name in names if name not in _ALLOWED]
    if refused:
        raise error(
            f"{', '.join(refused)}: a file names this module, and to import a module runs its code. If you trust both, "
            "add --allow-modules (in Python: allow_modules=True)"
        )


def find(path: str, what: str, known: Iterable[str], error: type[FeddureError]) -> Any:
    """The object that a path names, or an `error` that says what `what` accepts."""
    known = list(known)
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        hint = did_you_mean(path, known)
        raise error(f"{what} '{path}': expected one of {', '.join(known)}, or package.module:name{hint}")
    expect_allowed(path, error=error)
    try:
        with _looking_here():
            module = importlib.import_module(module_name)
    except ImportError as problem:
        meant = f"; did you mean {module_name.removesuffix('.py')}:{name}?" if module_name.endswith(".py") else ""
        raise error(f"{what} '{path}': cannot import {module_name} ({problem}){meant}") from problem
    found = getattr(module, name, None)
    if not callable(found):
        raise error(f"{what} '{path}': {module_name} has no class or function '{name}'")
    return found


def own_lines(error: BaseException) -> str:
    """The lines of a traceback that are neither this package's nor those of anything installed."""
    installed = [Path(root).resolve() for root in (sys.prefix, sys.base_prefix, Path(__file__).parent)]
    frames = [(frame, Path(frame.filename).resolve()) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f for f, path in frames if path.is_file() and not any(path.is_relative_to(root) for root in installed)]
    return "".join(traceback.format_list(own))


def own_code(*paths: str) -> str:
    """Those of these import paths that are allowed, each with a hash of its file as this process first saw it."""
    # To look for a.b imports a: what is not allowed is not even looked for.
    found = {path: _hash(path.partition(":")[0]) for path in paths if path in _ALLOWED}
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
