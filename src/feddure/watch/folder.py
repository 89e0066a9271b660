"""What goes on in a folder: its runs, comparisons, grids and federations, read while other processes write them.

Nothing is written, locked or imported on behalf of what is read: a folder may come from anybody. Records are read on
from where the last look ended.
"""

import csv
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import yaml

from feddure import experiments, methods
from feddure.errors import FeddureError
from feddure.files import parse_yaml, read_regular, readable
from feddure.reports import names, style
from feddure.simulation import runs
from feddure.studies import compare, sweep
from feddure.studies.grid.store import CELLS, UNFINISHED, Measurement, Progress, Store
from feddure.tracking import records, schema
from feddure.tracking.summary import duration

RUNNING, STALE, WAITING, FINISHED, STOPPED, FAILED = "running", "stale", "waiting", "finished", "stopped", "failed"

_DEEPEST = 4  # folders below the one that is watched, as federation/runs/comparison/run
_MOST_FOLDERS = 5000
_MOST_POINTS, _MOST_CLIENTS, _MOST_CELLS = 400, 100, 60
_MOST_LABELS = 300  # cells that are named by what sets them apart
_LAST_ROUNDS = 20  # that the speed is measured over
_QUIET_SECONDS, _QUIET_ROUNDS = 60.0, 10  # a process that has not ended a round for so long is stale
_FEDERATION_FILE = "federation.yaml"  # `feddure.flower` needs packages that may be absent
_SKIPPED = {"checkpoint", UNFINISHED}
_SKIPPED_IN_A_FEDERATION = _SKIPPED | {"sites", "server", "app", "authority"}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built

Entry = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass
class Tail:
    """The records of a file that grows; a file that was replaced, as by a resumption, is read anew."""

    path: Path
    _read: int = 0
    _inode: int = -1
    _rest: bytes = b""

    def new(self) -> tuple[bool, list[records.Record]]:
        """Whether it starts over, and the records since the last call; lines that are not records are left out."""
        try:
            number = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except OSError:
            return False, []
        with os.fdopen(number, "rb") as file:
            about = os.fstat(number)
            if not stat.S_ISREG(about.st_mode):
                return False, []
            over = about.st_ino != self._inode or about.st_size < self._read
            if over:
                self._read, self._inode, self._rest = 0, about.st_ino, b""
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        return over, [record for line in lines if (record := _record(line))]


