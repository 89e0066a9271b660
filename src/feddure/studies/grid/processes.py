"""Grids in several processes of one machine: they share its GPU, or divide its cores.

While one process compiles, makes batches or evaluates, another keeps the GPU busy. A parent hands out groups of cells,
the most expensive first where it can, passes on what its children report, and ends them with itself.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch

from feddure.data.dataset import Dataset
from feddure.errors import FeddureWarning, RunError
from feddure.simulation.runs import Stop, stopping
from feddure.studies.grid.child import Begins, Failed, Finished, Lost, Note, Ready, Round, Wants, on_gpu, work
from feddure.studies.grid.cost import reference_seconds
from feddure.studies.grid.failures import CellsFailed, DatasetFailed, Failure, Problem
from feddure.studies.grid.order import busy, choose, portions, program_of, programs_of
from feddure.studies.grid.runner import Distant, GridStopped, Load, Watcher, unmeasured
from feddure.studies.grid.store import Cell, Store, named

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 60.0


def measure_in_processes(
    cells: Sequence[Cell],
    store: Store,
    load: Load,
    processes: int,
    together: int | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Measure all cells that are not finished and that nobody else works on, in this many processes at a time.

    Data sets are loaded here and handed on. Cells that an error of their own ends, or whose process is lost, are left
    out and named at the end, as the same cells would probably end another one too.
    """
    waiting = portions(unmeasured(cells, store), together, on_gpu)
    waiting.sort(key=lambda group: -sum(reference_seconds(cell.experiment) for cell in group))
    parent = _Parent(store, load, together, watcher, min(processes, len(waiting)))
    with stopping() as stop:
        try:
            parent.run(waiting, stop)
        finally:
            parent.close()


class _Child:
    """A process as its parent sees it."""

    def __init__(self, store: Store, together: int | None, threads: int):
        context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
        self.connection, end = context.Pipe()
        self.process = context.Process(target=work, args=(end, store, together, threads))
        resource_tracker.ensure_running()  # which would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child is not ready for one yet
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end.close()
        self.spoke = False
        self.leaves = False  # sent home, or about to end with an error that it has told
        self.cells: dict[str, Cell] = {}  # of the group that it has
        self.program: str | None = None  # that it has compiled last
        self.federations: dict[str, Distant] = {}

    def give(self, group: Sequence[Cell] | None) -> None:
        """Hand it a group, or let it go."""
        self.leaves = group is None
        self.cells = {cell.hash: cell for cell in group or ()}
        self.program = program_of(group[0]) if group else None
        self.federations = {}
        self.send(group)

    def send(self, what: Any) -> None:
        """Of a child that is gone, the end is heard next."""
        with suppress(OSError):
            self.connection.send(what)

    def ask_to_stop(self) -> None:
        """As Ctrl-C would."""
        if self.process.pid is not None and not self.leaves and self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)


