"""Cells: single measurements of a grid of experiments, each kept in a file of its own.

A cell is an experiment; its name is the hash of all that determines its result. A finished cell is one small JSON file,
so that a kill loses none, folders from several machines merge by copying, and studies that share an experiment measure
it once. While a cell is being measured, a lock keeps every other process away from it.
"""

import csv
import fcntl
import io
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from feddure.config import Experiment
from feddure.data import recipes
from feddure.data.sources import find_source
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.tracking.records import Record
from feddure.tracking.summary import LAST, summarise

CELLS, UNFINISHED, OUTDATED, RESULTS = "cells", "unfinished", "outdated", "results.csv"
OWN_CODE = "own_code"
"""In a cell's environment: the user's own code that it was measured with."""

_ATTEMPTS = 10

COLUMNS = (
    "study", "preset", "method", "dataset", "setting", "gamma", "labels", "clients_per_round", "seed", "rounds",
    "local_steps", "accuracy_last", "accuracy_last10", "accuracy_ema", "seconds", "together", "options",
    "config_hash", "commit", "hardware", "versions",
)  # fmt: skip
"""Of results.csv. Accuracies are in per cent; `seconds` is a cell's share of the time of the `together` cells that
shared the lanes; `options` holds what a cell changes beyond the other columns."""


@dataclass(frozen=True)
class Cell:
    """One experiment of a study: where it stands in the study's table or chart, and all that determines its result."""

    study: str
    preset: str
    experiment: Experiment
    options: str = ""  # what it changes beyond the columns of results.csv, as key=value texts

    @property
    def hash(self) -> str:
        return self.experiment.fingerprint()[:16]

    def coordinates(self) -> dict[str, Any]:
        """The columns of results.csv that say what was measured."""
        e = self.experiment
        return {
            "study": self.study,
            "preset": self.preset,
            "method": e.method,
            "dataset": e.dataset,
            "setting": e.partition.setting,
            "gamma": e.partition.gamma if "dir" in e.partition.setting else "",
            "labels": labels(e),
            "clients_per_round": e.clients_per_round,
            "seed": e.seed,
            "rounds": e.rounds,
            "options": self.options,
            "config_hash": self.hash,
        }


@dataclass(frozen=True)
class Measurement:
    """What a finished cell found."""

    experiment: dict[str, Any]
    config_hash: str
    rounds: int
    local_steps: float  # of a client in a round, on average
    accuracy_last: float  # shares of 1, as all accuracies here
    accuracy_last10: float
    accuracy_ema: float | None  # last evaluation of the averaged model
    curve: list[tuple[int, float, float | None]]  # round, accuracy, accuracy of the averaged model
    seconds: float  # its share of the training of all that shared the lanes
    build_seconds: float  # compiling and capturing, for all of them
    together: int
    partition: str  # its hash
    left_out: float = 0.0  # share of the clients' updates that were not finite and did not count
    diagnostics: dict[str, float] = field(default_factory=dict)  # means over the last rounds
    bytes_per_round: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def evaluations(self) -> list[Record]:
        """The evaluations of the global model, as a run records them."""
        return [{"round": number, "test": {"accuracy": share}} for number, share, _ in self.curve]

    def columns(self) -> dict[str, Any]:
        """The columns of results.csv that say what was found."""
        about = self.environment
        return {
            "rounds": self.rounds,
            "local_steps": round(self.local_steps, 2),
            "accuracy_last": round(100 * self.accuracy_last, 2),
            "accuracy_last10": round(100 * self.accuracy_last10, 2),
            "accuracy_ema": "" if self.accuracy_ema is None else round(100 * self.accuracy_ema, 2),
            "seconds": round(self.seconds, 1),
            "together": self.together,
            "commit": about.get("commit") or "",
            "hardware": about.get("gpu") or f"{about.get('cpu')}, {about.get('cores')} cores",
            "versions": "; ".join(f"{name} {about.get(name)}" for name in ("python", "torch", "numpy")),
        }


def named(cells: Sequence[Cell]) -> str:
    """These cells in a sentence."""
    names = [f"{cell.experiment.method} seed {cell.experiment.seed} ({cell.hash})" for cell in cells[:5]]
    more = len(cells) - len(names)
    word = "cell" if len(cells) == 1 else f"{len(cells)} cells"
    return f"{word} {', '.join(names)}" + (f" and {more} more" if more else "")


def labels(experiment: Experiment) -> float | str:
    """How many per cent of the training images are labelled; nothing where the data come with their own labels."""
    part = experiment.partition
    if part.label_fraction is not None:
        return round(100 * part.label_fraction, 4)
    images, classes = data_size(experiment.dataset)
    if images is None or classes is None:
        return ""
    per_class = recipes.LABELS_PER_CLASS if part.labels_per_class is None else part.labels_per_class
    return round(100 * per_class * classes * part.clients / images, 2)


