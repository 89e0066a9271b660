"""Grids: many experiments on the lanes of one machine, resumable after a kill at any moment.

Cells whose steps are the same program train side by side and share the lanes, compiled code and captured graphs. Each
cell's state is kept while it is under way, and a finished cell is never measured again (`cells`).
"""

import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from feddure import environment
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import Dataset
from feddure.errors import FeddureWarning, RunError
from feddure.reports import diagnostics_summary
from feddure.simulation import checkpoint
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run
from feddure.simulation.lanes import Stopped
from feddure.simulation.runs import stopping
from feddure.studies.grid import failures as grid_failures
from feddure.studies.grid.failures import CellsFailed, Failure, Problem
from feddure.studies.grid.order import busy, choose, groups, program_of, programs_of
from feddure.studies.grid.store import OWN_CODE, Cell, Measurement, Store, named
from feddure.tracking import records
from feddure.tracking.observer import Observer
from feddure.tracking.summary import evaluations, summarise

CHECKPOINT_SECONDS = 300.0
"""A kill costs a cell at most about this much of its time."""

_WRITING = 0.05  # the largest share of the time that checkpoints may take; FedMatch's hold every client's ψ

Load = Callable[[str], Dataset]
"""Gives the data set of a name."""


class Watched(Protocol):
    """A federation in training, here or in another process."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def round(self) -> int: ...


class Watcher(Protocol):
    """What is told how a grid goes on."""

    def group_begins(self, federations: Sequence[Watched]) -> None: ...
    def round_done(self, federation: Watched, record: records.Record, seconds: float) -> None: ...
    def cell_done(self, cell: Cell, measurement: Measurement) -> None: ...
    def cells_lost(self, cells: Sequence[Cell]) -> None: ...


@dataclass(eq=False)
class Distant:
    """A federation that trains in another process, for who watches."""

    experiment: Experiment
    round: int = 0


class GridStopped(RunError):
    """A signal ended a grid early."""

    def __init__(self, number: int, under_way: str = "those under way go on from where they are"):
        super().__init__(f"stopped; finished cells are kept, and {under_way}")
        self.exit_code = 128 + number


def unmeasured(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """The cells that have no measurement yet, each experiment once."""
    left = {cell.hash: cell for cell in cells if not store.has(cell)}
    return list(left.values())


def measure(
    cells: Sequence[Cell],
    store: Store,
    load: Load,
    together: int | None = None,
    watcher: Watcher | None = None,
    resumable: bool = True,
) -> None:
    """Measure all cells that are not finished and that no other process is working on.

    Cells that an error of their own ends are named at the end, when all others are measured. Where nobody could go on
    with cells under way, as in a store that is about to vanish, they need not be `resumable`. Programs that another
    process of this machine trains come last.
    """
    bench = Bench(store, load, together, watcher, resumable)
    waiting = groups(unmeasured(cells, store), together)
    programs, own = programs_of(waiting), None
    failures: list[Failure] = []
    while waiting and bench.usable:
        group = waiting.pop(choose(waiting, own, busy(programs, store)))
        own = program_of(group[0])
        failures += bench.measure(group)
    if failures:
        untried = sum(map(len, waiting))
        raise CellsFailed(
            failures,
            f"The error left this process without its GPU, so that {untried} other cells were not tried; --processes 2 "
            "tries them in processes of their own"
            if untried
            else "",
        )


class Bench:
    """Measures one group of cells after the other; what was compiled for one serves the next."""

    def __init__(
        self,
        store: Store,
        load: Load,
        together: int | None = None,
        watcher: Watcher | None = None,
        resumable: bool = True,
    ):
        self._store = store
        self._load = load
        self._together = together
        self._watcher = watcher
        self._resumable = resumable
        self._engine: Engine | None = None
        self._said: set[str] = set()
        self.usable = True  # until an error takes the GPU away from this process

    def measure(self, group: Sequence[Cell]) -> list[Failure]:
        """Measure those of a group that are not finished and that no other process is working on.

        Returns those that an error in a method, network, data set or configuration has ended.
        """
        failures: list[Failure] = []
        with ExitStack() as claims:
            with grid_failures.writing(self._store.folder):
                mine = claims.enter_context(self._store.claimed(group))
            if not mine:
                return failures
            options = mine[0].experiment.engine
            if self._engine is None or self._engine.options != options:
                self._engine = Engine(options)
            engine = self._engine
            for cell in mine:
                failures += self._try([cell], engine)
            if self.usable:
                engine.release()
        return failures

    def _try(self, cells: Sequence[Cell], engine: Engine) -> list[Failure]:
        """Measure some cells; where an error of theirs ends several, each is tried by itself."""
        problem = self._problem(cells, engine)
        if problem is None:
            return []
        left = self._give_up(cells)
        self.usable = grid_failures.is_usable(engine.device)
        if self.usable:
            engine.release()  # nothing of what failed stays
        if len(cells) > 1 and left and self.usable:
            warnings.warn(f"{named(left)}: {problem.error}; each is tried by itself", FeddureWarning, stacklevel=2)
            return [failure for cell in left for failure in self._try([cell], engine)]
        failures = [Failure(cell, problem) for cell in left]
        grid_failures.note(failures, self._said)
        for cell in left:
            _forget_unless_resumable(self._store.unfinished(cell.hash))
        return failures

    def _problem(self, cells: Sequence[Cell], engine: Engine) -> Problem | None:
        """Measure some cells, and what has ended them in words; memory is free again when this returns."""
        try:
            dataset = self._load(cells[0].experiment.dataset)
            _measure_together(cells, self._store, dataset, engine, self._watcher, self._resumable)
        except Exception as error:
            if grid_failures.ends_all(error) or not unmeasured(cells, self._store):
                raise
            return grid_failures.describe(error)
        return None

    def _give_up(self, cells: Sequence[Cell]) -> list[Cell]:
        """Tell who watches that these cells train no more; returns those that were not finished yet."""
        left = []
        for cell in cells:
            found = self._store.find(cell)
            if found is None:
                left.append(cell)
            elif self._watcher:
                self._watcher.cell_done(cell, found)
        if self._watcher:
            self._watcher.cells_lost(left)
        return left


def _forget_unless_resumable(folder: Path) -> None:
    """Remove the records of a cell that has no checkpoint; the lock goes with who has it."""
    if (folder / checkpoint.FILE).exists() or not folder.exists():
        return
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != "lock":
            entry.unlink(missing_ok=True)


def _measure_together(
    cells: Sequence[Cell], store: Store, dataset: Dataset, engine: Engine, watcher: Watcher | None, resumable: bool
) -> None:
    states = [_State(cell, store, dataset, engine, len(cells), resumable) for cell in cells]
    began = time.perf_counter()
    for state in states:
        state.federation.prepare()
    building = time.perf_counter() - began
    if watcher:
        watcher.group_begins([state.federation for state in states])
    clock = _Clock(states)
    for state in states:
        state.build_seconds = building
        state.clock = clock
    observers: list[Observer] = [*states, *([_Watching(watcher)] if watcher else [])]
    with stopping() as stop:
        try:
            for state in states:
                run(state.federation, observers, stop)
        except Stopped:
            for state in states:
                state.checkpoint()
            raise GridStopped(stop.signal) from None
        except Exception:
            if stop():  # asked in the very step that failed: no other cell is begun
                raise GridStopped(stop.signal) from None
            raise
        finally:
            with ExitStack() as ending:
                for state in states:
                    ending.callback(state.close)
    for cell in cells:
        found = store.find(cell)
        if watcher and found is not None:
            watcher.cell_done(cell, found)


class _Clock:
    """Shares the time that goes by evenly among the cells that are still training."""

    def __init__(self, cells: Sequence[object]):
        self._balances = {id(cell): 0.0 for cell in cells}
        self._mark = time.perf_counter()

    def take(self, cell: object, last: bool) -> float:
        """This cell's share of the time since it last asked; after the `last` time it takes no part any more."""
        now = time.perf_counter()
        for key in self._balances:
            self._balances[key] += (now - self._mark) / len(self._balances)
        self._mark = now
        share = self._balances.pop(id(cell))
        if not last:
            self._balances[id(cell)] = 0.0
        return share


