"""A process of a grid: asks its parent (`grid_processes`) for groups of cells, measures them and tells what happens."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feddure import errors
from feddure.data.dataset import Dataset
from feddure.errors import FeddureWarning, RunError
from feddure.studies.grid.failures import DatasetFailed
from feddure.studies.grid.runner import Bench, GridStopped, Watched
from feddure.studies.grid.store import Cell, Measurement, Store
from feddure.tracking import records

# What it tells its parent, beside grid_failures.Failure.


class Ready(NamedTuple):
    """It wants a group of cells, or to be sent home with None."""


class Wants(NamedTuple):
    """It needs a data set."""

    dataset: str


class Begins(NamedTuple):
    """These cells, by their hashes, start or go on after so many rounds."""

    rounds: dict[str, int]


class Round(NamedTuple):
    """A cell has done a round."""

    cell: str
    number: int
    record: records.Record
    seconds: float


class Finished(NamedTuple):
    """A cell is kept."""

    cell: str


class Lost(NamedTuple):
    """Cells will not be finished, or not together."""

    cells: list[str]


class Note(NamedTuple):
    """The user should know."""

    text: str


class Failed(NamedTuple):
    """It ends with an error."""

    error: Exception


def on_gpu(cell: Cell) -> bool:
    return cell.experiment.engine.device != "cpu" and torch.cuda.is_available()


class _Alone(RunError):
    """There is no parent any more."""


def work(connection: Connection, store: Store, together: int | None, threads: int) -> None:
    """What a child does: one group after the other, until it is sent home or asked to stop."""
    os.setpgid(0, 0)  # Ctrl-C is the parent's to pass on
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # a user's modules are looked for there
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reporter = _Reporter(connection)
    failed = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        failed = _serve(reporter, Bench(store, reporter.load, together, reporter), threads)
    except KeyboardInterrupt:
        pass
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if failed is not None:
        reporter.say(Failed(failed))


def _serve(reporter: "_Reporter", bench: Bench, threads: int) -> Exception | None:
    """Measure what the parent hands out; returns an error that it should know of."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", FeddureWarning)
        warnings.showwarning = reporter.warned
        try:
            while group := reporter.ask(Ready()):
                if not on_gpu(group[0]):
                    torch.set_num_threads(threads)
                for failure in bench.measure(group):
                    reporter.say(failure)
                if not bench.usable:
                    sys.exit(1)  # to another process the GPU is as good as new
        except (GridStopped, _Alone):
            return None
        except (torch.OutOfMemoryError, MemoryError):
            sys.exit(1)  # the others may have enough when this one is gone
        except Exception as error:
            return _portable(error)
    return None


class _Reporter:
    """Tells the parent all that a grid tells who watches it, and asks it for work and data."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._alone = False
        self._hashes: dict[int, str] = {}
        self._dataset: tuple[str, Dataset] | None = None

    def say(self, message: tuple[Any, ...]) -> None:
        """Without a parent to hear it, what is under way is kept and the process ends."""
        if self._alone:
            return
        try:
            self._connection.send(message)
        except OSError:
            self._alone = True
            signal.raise_signal(signal.SIGTERM)

    def ask(self, message: tuple[Any, ...]) -> Any:
        """Say something that has an answer."""
        self.say(message)
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise _Alone from None

    def load(self, name: str) -> Dataset:
        """One data set in memory at a time."""
        if self._dataset is None or self._dataset[0] != name:
            self._dataset = None
            answer = self.ask(Wants(name))
            if isinstance(answer, DatasetFailed):
                raise answer
            self._dataset = name, answer
        return self._dataset[1]

    def warned(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """What Python calls to print a warning; those of other packages are not the user's business."""
        if issubclass(category, FeddureWarning):
            self.say(Note(str(message)))

    def group_begins(self, federations: Sequence[Watched]) -> None:
        self._hashes = {id(one): Cell("", "", one.experiment).hash for one in federations}
        self.say(Begins({self._hashes[id(one)]: one.round for one in federations}))

    def round_done(self, federation: Watched, record: records.Record, seconds: float) -> None:
        brief: records.Record = {name: record[name] for name in ("round", "test") if name in record}
        self.say(Round(self._hashes[id(federation)], federation.round, brief, seconds))

    def cell_done(self, cell: Cell, measurement: Measurement) -> None:
        self.say(Finished(cell.hash))

    def cells_lost(self, cells: Sequence[Cell]) -> None:
        self.say(Lost([cell.hash for cell in cells]))


def _portable(error: Exception) -> Exception:
    """The user's mistake as it is; an error in code with the traceback that it had here."""
    if isinstance(error, errors.FeddureError):
        kind = type(error) if type(error).__module__ == errors.__name__ else RunError
        return kind(str(error))
    return RuntimeError("in another process:\n" + "".join(traceback.format_exception(error)))
