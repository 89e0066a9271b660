"""Grids: many experiments one after the other, resumable after a kill at any moment.

Any number of equal processes may work on one store. Each takes a cell that nobody has, first of the program that it
has compiled, else of one that no other process of this machine trains. An error of a cell's own ends that cell alone.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean

from feddure import environment, experiments
from feddure.data import partition as partitions
from feddure.data.dataset import Dataset
from feddure.errors import RunError
from feddure.reports import diagnostics
from feddure.simulation import checkpoint, program
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run
from feddure.simulation.lanes import Stopped
from feddure.simulation.runs import stopping
from feddure.studies.grid import failures
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import OWN_CODE, Cell, Measurement, Store, empty, named, unmeasured
from feddure.tracking import records, tracker
from feddure.tracking.observer import Observer
from feddure.tracking.summary import Summary, evaluations, summarise
from feddure.tracking.tensorboard import TensorBoard

CHECKPOINT_SECONDS = 300.0
"""A kill costs a cell at most about this much of its time."""

_WRITING = 0.05  # the largest share of the time that checkpoints may take; FedMatch's hold every client's ψ
_SECONDS_BETWEEN_NOTES = 0.5

LOST = Problem("its process ended: killed, or out of memory")

Load = Callable[[str], Dataset]
"""Gives the data set of a name."""


class GridStopped(RunError):
    """A signal ended a grid early."""

    def __init__(self, number: int, under_way: str = "those under way go on from where they are"):
        super().__init__(f"stopped; finished cells are kept, and {under_way}")
        self.exit_code = 128 + number


def measure(
    cells: Sequence[Cell],
    store: Store,
    load: Load,
    refresh: Callable[[], None] = lambda: None,
    command: str = "",
    engine: Engine | None = None,
    track: Sequence[str] = (),
) -> None:
    """Measure all cells that are not finished, have not failed and that no other process is working on.

    What has failed is in the store. `refresh` is called after every round and cell, for who shows progress. `command`
    is the same for processes that were started as one. An `engine` brings what it has compiled. `track` names services
    that every cell is reported to.
    """
    worker = _Worker(store, load, refresh, command or new_command(), engine, track)
    waiting = unmeasured(cells, store)
    programs = {cell.hash: program_of(cell) for cell in waiting}
    while waiting:
        others = {programs[name] for name in store.under_way() if name in programs}
        cell = min(waiting, key=lambda cell: (programs[cell.hash] != worker.program, programs[cell.hash] in others))
        waiting.remove(cell)
        worker.take(cell)
        refresh()


def new_command() -> str:
    """A name for the processes of one command; a process number alone comes again, after a restart of a container."""
    return f"{os.getpid()}-{time.time_ns()}"


def program_of(cell: Cell) -> str:
    """What cells that can share compiled code and captured graphs have in common."""
    return f"{cell.experiment.dataset} {program.fields(cell.experiment)} {cell.experiment.engine.model_dump_json()}"


@dataclass
class _Worker:
    """Measures one cell after the other; what was compiled for one serves the next."""

    store: Store
    load: Load
    refresh: Callable[[], None]
    command: str
    engine: Engine | None = None
    track: Sequence[str] = ()
    program: str | None = None  # that the engine has compiled last

    def take(self, cell: Cell) -> None:
        """Measure a cell, unless it is finished, has failed or is another process's; a failure goes into the store."""
        with ExitStack() as claim:
            with failures.writing(self.store.folder):
                if not claim.enter_context(self.store.claimed(cell)) or cell.hash in self.store.failures():
                    return
                before = self.store.notes().get(cell.hash)
                if before is not None and before.command == self.command:
                    self.store.fail(cell, LOST)  # it would probably end this process too
                    return
                self.store.note(cell, self.command)
            engine = self._engine(cell)
            problem = self._attempt(cell, engine)
            if problem is None:
                return
            with failures.writing(self.store.folder):
                self.store.fail(cell, problem)
            if not failures.is_usable(engine.device):
                raise RunError(
                    f"{named([cell])}: {problem.error}\nThe error left this process without its GPU; finished cells "
                    "are kept. Run the same command again to measure the others"
                )
            engine.release()  # nothing of what failed stays
            self.program = None

    def _engine(self, cell: Cell) -> Engine:
        options, wanted = cell.experiment.engine, program_of(cell)
        if self.engine is None or self.engine.options != options:
            self.engine = Engine(options)
        elif self.program != wanted:
            self.engine.release()
        self.program = wanted
        return self.engine

    def _attempt(self, cell: Cell, engine: Engine) -> Problem | None:
        """Measure a cell, or say in words what has ended it; memory is free again when this returns."""
        try:
            self._measure(cell, engine)
        except Exception as error:
            if failures.ends_all(error) or self.store.has(cell):
                raise
            return failures.describe(error)
        finally:
            if not (self.store.unfinished(cell.hash) / checkpoint.FILE).exists():
                empty(self.store.unfinished(cell.hash))
        return None

    def _measure(self, cell: Cell, engine: Engine) -> None:
        under_way = _UnderWay(cell, self, self.load(cell.experiment.dataset), engine)
        observers = [*self._trackers(cell, under_way.federation), under_way]
        with ExitStack() as closing, stopping() as stop:
            for observer in observers:
                closing.callback(observer.close)
            try:
                run(under_way.federation, observers, stop)
                for observer in observers:
                    observer.run_done(under_way.summary, self.store.unfinished(cell.hash))
            except Stopped:
                under_way.checkpoint()
                raise GridStopped(stop.signal) from None
            except Exception:
                if stop():  # asked in the very step that failed: no other cell is begun
                    raise GridStopped(stop.signal) from None
                raise

    def _trackers(self, cell: Cell, federation: Federation) -> list[Observer]:
        """What they keep on this machine is beside the cells: the folder of a cell goes when it is finished."""
        experiment, folder = cell.experiment, self.store.folder
        name = " ".join(filter(None, [experiment.method, f"seed={experiment.seed}", cell.options]))
        found = tracker.trackers(self.track, self.store.unfinished(cell.hash), folder.resolve().name, name, folder)
        if "tensorboard" in self.track:
            events = folder / "tensorboard" / re.sub(r"[^\w.=-]", "_", name)
            found.append(TensorBoard(events, federation.dataset.classes))
        return found


