"""The store of a grid: its finished cells in one file, and a folder for each cell under way.

A cell is an experiment; its name is the hash of all that determines its result, so studies that share an experiment
measure it once. Any number of processes, also of several machines with a shared folder, work on one store: a lock on
each cell keeps the others away from it, and a lock on the file lets one write at a time. Both go with their process.

`cells.jsonl` has a line for each environment that cells were measured in, then a line for each cell, sorted.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter

from feddure import experiments
from feddure.config import Experiment
from feddure.errors import FeddureError, RunError
from feddure.files import read_regular, write_whole
from feddure.studies.grid.failures import Problem, writing
from feddure.tracking import schema
from feddure.tracking.summary import LAST, Scores

CELLS, OUTDATED, UNFINISHED = "cells.jsonl", "outdated.jsonl", "unfinished"
OWN_CODE = "own_code"
"""In a cell's environment: the user's own code that it was measured with."""

_LOCK, _PROGRESS, _FAILURE = "lock", "progress.json", "failure.json"  # of a cell under way
_SHARED = {
    "feddure", "commit", "command", "python", "torch", "numpy", "cuda", "gpu", "cpu", "cores", "system", "device",
}  # fmt: skip
"""What many cells' environments have in common and is written once; the rest, as the time of its start, is a cell's."""
_Noted = TypeVar("_Noted")
_SECONDS_TO_CLAIM = 0.1  # one who just gives a cell back is waited for, one who trains it is not
_ATTEMPTS = 10


@dataclass(frozen=True)
class Cell:
    """One experiment of a study: where it stands in the study's table or chart, and all that determines its result."""

    study: str
    preset: str
    experiment: Experiment
    options: str = ""  # what it changes beyond its study, as key=value texts
    name: str = ""  # of the case that it is of, where it has one: what people call it

    @cached_property
    def hash(self) -> str:
        return experiments.fingerprint(self.experiment)[:16]


@dataclass(frozen=True)
class Measurement:
    """What a finished cell found."""

    config_hash: str
    experiment: dict[str, Any]  # what differs from the defaults
    rounds: int
    local_steps: schema.Number  # of a client in a round, on average
    accuracy_last: schema.Number | None  # shares of 1, as all accuracies here; none where there are no test images
    accuracy_last10: schema.Number | None
    curve: list[tuple[int, schema.Number, schema.Number | None]]  # round, accuracy, accuracy of the averaged model
    seconds: schema.Number  # of its rounds
    build_seconds: schema.Number  # compiling and capturing
    partition: str  # its hash
    accuracy_ema: schema.Number | None = None  # last evaluation of the averaged model
    together: int = 1  # cells of 0.1 that shared the lanes; `seconds` is this one's share, `build_seconds` of all
    left_out: schema.Number = 0.0  # share of the clients' updates that were not finite and did not count
    diagnostics: dict[str, schema.Number] = field(default_factory=dict)  # means over the last rounds
    bytes_per_round: dict[str, schema.Number] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    validation_last10: schema.Number | None = None
    validation_ema: schema.Number | None = None
    validation_best: schema.Number | None = None
    accuracy_best: schema.Number | None = None  # in the round of `validation_best`
    metrics: dict[str, dict[str, schema.Number]] = field(default_factory=dict)  # `Scores` beside accuracy's

    def scores(self, metric: str) -> Scores:
        """What it found by a metric; what only a later version knows of it is left out."""
        found: Mapping[str, Any] = self.metrics.get(metric, {})
        if metric == "accuracy":
            found = {"last": self.accuracy_last, "last10": self.accuracy_last10, "ema_last": self.accuracy_ema}
            found |= {name: getattr(self, name) for name in ("validation_last10", "validation_ema", "validation_best")}
            averaged = [share for *_, share in self.curve[-LAST:] if share is not None]
            found |= {"best": self.accuracy_best, "ema_last10": statistics.fmean(averaged) if averaged else None}
        return Scores(**{field.name: found.get(field.name) for field in dataclasses.fields(Scores)})