class _Parent:
    """Keeps its children busy and listens to them."""

    def __init__(self, store: Store, load: Load, together: int | None, watcher: Watcher | None, processes: int):
        self._store = store
        self._load = load
        self._together = together
        self._watcher = watcher
        self._processes = processes
        self._waiting: list[list[Cell]] = []
        self._programs: dict[str, str] = {}
        self._children: list[_Child] = []
        self._lost: dict[str, Cell] = {}
        self._failures: list[Failure] = []
        self._said: set[str] = set()
        self._error: Exception | None = None
        self._stopped = False
        self._code: int | None = None  # of the last process that was lost

    def run(self, waiting: list[list[Cell]], stop: Stop) -> None:
        self._waiting = waiting
        self._programs = programs_of(waiting)
        for _ in range(self._processes):
            self._start()
        while self._children:
            if stop():
                self._stop()
            watched = [what for child in self._children for what in (child.connection, child.process.sentinel)]
            ready = wait(watched, _SECONDS_BETWEEN_LOOKS)
            for child in list(self._children):
                if child.connection in ready:
                    self._listen(child)
                elif child.process.sentinel in ready and not child.connection.poll():
                    self._gone(child)
        if stop():
            raise GridStopped(stop.signal)
        if self._error is not None:
            raise self._error
        if self._waiting:
            raise RunError(
                f"--processes: no process can be started (the last one ended with exit code {self._code}); finished "
                "cells are kept. Run this again, with fewer processes"
            )
        lost = list(self._lost.values())
        if self._failures or lost:
            why = Problem("its process ended: killed, or out of memory")
            raise CellsFailed(self._failures, _lost(lost) if lost else "", [Failure(cell, why) for cell in lost])

    def close(self) -> None:
        """End what is left of the children after an error here."""
        self._stop()
        for child in self._children:
            child.connection.close()
            child.process.join(_SECONDS_TO_END)
            child.process.kill()
            child.process.join()

    def _start(self) -> None:
        threads = max(1, torch.get_num_threads() // self._processes)
        self._children.append(_Child(self._store, self._together, threads))

    def _stop(self) -> None:
        """Hand out nothing more and let the children keep what they have; a second signal would break that off."""
        self._waiting.clear()
        if not self._stopped:
            self._stopped = True
            for child in self._children:
                child.ask_to_stop()

    def _listen(self, child: _Child) -> None:
        try:
            message = child.connection.recv()
        except (EOFError, OSError):
            self._gone(child)
            return
        child.spoke = True
        self._heed(child, message)

    def _heed(self, child: _Child, message: Any) -> None:
        match message:
            case Ready():
                child.give(self._next(child))
            case Wants(name):
                if not self._stopped:
                    child.send(self._dataset(name))
            case Begins(rounds):
                child.federations = {cell: Distant(child.cells[cell].experiment, n) for cell, n in rounds.items()}
                if self._watcher:
                    self._watcher.group_begins(list(child.federations.values()))
            case Round(cell, number, record, seconds):
                federation = child.federations[cell]
                federation.round = number
                if self._watcher:
                    self._watcher.round_done(federation, record, seconds)
            case Finished(cell):
                found = self._store.find(child.cells[cell])
                if self._watcher and found is not None:
                    self._watcher.cell_done(child.cells[cell], found)
            case Lost(cells):
                if self._watcher:
                    self._watcher.cells_lost([child.cells[cell] for cell in cells])
            case Failure():
                self._failures.append(message)
            case Note(text):
                if text not in self._said:
                    self._said.add(text)
                    warnings.warn(text, FeddureWarning, stacklevel=2)
            case Failed(error):
                child.leaves = True
                self._error = self._error or error
                self._stop()

    def _dataset(self, name: str) -> Dataset | DatasetFailed:
        """Where the data set's own code fails, that is the answer: it concerns the cells of who asks."""
        try:
            with _at_once():
                return self._load(name)
        except DatasetFailed as failed:
            return failed

    def _next(self, child: _Child) -> list[Cell] | None:
        if not self._waiting:
            return None
        others = {other.program for other in self._children if other is not child and other.program}
        return self._waiting.pop(choose(self._waiting, child.program, others | busy(self._programs, self._store)))

    def _gone(self, child: _Child) -> None:
        """A child has ended: as it was told to, or with the cells that it had."""
        self._children.remove(child)
        child.connection.close()
        child.process.join()
        if child.leaves or self._stopped:
            return
        self._code = child.process.exitcode
        failed = {failure.cell.hash for failure in self._failures}
        lost = {hash: cell for hash, cell in child.cells.items() if hash not in failed and not self._store.has(cell)}
        self._lost |= lost
        if self._watcher:
            self._watcher.cells_lost(list(lost.values()))
        if self._waiting and child.spoke:  # one that did not even start is not replaced
            self._start()


def _lost(cells: Sequence[Cell]) -> str:
    return (
        f"--processes: a process ended before it had measured {named(cells)} (killed, or out of memory); all other "
        "cells are kept. Run this again, with fewer processes or a smaller --together"
    )


@contextmanager
def _at_once() -> Iterator[None]:
    """While this holds, Ctrl-C and SIGTERM do not wait for the next look: a download may take long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
