"""What ends cells: an error in the code of a method, network or data set ends its own alone, a full disk the grid."""

import errno
import importlib
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from feddure.errors import ConfigError, FeddureError, FeddureWarning, RunError
from feddure.studies.grid.store import Cell, named

_MACHINERY = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parent, Path(importlib.__file__).parent)
)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_MOST_ERRORS = 5  # different ones that a message tells


class Problem(NamedTuple):
    """What has ended a cell, in words: the error itself would hold all that was in memory."""

    error: str  # an error in code in one line; what a check of the method or configuration says, as it says it
    traceback: str = ""  # of an error in code

    @property
    def reason(self) -> str:
        """In one line."""
        return " ".join(self.error.split())


class Failure(NamedTuple):
    """A cell that has ended without a measurement."""

    cell: Cell
    problem: Problem


class DatasetFailed(Exception):
    """The code of a data set has raised an error, and only the cells with these data are concerned."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem = problem


class CellsFailed(RunError):
    """A grid is through, but for some cells: those that errors of their own have ended, and those that were lost."""

    def __init__(self, failures: Sequence[Failure], more: str = "", lost: Sequence[Failure] = ()):
        """`more` says what else there is to know, as of the cells that were lost."""
        parts = _by_error(failures)
        if failures:
            them = "it" if len(failures) == 1 else "them"
            parts.append(f"What is finished is kept, and the same command tries {them} again")
        super().__init__("\n".join([*parts, more] if more else parts))
        self.failures = [*failures, *lost]
        problems = {failure.problem for failure in failures}
        shared = problems.pop() if len(problems) == 1 and not lost else None
        self.mistake = shared.error if shared is not None and not shared.traceback else None  # of all these cells


class NotWritten(RunError):
    """What a grid measures cannot be kept, which ends it."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; finished cells are kept. Make room there, or make it writable, and run the same "
            "command again: it goes on from there"
        )


def ends_all(error: Exception) -> bool:
    """Whether an error concerns more than the cells under way: files that are not what they should be, or memory.

    What a check finds wrong with a method or a configuration (ConfigError) concerns its own cells.
    """
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return memory or (isinstance(error, FeddureError) and not isinstance(error, ConfigError))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While this holds, a full disk is said with what to do about it; `path` is where something is written."""
    try:
        yield
    except OSError as problem:
        raise NotWritten(f"{problem.filename or path}: cannot be written ({problem.strerror})") from None
    except RunError as problem:
        if isinstance(problem.__context__, OSError) and problem.__context__.errno in _NO_ROOM:
            raise NotWritten(str(problem)) from None
        raise


def describe(error: Exception) -> Problem:
    """An error in words; one in code with its traceback, from the first line of the user's own code on."""
    if isinstance(error, DatasetFailed):
        return error.problem
    if isinstance(error, ConfigError):
        return Problem(str(error))
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


def note(failures: Sequence[Failure], said: set[str]) -> None:
    """Tell the user at once; of a mistake that all cells share once, as what was `said` is not said again."""
    for cell, problem in failures:
        if problem.traceback:
            warnings.warn(f"{named([cell])}: {problem.error}", FeddureWarning, stacklevel=2)
        elif problem.error not in said:
            said.add(problem.error)
            text = f"cells of {cell.experiment.method} cannot be measured: {problem.error}"
            warnings.warn(text, FeddureWarning, stacklevel=2)


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
    parts = []
    traced = False
    for who, problem in ended:
        if not problem.traceback:
            parts.append(f"{who} cannot be measured: {problem.error}")
        elif traced:
            parts.append(f"an error in code ended {who}: {problem.error}")
        else:
            parts += [f"an error in code ended {who}:", problem.traceback.rstrip()]
            traced = True
    return parts


def _by_error(failures: Sequence[Failure]) -> list[str]:
    """Each different error with the cells that it has ended."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(failure.problem.error, []).append(failure)
    each = [(named([failure.cell for failure in group]), group[0].problem) for group in groups.values()]
    more = [failure.cell for group in list(groups.values())[_MOST_ERRORS:] for failure in group]
    return told(each[:_MOST_ERRORS]) + ([f"other errors ended {named(more)}"] if more else [])


def _shorten(told: traceback.TracebackException) -> None:
    """Leave out what called the user's code; where there is none of it, all of the traceback matters."""
    own = (n for n, frame in enumerate(told.stack) if not frame.filename.startswith((*_MACHINERY, "<frozen ")))
    del told.stack[: next(own, 0)]
    for before in (told.__cause__, told.__context__):
        if before is not None:
            _shorten(before)