def data_size(dataset: str) -> tuple[int | None, int | None]:
    """Training images and classes of a data set with a name."""
    if ":" in dataset:
        return None, None
    source = find_source(dataset)
    return source.train, source.classes


class Store:
    """The finished cells of a folder, and those under way."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find(self, cell: Cell) -> Measurement | None:
        """What was measured for this cell, or None; what another state of the user's own code gave does not count."""
        found = _read(self._path(cell.hash))
        return None if found is not None and _is_outdated(found, cell) else found

    def has(self, cell: Cell) -> bool:
        if not cell.experiment.own_code():
            return self._path(cell.hash).exists()
        return self.find(cell) is not None

    def outdated(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that were measured when the user's own code was another."""
        own = [cell for cell in cells if cell.experiment.own_code()]
        return [cell for cell in own if self._path(cell.hash).exists() and not self.has(cell)]

    def keep(self, measurement: Measurement) -> None:
        """A cell is finished: its file first, then away with what its resumption would have needed."""
        path = self._path(measurement.config_hash)
        _make(path.parent)
        if measurement.environment.get(OWN_CODE) and path.exists():  # it was measured with other code
            _make(self.folder / OUTDATED)
            path.replace(self.folder / OUTDATED / f"{path.stem}-{int(path.stat().st_mtime)}.json")
        write_whole(path, _pack(measurement), RunError, durable=True)
        shutil.rmtree(self.unfinished(measurement.config_hash), ignore_errors=True)

    def _path(self, config_hash: str) -> Path:
        return self.folder / CELLS / f"{config_hash}.json"

    def unfinished(self, config_hash: str) -> Path:
        """Where a cell's state lies while it is being measured."""
        return self.folder / UNFINISHED / config_hash

    def under_way(self) -> set[str]:
        """The cells that processes of this machine have claimed, by their hashes: a hint, for who has a choice.

        No lock is tried, as that would keep it for a moment from who claims it.
        """
        return {path.parent.name for path in (self.folder / UNFINISHED).glob("*/lock") if _is_held_here(path)}

    def measurements(self) -> Iterator[Measurement]:
        """All finished cells, by name."""
        for path in sorted((self.folder / CELLS).glob("*.json")):
            found = _read(path)
            if found is not None:
                yield found

    @contextmanager
    def claimed(self, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Those of the cells that nobody has finished or works on; nobody else gets them meanwhile.

        The lock goes with the process, however it ends; a folder that was made for it and stayed empty goes too.
        """
        new = not self.folder.exists()
        locks = []
        mine = []
        try:
            for cell in cells:
                lock = _lock(self.unfinished(cell.hash))
                if lock is None:
                    continue
                locks.append(lock)
                if self.has(cell):  # finished between the look and the lock
                    shutil.rmtree(self.unfinished(cell.hash), ignore_errors=True)
                else:
                    mine.append(cell)
            yield mine
        finally:
            for cell in mine:
                _remove_if_untouched(self.unfinished(cell.hash))
            for lock in locks:
                with suppress(OSError), lock:
                    lock.truncate(0)  # nobody has it any more
            with suppress(OSError):  # not empty, or just removed by another process
                (self.folder / UNFINISHED).rmdir()
                if new:
                    self.folder.rmdir()

    def merge(self, other: Path, only: Iterable[Cell] | None = None) -> int:
        """Take over finished cells of another folder with their rows of its results; returns how many were new.

        All of them, or `only` these.
        """
        found, theirs = finished_cells(other), read_rows(other / RESULTS)
        if only is not None:
            wanted = {(cell.study, cell.hash) for cell in only}
            names = {f"{config_hash}.json" for _, config_hash in wanted}
            found = {name: measurement for name, measurement in found.items() if name in names}
            theirs = {place: row for place, row in theirs.items() if place in wanted}
        rows = {**theirs, **read_rows(self.folder / RESULTS)}
        _make(self.folder / CELLS)
        new = 0
        for name, measurement in found.items():
            target = self.folder / CELLS / name
            if not target.exists():
                write_whole(target, _pack(measurement), RunError)
                new += 1
        self._write_rows(rows)
        return new

    def tabulate(self, cells: Iterable[Cell]) -> None:
        """Write results.csv: a row for each of these cells that is finished; rows of other studies stay."""
        rows = read_rows(self.folder / RESULTS)
        for cell in cells:
            found = self.find(cell)
            if found is not None:
                row = cell.coordinates() | found.columns()
                rows[cell.study, cell.hash] = {name: str(row[name]) for name in COLUMNS}
        self._write_rows(rows)

    def _write_rows(self, rows: dict[tuple[str, str], dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
        _make(self.folder)
        write_whole(self.folder / RESULTS, text.getvalue().encode(), RunError)


class Merged(Store):
    """A folder as it would be with others merged into it; for looking only."""

    def __init__(self, folder: Path, others: Iterable[Path]):
        super().__init__(folder)
        self._others = [Store(other) for other in others]

    def find(self, cell: Cell) -> Measurement | None:
        return next((found for store in self._others if (found := store.find(cell)) is not None), super().find(cell))

    def has(self, cell: Cell) -> bool:
        return super().has(cell) or any(store.has(cell) for store in self._others)

    def measurements(self) -> Iterator[Measurement]:
        yield from super().measurements()
        for store in self._others:
            yield from store.measurements()


def finished_cells(folder: Path) -> dict[str, Measurement]:
    """All finished cells of a folder by the name of their file; a folder without, or a damaged cell, is refused."""
    if not (folder / CELLS).is_dir():
        raise RunError(f"{folder}: no measured cells are there; expected a folder that `reproduce` or `sweep` wrote")
    found = {path.name: _read(path) for path in sorted((folder / CELLS).glob("*.json"))}
    return {name: one for name, one in found.items() if one is not None}


def mean_of(measured: Iterable[Measurement], spelled_out: bool = False) -> str:
    """What `accuracy_last10` of these cells is the mean of; `spelled_out` says of what even outside a table."""
    found = {summarise(one.evaluations()).mean_of for one in measured} or {f"mean of last {LAST}"}
    text = f"mean of last {LAST} or fewer" if len(found) > 1 else found.pop()
    return f"{text} evaluations" if spelled_out and not text.endswith("evaluation") else text


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of a results.csv by study and cell; none where there is no file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); move it away, it is made anew from {CELLS}/") from None
    missing = sorted(set(COLUMNS) - set(rows[0])) if rows else []
    if missing:
        raise RunError(f"{path}: its columns lack {', '.join(missing)}; move it away, it is made anew from {CELLS}/")
    return {(row["study"], row["config_hash"]): {name: row[name] for name in COLUMNS} for row in rows}


def _is_outdated(found: Measurement, cell: Cell) -> bool:
    """What cannot be told is believed: cells from before this was recorded, code that is not to be found here."""
    then, now = found.environment.get(OWN_CODE), cell.experiment.own_code()
    return bool(then and now) and then != now


def _pack(measurement: Measurement) -> bytes:
    return (json.dumps(measurement.__dict__, ensure_ascii=False) + "\n").encode()


def _read(path: Path) -> Measurement | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        curve = [(int(number), float(share), averaged) for number, share, averaged in tree.pop("curve")]
        return Measurement(curve=curve, **tree)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise RunError(f"{path}: damaged ({problem}); delete it to have the cell measured again") from None


def _lock(folder: Path) -> IO[str] | None:
    """The lock of a cell's folder; None where another process has it."""
    while True:
        _make(folder)
        try:
            lock = (folder / "lock").open("a")
        except FileNotFoundError:  # another process has just removed it
            continue
        except OSError as problem:
            raise RunError(f"{folder / 'lock'}: cannot be written ({problem.strerror})") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        try:
            if os.path.samestat(os.fstat(lock.fileno()), (folder / "lock").stat()):
                lock.truncate(0)
                lock.write(f"{socket.gethostname()} {os.getpid()}")
                lock.flush()
                return lock
        except FileNotFoundError:
            pass
        except OSError as problem:
            with suppress(OSError):
                lock.close()
            raise RunError(f"{folder / 'lock'}: cannot be written ({problem.strerror})") from None
        lock.close()  # of a file that is gone: it keeps nobody away


def _is_held_here(lock: Path) -> bool:
    """Whether a process of this machine that is alive has written this lock."""
    try:
        host, _, number = lock.read_text(encoding="utf-8").rpartition(" ")
        if host != socket.gethostname() or int(number) < 1:
            return False
        os.kill(int(number), 0)
    except PermissionError:
        return True  # it is another user's
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _make(folder: Path) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return
        except OSError as problem:
            if isinstance(problem, FileNotFoundError | FileExistsError) and attempt < _ATTEMPTS:
                continue  # another process has just removed an empty folder here or on the way
            raise RunError(f"{folder}: the folder cannot be made ({problem.strerror})") from None


def _remove_if_untouched(folder: Path) -> None:
    if folder.is_dir() and [entry.name for entry in folder.iterdir()] == ["lock"]:
        shutil.rmtree(folder, ignore_errors=True)