class _UnderWay(Observer):
    """A cell under way: its federation, its records, and what a resumption needs."""

    def __init__(self, cell: Cell, worker: _Worker, dataset: Dataset, engine: Engine):
        self._environment = environment.describe() | {"device": str(engine.device)}  # now: it has the time of the start
        if own_code := cell.experiment.own_code():
            self._environment[OWN_CODE] = own_code
        self._cell = cell
        self._worker = worker
        self._store = worker.store
        self._folder = worker.store.unfinished(cell.hash)
        experiment = cell.experiment
        partition = partitions.make(dataset, experiment.partition, experiment.partition_seed, experiment.validation)
        if checkpoint.is_of_other_code(experiment, self._folder):
            (self._folder / checkpoint.FILE).unlink()
        resumes = (self._folder / checkpoint.FILE).exists()
        self.federation = Federation(experiment, dataset, partition, engine, resumes)
        checkpoint.read(self.federation.server, self._folder)
        began = time.perf_counter()
        self.federation.prepare()
        self._build_seconds = time.perf_counter() - began
        self._score: float | None = None
        self.summary: Summary | None = None  # of the finished cell
        self._due = time.monotonic() + CHECKPOINT_SECONDS
        with failures.writing(self._folder):
            self._recorder = records.Recorder(self._folder, self.federation.round)
            self._note()

    def round_done(self, federation: Federation, record: records.Record, seconds: float) -> None:
        with failures.writing(self._folder):
            self._recorder.write(record, seconds)
            evaluated = record.get("test") or record.get("validation") or {}
            self._score = evaluated.get(self._cell.experiment.metric, self._score)
            if time.monotonic() > self._noted + _SECONDS_BETWEEN_NOTES:
                self._note()
        if federation.finished:
            with failures.writing(self._store.folder):
                self._store.keep(self._measurement())
        elif time.monotonic() > self._due:
            self.checkpoint()
        self._worker.refresh()

    def checkpoint(self) -> None:
        """Keep what a resumption needs."""
        began = time.monotonic()
        with failures.writing(self._folder):
            checkpoint.write(self.federation.server, self._folder)
        took = time.monotonic() - began
        self._due = time.monotonic() + max(CHECKPOINT_SECONDS, took / _WRITING)

    def close(self) -> None:
        with failures.writing(self._folder):
            self._recorder.close()

    def _note(self) -> None:
        self._noted = time.monotonic()
        self._store.note(self._cell, self._worker.command, self.federation.round, self._score)

    def _measurement(self) -> Measurement:
        metrics = records.read(self._folder / records.METRICS)
        timing = records.read(self._folder / records.TIMING)
        found = self.summary = summarise(metrics, timing, self._cell.experiment.metric)
        accuracy = found.scores["accuracy"]
        averaged = dict(evaluations(metrics, "accuracy", "test_ema"))
        ways = sorted({way for record in metrics for way in record["communication"]})
        means = diagnostics.last_means(diagnostics.trace(metrics)) if any(r.get("diagnostics") for r in metrics) else {}
        means |= diagnostics.probe_means(metrics)
        return Measurement(
            config_hash=self._cell.hash,
            experiment=experiments.changes(self._cell.experiment),
            rounds=found.rounds,
            local_steps=found.mean_local_steps or 0.0,
            accuracy_last=accuracy.last,
            accuracy_last10=accuracy.last10,
            accuracy_ema=accuracy.ema_last,
            curve=[(number, share, averaged.get(number)) for number, share in evaluations(metrics, "accuracy")],
            seconds=found.seconds or 0.0,
            build_seconds=self._build_seconds,
            partition=self.federation.partition.sha256,
            left_out=found.left_out / max(1, sum(len(record["clients"]) for record in metrics)),
            diagnostics={name: round(value, 5) for name, value in means.items() if name != "round"},
            bytes_per_round={way: fmean(record["communication"].get(way, 0) for record in metrics) for way in ways},
            environment=self._environment,
            validation_last10=accuracy.validation_last10,
            validation_ema=accuracy.validation_ema,
            validation_best=accuracy.validation_best,
            accuracy_best=accuracy.best,
            metrics={name: one.known() for name, one in found.scores.items() if name != "accuracy"},
        )
