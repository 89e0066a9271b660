"""A user's own method, network or data set, named by `package.module:name`."""

import difflib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from feddure.errors import FeddureError


def find(path: str, what: str, known: Iterable[str], error: type[FeddureError]) -> Any:
    """The object that a path names, or an `error` that says what `what` accepts."""
    known = list(known)
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        close = difflib.get_close_matches(path.lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise error(f"{what} '{path}': expected one of {', '.join(known)}, or package.module:name{hint}")
    # The installed command, unlike `python -m`, does not look for modules where the user stands.
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as problem:
        raise error(f"{what} '{path}': cannot import {module_name} ({problem})") from problem
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, name, None)
    if not callable(found):
        raise error(f"{what} '{path}': {module_name} has no class or function '{name}'")
    return found
