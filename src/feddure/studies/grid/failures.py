"""What ends cells: an error in the code of a method, network or data set ends its own alone, a full disk the grid."""

import errno
import importlib
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from feddure.errors import ConfigError, FeddureError, RunError

_MACHINERY = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parent, Path(importlib.__file__).parent)
)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_MAKE_ROOM = (
    "finished cells are kept. Make room there, or make it writable, and run the same command again: it goes on from "
    "there"
)


class Problem(NamedTuple):
    """What has ended a cell, in words: the error itself would hold all that was in memory."""

    error: str  # an error in code in one line; what a check of the method or configuration says, as it says it
    traceback: str = ""  # of an error in code

    @property
    def reason(self) -> str:
        """In one line."""
        return " ".join(self.error.split())


def ends_all(error: Exception) -> bool:
    """Whether an error concerns more than what is under way: files that are not what they should be.

    What a check finds wrong with a method or a configuration (ConfigError) concerns its own cells, and so does memory
    that did not suffice.
    """
    return isinstance(error, FeddureError) and not isinstance(error, ConfigError)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While this holds, a full disk is said with what to do about it; `path` is where something is written."""
    try:
        yield
    except OSError as problem:
        raise RunError(f"{problem.filename or path}: cannot be written ({problem.strerror}); {_MAKE_ROOM}") from None
    except RunError as problem:
        if isinstance(problem.__context__, OSError) and problem.__context__.errno in _NO_ROOM:
            raise RunError(f"{problem}; {_MAKE_ROOM}") from None
        raise


def describe(error: Exception) -> Problem:
    """An error in words; one in code with its traceback, from the first line of the user's own code on."""
    if isinstance(error, ConfigError):
        return Problem(str(error))
    said = str(error).strip().splitlines()
    told = traceback.TracebackException.from_exception(error)
    _shorten(told)
    return Problem(": ".join([type(error).__name__, *said[:1]]), "".join(told.format()))


def is_usable(device: torch.device) -> bool:
    """Whether this process can go on with a device after an error: a failed assertion on a GPU takes it away."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def told(ended: Sequence[tuple[str, Problem]]) -> list[str]:
    """What has ended whom, in lines; of errors in code, the first with its traceback."""
    first = next((problem for _, problem in ended if problem.traceback), None)
    lines = []
    for who, problem in ended:
        if problem is first:
            lines += [f"an error in code ended {who}:", problem.traceback.rstrip()]
        elif problem.traceback:
            lines.append(f"an error in code ended {who}: {problem.error}")
        else:
            lines.append(f"{who} cannot be measured: {problem.error}")
    return lines


def _shorten(told: traceback.TracebackException) -> None:
    """Leave out what called the user's code; where there is none of it, all of the traceback matters."""
    own = (n for n, frame in enumerate(told.stack) if not frame.filename.startswith((*_MACHINERY, "<frozen ")))
    del told.stack[: next(own, 0)]
    for before in (told.__cause__, told.__context__):
        if before is not None:
            _shorten(before)