@dataclass
class _Run:
    """A run's folder as far as it was read."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics = Tail(self.folder / records.METRICS)
        self._timing = Tail(self.folder / records.TIMING)
        self._entry: Entry = {}
        self._is_new = False
        self._forget()

    def _forget(self) -> None:
        self.round = 0
        self.curves: dict[str, Points] = {"test": [], "test_ema": [], "validation": [], "loss": []}
        self.clients: dict[str, tuple[int, str, bool]] = {}
        self.seconds: list[float] = []
        self.left_out = 0

    def look(self) -> None:
        """Read on."""
        if not self.config:
            self.config = _yaml(self.folder / records.CONFIG)
        over, found = self._metrics.new()
        if over:
            self._forget()
        self._is_new = over or bool(found)
        if found and any("federation" in record for record in found):
            self.federation = _json(self.folder / records.FEDERATION)
        for record in found:
            self._take(record)
        over, found = self._timing.new()
        self.seconds = [] if over else self.seconds
        self.seconds = [*self.seconds, *(_number(record.get("seconds")) or 0.0 for record in found)][-_LAST_ROUNDS:]

    def _take(self, record: records.Record) -> None:
        self.round = record["round"]
        for model in ("test", "test_ema", "validation"):
            found = _dict(record.get(model))
            value, number = _number(found.get("accuracy")), _number(found.get("round", self.round))
            if value is not None and number is not None:
                self.curves[model].append((number, round(100 * value, 3)))
        if (loss := _number(_dict(record.get("train")).get("loss"))) is not None:
            self.curves["loss"].append((self.round, float(f"{loss:.4g}")))
        left_out = set(map(str, _list(record.get("left_out"))))
        self.left_out += len(left_out)
        suspicious = _dict(record.get("suspicious"))
        sites = _list(_dict(record.get("federation")).get("sites"))
        if sites:
            for site in filter(lambda one: isinstance(one, dict), sites):
                self._take_site(site)
            return
        for client, steps in zip(_list(record.get("clients")), _list(record.get("steps")), strict=False):
            said, bad = f"trained {steps} steps", False
            if str(client) in left_out:
                said, bad = "its update was not finite and was left out", True
            elif str(client) in suspicious:
                said, bad = "its update looked hostile", True
            self.clients[f"client {client}"] = self.round, said, bad

    def _take_site(self, site: dict[str, Any]) -> None:
        problem, test = site.get("problem"), _number(_dict(site.get("test_of_received_model")).get("accuracy"))
        said = str(problem)[:300] if problem else "took part"
        said += f"; {100 * test:.1f} % on its own test images" if test is not None else ""
        self.clients[str(site.get("site"))[:80]] = self.round, said, bool(problem)

    @property
    def rounds(self) -> int:
        found = self.config.get("rounds")
        return found if isinstance(found, int) and 0 <= found < 2**53 else 0

    @property
    def round_seconds(self) -> float | None:
        """The median round, as evaluations and the first rounds take longer."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else None

    @property
    def quiet(self) -> float:
        """Seconds since it wrote anything."""
        changed = [_changed(self.folder / name) for name in (records.METRICS, records.CONFIG, runs.LOCK_FILE)]
        return max(0.0, time.time() - max(changed))

    def status(self) -> tuple[str, str]:
        """Its state, and in words what a person may want to know of it."""
        if runs.is_finished(self.folder):
            return FINISHED, ""
        if failure := _json(self.folder / runs.FAILURE_FILE).get("error"):
            return FAILED, str(failure)[:2000]
        usual = max(_QUIET_SECONDS, _QUIET_ROUNDS * (self.round_seconds or 0.0))
        alive = is_held(self.folder)
        if alive and self.quiet > usual and self.round:
            return STALE, f"no round has ended for {duration(self.quiet)}; its process is still there"
        if alive or self.quiet < min(usual, 10 * (self.round_seconds or 0.0)):  # it may run on another machine
            return RUNNING, "" if self.round else "the first round is under way"
        return STOPPED, f"stopped after round {self.round}; --resume goes on with it"

    def entry(self) -> Entry:
        """What the page shows of it."""
        method = str(self.config.get("method", ""))
        status, note = self.status()
        if self._entry.get("status") == status == FINISHED and not self._is_new:
            return self._entry
        curves = {name: _thinned(points) for name, points in self.curves.items() if points}
        main = self.curves["test"] or self.curves["validation"]
        said = dict.fromkeys(map(str, _list(self.federation.get("names"))), (0, "not drawn yet", False)) | self.clients
        left = (self.rounds - self.round) * self.round_seconds if self.round_seconds else None
        self._entry = {
            "kind": "run",
            "method": _shown(methods.title(method)),
            "status": status,
            "note": note,
            "round": self.round,
            "rounds": self.rounds,
            "accuracy": main[-1][1] if main else None,
            "left": left if status in (RUNNING, STALE) else None,
            "left_out": self.left_out,
            "curves": curves,
            "clients": [[name, *about] for name, about in islice(_sorted(said.items()), _MOST_CLIENTS)],
            "sites": bool(self.federation),
            "color": _colour(method),
            "speed": self.round_seconds,
            "report": (self.folder / runs.REPORT_FILE).is_file(),
        }
        return self._entry