class _State(Observer):
    """A cell under way: its federation, its records, and what a resumption needs."""

    build_seconds = 0.0
    clock: _Clock

    def __init__(self, cell: Cell, store: Store, dataset: Dataset, engine: Engine, together: int, resumable: bool):
        self._environment = environment.describe()  # now: it has the time of the start
        self._own_code = cell.experiment.own_code()
        self._cell = cell
        self._resumable = resumable
        self._store = store
        self._together = together
        experiment = cell.experiment
        partition = partitions.make(dataset, experiment.partition, experiment.partition_seed)
        self.federation = Federation(experiment, dataset, partition, engine)
        self._folder = store.unfinished(cell.hash)
        if checkpoint.is_of_other_code(experiment, self._folder):
            (self._folder / checkpoint.FILE).unlink()
        checkpoint.read(self.federation.server, self._folder)
        with grid_failures.writing(self._folder):
            self._recorder = records.Recorder(self._folder, self.federation.round)
        self._due = time.monotonic() + CHECKPOINT_SECONDS

    def round_done(self, federation: Federation, record: records.Record, seconds: float) -> None:
        if federation is not self.federation:
            return
        last = federation.round == federation.experiment.rounds
        with grid_failures.writing(self._folder):
            self._recorder.write(record, self.clock.take(self, last))
        if last:
            measurement = self._measurement()
            with grid_failures.writing(self._store.folder):
                self._store.keep(measurement)
        elif time.monotonic() > self._due:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Keep what a resumption needs, unless there is none to come."""
        if not self._resumable or self._store.has(self._cell):
            return
        began = time.monotonic()
        with grid_failures.writing(self._folder):
            checkpoint.write(self.federation.server, self._folder)
        took = (time.monotonic() - began) * self._together
        self._due = time.monotonic() + max(CHECKPOINT_SECONDS, took / _WRITING)

    def close(self) -> None:
        with grid_failures.writing(self._folder):
            self._recorder.close()

    def _measurement(self) -> Measurement:
        metrics = records.read(self._folder / records.METRICS)
        found = summarise(metrics, records.read(self._folder / records.TIMING))
        averaged = dict(evaluations(metrics, "accuracy", "test_ema"))
        assert found.accuracy_last is not None
        assert found.accuracy_last10 is not None
        ways = {way for record in metrics for way in record["communication"]}
        return Measurement(
            experiment=self._cell.experiment.model_dump(),
            config_hash=self._cell.hash,
            rounds=found.rounds,
            local_steps=found.mean_local_steps or 0.0,
            accuracy_last=found.accuracy_last,
            accuracy_last10=found.accuracy_last10,
            accuracy_ema=found.accuracy_ema_last,
            curve=[(number, share, averaged.get(number)) for number, share in evaluations(metrics, "accuracy")],
            seconds=found.seconds or 0.0,
            build_seconds=self.build_seconds,
            together=self._together,
            partition=self.federation.partition.sha256,
            left_out=found.left_out / max(1, sum(len(record["clients"]) for record in metrics)),
            diagnostics=_last_diagnostics(metrics),
            bytes_per_round={
                way: sum(record["communication"].get(way, 0) for record in metrics) / len(metrics)
                for way in sorted(ways)
            },
            environment=self._environment
            | {"device": str(self.federation.engine.device)}
            | ({OWN_CODE: self._own_code} if self._own_code else {}),
        )


class _Watching(Observer):
    """Passes rounds on to a grid's watcher."""

    def __init__(self, watcher: Watcher):
        self._watcher = watcher

    def round_done(self, federation: Federation, record: records.Record, seconds: float) -> None:
        self._watcher.round_done(federation, record, seconds)


def _last_diagnostics(metrics: Sequence[records.Record]) -> dict[str, float]:
    """What pseudo labels and regulators were like in the last rounds; nothing for methods without them."""
    if not any(record.get("diagnostics") for record in metrics):
        return {}
    means = diagnostics_summary.last_means(diagnostics_summary.trace(metrics))
    return {name: round(value, 5) for name, value in means.items() if name != "round" and value == value}
