"""Errors in the code of a method, network or data set: they end the cells in which they happen, and no others."""

import importlib
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from feddure.errors import FeddureError, FeddureWarning, RunError
from feddure.studies.cells import Cell, named

_MACHINERY = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, Path(importlib.__file__).parent)
)


class Problem(NamedTuple):
    """An error in code, in words: the error itself would hold all that was in memory."""

    error: str  # in one line
    traceback: str


class Failure(NamedTuple):
    """A cell that an error in code has ended."""

    cell: Cell
    problem: Problem


class DatasetFailed(Exception):
    """The code of a data set has raised an error, and only the cells with these data are concerned."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem = problem


class CellsFailed(RunError):
    """A grid is through, but for some cells that ended with an error in code."""

    def __init__(self, failures: Sequence[Failure], more: str = ""):
        them = "it" if len(failures) == 1 else "them"
        end = ":" if len(failures) == 1 else ". The first error:"
        parts = [
            f"an error in code ended {named([failure.cell for failure in failures])}{end}",
            failures[0].problem.traceback.rstrip(),
            f"What is finished is kept, and the same command tries {them} again",
        ]
        super().__init__("\n".join([*parts, more] if more else parts))
        self.failures = list(failures)


def ends_all(error: Exception) -> bool:
    """Whether an error concerns more than the cells under way: a mistake of the user's, or too little memory."""
    return isinstance(error, FeddureError | torch.OutOfMemoryError | MemoryError)


def describe(error: Exception) -> Problem:
    """An error in words, with its traceback from the first line of the user's own code on."""
    if isinstance(error, DatasetFailed):
        return error.problem
    said = str(error).strip().splitlines()
    told = traceback.TracebackException.from_exception(error)
    _shorten(told)
    return Problem(": ".join([type(error).__name__, *said[:1]]), "".join(told.format()))


@contextmanager
def loading() -> Iterator[None]:
    """While this holds, an error in code is one of a data set."""
    try:
        yield
    except Exception as error:
        if ends_all(error):
            raise
        raise DatasetFailed(describe(error)) from error


def note(failures: Sequence[Failure]) -> None:
    """Tell the user at once."""
    for cell, problem in failures:
        warnings.warn(f"{named([cell])}: {problem.error}", FeddureWarning, stacklevel=2)


def is_usable(device: torch.device) -> bool:
    """Whether this process can go on with a device after an error: a failed assertion on a GPU takes it away."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _shorten(told: traceback.TracebackException) -> None:
    """Leave out what called the user's code; where there is none of it, all of the traceback matters."""
    own = (n for n, frame in enumerate(told.stack) if not frame.filename.startswith((*_MACHINERY, "<frozen ")))
    del told.stack[: next(own, 0)]
    for before in (told.__cause__, told.__context__):
        if before is not None:
            _shorten(before)