class Folder:
    """A folder that is looked at again and again; its entries change version when what they say changes."""

    def __init__(self, root: Path):
        self.root = root
        self.version = 0
        self.entries: dict[str, Entry] = {}
        self._runs: dict[Path, _Run] = {}
        self._grids: dict[Path, _Grid] = {}

    def look(self) -> None:
        """Read what is new."""
        found: dict[str, Entry] = {}
        for kind, folder, parent in _found(self.root):
            made = getattr(self, f"_{kind}")(folder)
            about = {"name": self._name(folder), "parent": self._id(parent) if parent else ""}
            found[self._id(folder)] = made | about | {"changed": round(_changed(folder))}
            if kind == "comparison":
                found |= self._planned(folder, found[self._id(folder)])
        self._settle(found)
        for name, entry in found.items():
            before = self.entries.get(name)
            if before is None or {key: value for key, value in before.items() if key != "version"} != entry:
                self.version += 1
                entry["version"] = self.version
            else:
                found[name] = before
        if found.keys() != self.entries.keys():
            self.version += 1
        self.entries = found

    def state(self, after: int = 0) -> dict[str, Any]:
        """All entries' names, and those entries that have changed after a version."""
        changed = {name: entry for name, entry in self.entries.items() if entry["version"] > after}
        return {"version": self.version, "folder": _shown(self.root), "names": list(self.entries), "changed": changed}

    def report(self, name: str) -> Path | None:
        """The report of an entry, unless a link leads elsewhere."""
        if not self.entries.get(name, {}).get("report"):
            return None
        path = (self.root / name / runs.REPORT_FILE).resolve()
        return path if path.is_file() and path.is_relative_to(self.root.resolve()) else None

    def _id(self, folder: Path) -> str:
        return str(folder.relative_to(self.root))

    def _name(self, folder: Path) -> str:
        return _shown(folder.resolve().name if folder == self.root else folder.relative_to(self.root))

    def _run(self, folder: Path) -> Entry:
        run = self._runs.setdefault(folder, _Run(folder))
        run.look()
        return run.entry()

    def _grid(self, folder: Path) -> Entry:
        return self._grids.setdefault(folder, _Grid(folder)).entry()

    def _federation(self, folder: Path) -> Entry:
        about = _yaml(folder / _FEDERATION_FILE)
        running = any(_lives(one.get("pid"), one.get("began")) for one in _pids(folder / "server" / "running.json"))
        return {
            "kind": "federation",
            "title": str(about.get("name", ""))[:200],
            "status": RUNNING if running else STOPPED,
            "note": "" if running else "its server does not run: feddure federate server starts it",
            "sites": [str(site)[:80] for site in _list(about.get("sites"))],
        }

    def _comparison(self, folder: Path) -> Entry:
        return {
            "kind": "comparison",
            "status": RUNNING if is_held(folder) else STOPPED,
            "report": (folder / compare.REPORT_FILE).is_file(),
        }

    def _planned(self, folder: Path, comparison: Entry) -> dict[str, Entry]:
        """The runs of a comparison that have not begun, in the plan's order with those that have."""
        try:
            plan = compare.read_plan(folder)
        except FeddureError as problem:
            comparison |= {"note": str(problem), "status": FAILED}
            return {}
        reasons = _failures(folder / compare.TABLE_FILE)
        found: dict[str, Entry] = {}
        for method, seed in plan.runs()[:_MOST_FOLDERS] if plan else ():
            path = compare.run_folder(folder, method, seed)
            if (path / records.CONFIG).is_file():
                continue
            reason = reasons.get(method, "")
            found[self._id(path)] = {
                "kind": "run",
                "name": self._name(path),
                "parent": self._id(folder),
                "method": _shown(methods.title(method)),
                "status": FAILED if reason else WAITING if comparison["status"] == RUNNING else STOPPED,
                "note": reason or ("" if comparison["status"] == RUNNING else "not begun"),
                "round": 0,
                "rounds": 0,
                "curves": {},
                "clients": [],
            }
        comparison["order"] = [self._id(compare.run_folder(folder, *run)) for run in plan.runs()] if plan else []
        return found

    def _settle(self, found: dict[str, Entry]) -> None:
        """What only a comparison's runs together tell: which one is under way, which have failed, and the time left."""
        for name, entry in found.items():
            if entry["kind"] != "comparison":
                continue
            own = [found[one] for one in entry.pop("order", ()) if one in found]
            own += [one for one in found.values() if one["parent"] == name and one not in own]
            if own and all(one["status"] == FINISHED for one in own):
                entry["status"] = FINISHED if entry["report"] or entry["status"] != RUNNING else RUNNING
            elif entry["status"] != RUNNING and any(one["status"] == FAILED for one in own):
                entry["status"] = FAILED
            known = [one["speed"] for one in own if one.get("speed")]
            lengths = [one["rounds"] for one in own if one["rounds"]]
            entry["done"], entry["total"] = sum(one["status"] == FINISHED for one in own), len(own)
            entry["left"] = None
            if entry["status"] == RUNNING and known and lengths:
                usual = max(lengths) * sum(known) / len(known)
                going = [one.get("left") for one in own if one["status"] in (RUNNING, STALE, WAITING)]
                entry["left"] = sum(usual if left is None else left for left in going)