@dataclass(frozen=True)
class Progress:
    """How far a cell under way is, and who trains it."""

    host: str
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    command: str  # the same for all processes that one command has started
    round: int = 0
    score: schema.Number | None = None  # the last evaluation's, by the metric that ranks

    @property
    def is_alive(self) -> bool:
        """Whether its process is one of this machine and still there."""
        return self.host == socket.gethostname() and psutil.pid_exists(self.pid)


_MEASUREMENT, _NOTED, _FAILED = TypeAdapter(Measurement), TypeAdapter(Progress), TypeAdapter(Problem)


class Store:
    """The finished cells of a folder, and those under way; finished cells of `others` count too, for looking only."""

    def __init__(self, folder: Path, others: Iterable[Path] = ()):
        self.folder = folder
        self._folders = [*others, folder]
        self._read: tuple[object, dict[str, Measurement]] = None, {}

    # --- finished cells ----------------------------------------------------------------------------------
    def find(self, cell: Cell) -> Measurement | None:
        """What was measured for this cell, or None.

        What another state of the user's own code gave does not count, nor what lacks the metric that is to rank.
        """
        found, metric = self._finished().get(cell.hash), cell.experiment.metric
        if found is None or _is_outdated(found, cell) or (metric != "accuracy" and metric not in found.metrics):
            return None
        return found

    def has(self, cell: Cell) -> bool:
        return self.find(cell) is not None

    def measurements(self) -> Iterator[Measurement]:
        """All finished cells, by name."""
        yield from self._finished().values()

    def outdated(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that were measured when the user's own code was another."""
        finished = self._finished()
        return [cell for cell in cells if cell.hash in finished and _is_outdated(finished[cell.hash], cell)]

    def keep(self, *measurements: Measurement) -> None:
        """Cells are finished: they are in the file first, then away with what their resumption would have needed."""
        with self._writing() as finished:
            for one in measurements:
                before = finished.get(one.config_hash)
                if before is not None and one.environment.get(OWN_CODE):  # it was measured with other code
                    with (self.folder / OUTDATED).open("a", encoding="utf-8") as file:
                        file.write(json.dumps(dataclasses.asdict(before), ensure_ascii=False) + "\n")
                finished[one.config_hash] = one
        for one in measurements:
            empty(self.unfinished(one.config_hash))

    def merge(self, other: Path, only: Iterable[Cell] | None = None) -> int:
        """Take over finished cells of another folder, all or `only` these; returns how many were new."""
        found = finished_cells(other)
        wanted = found if only is None else {cell.hash for cell in only} & found.keys()
        with writing(self.folder / CELLS), self._writing() as finished:
            new = [name for name in wanted if name not in finished]
            finished.update({name: found[name] for name in new})
        return len(new)

    def _finished(self) -> dict[str, Measurement]:
        """All finished cells by their hashes; read again when a file is another."""
        state = [_state(folder / name) for folder in self._folders for name in (CELLS, "cells")]
        if self._read[0] != state:
            found: dict[str, Measurement] = {}
            for folder in self._folders:
                found |= _of_0_1(folder) | unpack(folder / CELLS)
            self._read = state, found
        return self._read[1]

    @contextmanager
    def _writing(self) -> Iterator[dict[str, Measurement]]:
        """The finished cells, to be changed by one process at a time; a kill leaves the file as it was or as it is."""
        make_folder(self.folder)
        with FileLock(self.folder / f".{CELLS}.lock"):
            self._read = None, {}  # what a shared folder says of its files may be old, what they hold is not
            finished = dict(self._finished())
            yield finished
            write_whole(self.folder / CELLS, pack(finished.values()), RunError, durable=True)

    # --- cells under way ---------------------------------------------------------------------------------
    def unfinished(self, config_hash: str) -> Path:
        """Where a cell's state lies while it is being measured."""
        return self.folder / UNFINISHED / config_hash

    @contextmanager
    def claimed(self, cell: Cell) -> Iterator[bool]:
        """Whether this cell is this process's to measure: nobody has finished it, and nobody else gets it meanwhile.

        A folder that was made for it and holds nothing to go on with goes again.
        """
        new = not self.folder.exists()
        folder = self.unfinished(cell.hash)
        lock = _lock(folder)
        if lock is None:
            yield False
            return
        try:
            yield not self.has(cell)  # it may have been finished between the look and the lock
        finally:
            (folder / _PROGRESS).unlink(missing_ok=True)
            if self.has(cell):
                empty(folder)
            (folder / _LOCK).unlink(missing_ok=True)
            _remove_empty(folder)
            lock.release()
            _remove_empty(self.folder / UNFINISHED, *([self.folder] if new else []))

    def note(self, cell: Cell, command: str, number: int = 0, score: float | None = None) -> None:
        """Let others see how far a cell is that this process has claimed."""
        progress = Progress(socket.gethostname(), os.getpid(), command, number, score)
        self._write(cell, _PROGRESS, dataclasses.asdict(progress))

    def notes(self) -> dict[str, Progress]:
        """What was noted last of cells that are not finished, by their hashes; their processes may have ended since."""
        return dict(self._written(_PROGRESS, _NOTED))

    def under_way(self) -> dict[str, Progress]:
        """The cells that processes of this machine are training, by their hashes."""
        return {name: noted for name, noted in self.notes().items() if noted.is_alive}

    def fail(self, cell: Cell, problem: Problem) -> None:
        """An error has ended a cell; the command that is under way does not try it again."""
        (self.unfinished(cell.hash) / _PROGRESS).unlink(missing_ok=True)
        self._write(cell, _FAILURE, problem._asdict())

    def failures(self) -> dict[str, Problem]:
        """What has ended cells that are not finished, by their hashes."""
        return dict(self._written(_FAILURE, _FAILED))

    def forget_failures(self, cells: Iterable[Cell]) -> None:
        """These cells are tried again."""
        for name in self.failures().keys() & {cell.hash for cell in cells}:
            (self.unfinished(name) / _FAILURE).unlink(missing_ok=True)
            _remove_empty(self.unfinished(name), self.folder / UNFINISHED, self.folder)

    def _write(self, cell: Cell, name: str, content: Mapping[str, Any]) -> None:
        folder = self.unfinished(cell.hash)
        make_folder(folder)
        write_whole(folder / name, json.dumps(content).encode(), RunError)

    def _written(self, name: str, kind: TypeAdapter[_Noted]) -> Iterator[tuple[str, _Noted]]:
        for path in (self.folder / UNFINISHED).glob(f"*/{name}"):
            with suppress(OSError, ValueError):  # it is gone meanwhile, or none of ours
                yield path.parent.name, kind.validate_python(schema.parse(read_regular(path)))


def finished_cells(folder: Path) -> dict[str, Measurement]:
    """All finished cells of a folder by their hashes; a folder without, or a damaged file, is refused."""
    found = Store(folder)._finished()
    if not found:
        raise RunError(f"{folder}: no measured cells are there; expected a folder that `reproduce` or `sweep` wrote")
    return found


def unmeasured(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """The cells that have no measurement yet, each experiment once."""
    left = {cell.hash: cell for cell in cells if not store.has(cell)}
    return list(left.values())


# --- the file ------------------------------------------------------------------------------------------------
def pack(measurements: Iterable[Measurement]) -> bytes:
    """Cells as the lines of a file: environments first, each once, then the cells by name."""
    environments: dict[str, dict[str, Any]] = {}
    lines = []
    for one in sorted(measurements, key=lambda one: one.config_hash):
        shared = {name: value for name, value in one.environment.items() if name in _SHARED}
        own = {name: value for name, value in one.environment.items() if name not in _SHARED}
        key = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
        environments[key] = shared
        fields = _MEASUREMENT.dump_python(one, exclude={"config_hash", "environment"}, exclude_defaults=True)
        lines.append({"cell": one.config_hash, **fields, "environment": key, "about": own})
    first = [{"environment": key, **environments[key]} for key in sorted(environments)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [*first, *lines]).encode()


def unpack(path: Path) -> dict[str, Measurement]:
    """The cells of a file by their hashes; one that is damaged is refused."""
    environments: dict[str, dict[str, Any]] = {}
    found = {}
    number = 0
    try:
        for line in filter(None, read_regular(path).decode().split("\n")):
            number += 1
            tree = schema.parse(line)
            key = tree.pop("environment")
            if "cell" not in tree:
                environments[key] = tree
                continue
            name, own = tree.pop("cell"), tree.pop("about")
            found[name] = _measurement(name, tree, environments[key] | own)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise RunError(
            f"{path}: line {number} is damaged ({problem}); restore the file from a copy, or delete that line to have "
            "its cell measured again"
        ) from None
    return found


def _measurement(config_hash: str, tree: dict[str, Any], about: dict[str, Any]) -> Measurement:
    measured = _MEASUREMENT.validate_json(json.dumps(tree | {"config_hash": config_hash}), strict=True)
    return dataclasses.replace(measured, environment=about)


def _of_0_1(folder: Path) -> dict[str, Measurement]:
    """The cells of a folder of feddure 0.1, which had a file for each, under the names that they have now."""
    found = {}
    for path in sorted((folder / "cells").glob("*.json")):
        try:
            tree = json.loads(read_regular(path).decode())
            experiment = experiments.build(tree.pop("experiment"))
            name = experiments.fingerprint(experiment)[:16]
            tree |= {"experiment": experiments.changes(experiment)}
            del tree["config_hash"]
            found[name] = _measurement(name, tree, tree.pop("environment"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, FeddureError) as problem:
            raise RunError(f"{path}: damaged ({problem}); delete it to have the cell measured again") from None
    return found


def named(cells: Sequence[Cell]) -> str:
    """These cells in a sentence."""
    names = [f"{cell.experiment.method} seed {cell.experiment.seed} ({cell.hash})" for cell in cells[:5]]
    more = len(cells) - len(names)
    word = "cell" if len(cells) == 1 else f"{len(cells)} cells"
    return f"{word} {', '.join(names)}" + (f" and {more} more" if more else "")


# --- files ---------------------------------------------------------------------------------------------------
def _is_outdated(found: Measurement, cell: Cell) -> bool:
    """What cannot be told is believed: cells from before this was recorded, code that is not to be found here."""
    then = found.environment.get(OWN_CODE)
    now = cell.experiment.own_code() if then else ""
    return bool(then and now) and then != now


def _lock(folder: Path) -> FileLock | None:
    """The lock of a cell's folder; None where another process has it."""
    while True:
        make_folder(folder)
        lock = FileLock(folder / _LOCK, timeout=_SECONDS_TO_CLAIM)
        try:
            lock.acquire()
            return lock
        except Timeout:
            return None
        except (FileNotFoundError, FileExistsError):  # another process has just removed the folder, or made it
            continue


def empty(folder: Path) -> None:
    """Remove all but the lock, which goes last: after it another process may begin to write here."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink(missing_ok=True)


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def make_folder(folder: Path) -> None:
    """A folder, and those on the way to it."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return
        except OSError as problem:
            if isinstance(problem, FileNotFoundError | FileExistsError) and attempt < _ATTEMPTS:
                continue  # another process has just removed an empty folder here or on the way
            raise RunError(f"{folder}: the folder cannot be made ({problem.strerror})") from None


def _remove_empty(*folders: Path) -> None:
    """Remove these folders, up to the first in which something is."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