class _Grid:
    """The cells of a sweep or of `reproduce`; what cells under way say of themselves is kept, as nobody else does."""

    def __init__(self, folder: Path):
        self._store = Store(folder)
        self._folder = folder
        self._points: dict[str, Points] = {}
        self._planned: tuple[float, dict[str, Any]] = -1.0, {}
        self._labels: tuple[object, dict[str, str]] = None, {}

    def entry(self) -> Entry:
        """What the page shows of it."""
        try:
            measured = {one.config_hash: one for one in self._store.measurements()}
            noted, failures = self._store.notes(), self._store.failures()
        except (FeddureError, TypeError) as problem:
            return {"kind": "cells", "status": FAILED, "note": str(problem), "cells": [], "done": 0, "total": None}
        planned = self._plan()
        known = dict(planned)
        for name, one in measured.items():
            if name not in known:
                with suppress(FeddureError, ValueError, TypeError):
                    known[name] = experiments.build(one.experiment)
        under_way = {name: one for name, one in noted.items() if one.is_alive and name not in measured}
        failed = {name: problem for name, problem in failures.items() if name not in measured}
        best = sorted(measured.values(), key=lambda one: -(one.accuracy_last10 or 0.0))
        cells = {name: self._trained(name, one, known) for name, one in under_way.items()}
        cells |= {name: _cell(FAILED, problem.reason[:2000]) for name, problem in failed.items()}
        cells |= {found.config_hash: _measured(found) for found in best[:_MOST_CELLS]}
        labels = self._named(known)
        total = len(planned.keys() | measured.keys()) if planned else None
        return {
            "kind": "cells",
            "status": _status_of_cells(len(measured), total, bool(under_way), bool(failed)),
            "note": f"the best {_MOST_CELLS} of {len(best)} are listed" if len(best) > _MOST_CELLS else "",
            "cells": [cell | {"name": labels.get(name, name)} for name, cell in cells.items()],
            "done": len(measured),
            "failed": len(failed),
            "total": total,
            "left": _seconds_left(measured.values(), under_way, known, total),
            "report": (self._folder / runs.REPORT_FILE).is_file(),
        }

    def _trained(self, name: str, noted: Progress, known: dict[str, Any]) -> Entry:
        """A cell under way."""
        points = self._points.setdefault(name, [])
        accuracy = None if noted.score is None else round(100 * noted.score, 3)
        if accuracy is not None and (not points or points[-1][0] < noted.round):
            points.append((noted.round, accuracy))
        rounds = known[name].rounds if name in known else 0
        return _cell(RUNNING, f"process {noted.pid}", noted.round, rounds, accuracy, points)

    def _plan(self) -> dict[str, Any]:
        """The experiments that a sweep's file names; none where it names code of a user's own, which is not run."""
        path = self._folder / sweep.SWEEP_FILE
        changed = _changed(path)
        if changed != self._planned[0]:
            found: dict[str, Any] = {}
            with suppress(FeddureError, OSError):
                found = {cell.hash: cell.experiment for cell in sweep.read(path).cells()} if changed else {}
            self._planned = changed, found
        return self._planned[1]

    def _named(self, known: dict[str, Any]) -> dict[str, str]:
        if self._labels[0] != known.keys():
            if len(known) <= _MOST_LABELS:
                found = names.labels(list(known.values()))
            else:
                found = [f"{methods.title(one.method)}, seed {one.seed} ({name})" for name, one in known.items()]
            self._labels = set(known), dict(zip(known, found, strict=True))
        return self._labels[1]


def _cell(
    status: str,
    note: str,
    number: int = 0,
    rounds: int = 0,
    accuracy: float | None = None,
    points: Sequence[tuple[float, float]] = (),
) -> Entry:
    about = {"status": status, "note": note, "round": number, "rounds": rounds, "accuracy": accuracy}
    return about | {"points": _thinned(points)}


def _measured(found: Measurement) -> Entry:
    points = [(number, round(100 * accuracy, 3)) for number, accuracy, _ in found.curve]
    accuracy = None if found.accuracy_last10 is None else round(100 * found.accuracy_last10, 3)
    return _cell(FINISHED, duration(found.seconds), found.rounds, found.rounds, accuracy, points)


def _seconds_left(
    measured: Iterable[Measurement], under_way: dict[str, Progress], known: dict[str, Any], total: int | None
) -> float | None:
    """By the mean cell, with as many processes as there are now."""
    seconds = [one.seconds + one.build_seconds for one in measured]
    if not seconds or not under_way or total is None:
        return None
    begun = sum(one.round / known[name].rounds for name, one in under_way.items() if name in known)
    return (total - len(seconds) - begun) * sum(seconds) / len(seconds) / len(under_way)


def is_held(folder: Path) -> bool:
    """Whether the process that noted itself in a folder's lock file lives; the lock itself is left alone."""
    path = folder / runs.LOCK_FILE
    try:
        pid = int(read_regular(path).decode())
    except PermissionError:  # Windows lets nobody read a locked file
        return True
    except (OSError, ValueError):
        return False
    return _lives(pid, None, before=_changed(path) + 2)


def _lives(pid: Any, began: Any, before: float | None = None) -> bool:
    """Whether a process lives that began then, or at least before: its number may be another's by now."""
    with suppress(psutil.Error, TypeError, ValueError, OverflowError):
        process = psutil.Process(pid)
        created = process.create_time()
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return created <= before if before is not None else began is None or abs(created - began) < 2
    return False


def _found(root: Path) -> Iterator[tuple[str, Path, Path | None]]:
    """The kind, place and group of everything in a folder; links are not followed."""
    left: list[tuple[Path, Path | None, int]] = [(root, None, 0)]
    for _ in range(_MOST_FOLDERS):
        if not left:
            return
        folder, parent, depth = left.pop()
        try:
            with os.scandir(folder) as listed:
                entries = {entry.name: entry for entry in listed}
        except OSError:  # gone meanwhile, or not ours to read
            continue
        if records.CONFIG in entries:
            yield "run", folder, parent
            continue
        group: Path | None = folder
        if compare.PLAN_FILE in entries:
            yield "comparison", folder, parent
        elif entries.keys() & {CELLS, UNFINISHED, sweep.SWEEP_FILE}:
            yield "grid", folder, parent
        elif _FEDERATION_FILE in entries and "server" in entries:
            yield "federation", folder, parent
        else:
            group = parent
        if depth < _DEEPEST:
            skipped = _SKIPPED_IN_A_FEDERATION if _FEDERATION_FILE in entries else _SKIPPED
            inner = [one for one in entries.values() if not one.name.startswith(".") and one.name not in skipped]
            below = sorted((Path(one.path) for one in inner if one.is_dir(follow_symlinks=False)), reverse=True)
            left += [(one, group, depth + 1) for one in below]


@cache
def _colour(method: str) -> str:
    return style.themed(style.line_styles([(method, "")])[method, ""]["color"])


def _status_of_cells(done: int, total: int | None, under_way: bool, failed: bool) -> str:
    if under_way:
        return RUNNING
    if total is not None and done >= total:
        return FINISHED
    return FAILED if failed else STOPPED


# --- files of strangers --------------------------------------------------------------------------------------
def _record(line: bytes) -> records.Record | None:
    """A line's record, checked for its round alone: a folder may hold very many, and little is shown of each."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(number := found.get("round"), int) and 0 <= number < 2**53:
            return found
    return None


def _yaml(path: Path) -> dict[str, Any]:
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        return _dict(parse_yaml(read_regular(path).decode(), _LOADER))
    return {}


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return _dict(schema.parse(read_regular(path)))
    return {}


def _pids(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        return [one for one in _list(schema.parse(read_regular(path))) if isinstance(one, dict)]
    return []


def _failures(table: Path) -> dict[str, str]:
    """Why methods of a finished comparison are not in it."""
    with suppress(OSError, UnicodeDecodeError, csv.Error):
        rows = csv.DictReader(read_regular(table).decode().splitlines())
        return {str(row["method"]): str(row["failed"]) for row in rows if row.get("method") and row.get("failed")}
    return {}


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _thinned(points: Sequence[tuple[float, float]]) -> Points:
    """Few enough to send and to draw; the last one stays."""
    kept = [points[place] for place in style.thinned(len(points), _MOST_POINTS)]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _sorted(clients: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Client 2 before client 10."""
    return sorted(clients, key=lambda one: [(int(word) if word.isdecimal() else 0, word) for word in one[0].split()])


def _shown(name: str | Path) -> str:
    return readable(name)[:300]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100 else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
