"""What goes on in a folder: its runs, comparisons, grids and federations, read while other processes write them."""

import csv
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddure.environment import began_at
from feddure.errors import FeddureError
from feddure.files import read_regular
from feddure.studies import plan as comparison
from feddure.tracking import records
from feddure.watch.run import (
    FAILED,
    FINISHED,
    RUNNING,
    STALE,
    STOPPED,
    WAITING,
    Entry,
    Run,
    as_dict,
    as_list,
    changed,
    is_held,
    method,
    read_json,
    read_yaml,
    shown,
)

if TYPE_CHECKING:
    from feddure.watch.grid import Grid

_DEEPEST = 4  # folders below the one that is watched, as federation/runs/comparison/run
_MOST_FOLDERS = 5000
# Names of rooms that cannot be imported here: `studies.grid` needs PyTorch, `flower` packages that may be absent.
_OF_A_GRID = {"cells.jsonl", "unfinished", "sweep.yaml"}
_FEDERATION_FILE = "federation.yaml"
_SKIPPED = {"checkpoint", "unfinished"}
_SKIPPED_IN_A_FEDERATION = _SKIPPED | {"sites", "server", "app", "authority"}


class Folder:
    """A folder that is looked at again and again; its entries change version when what they say changes."""

    def __init__(self, root: Path):
        self.root = root
        self.version = 0
        self.entries: dict[str, Entry] = {}
        self._runs: dict[Path, Run] = {}
        self._grids: dict[Path, Grid] = {}

    def look(self) -> None:
        """Read what is new."""
        found: dict[str, Entry] = {}
        for kind, folder, parent in _found(self.root):
            found[self._id(folder)] = getattr(self, f"_{kind}")(folder) | self._place(folder, parent)
        for name in [name for name, entry in found.items() if entry["kind"] == "comparison"]:
            found |= self._planned(self.root / name, found[name])
            _conclude(found[name], [one for one in found.values() if one["parent"] == name])
        for name, entry in found.items():
            before = self.entries.get(name, {})
            entry["version"] = before.get("version")
            if entry != before:
                self.version += 1
                entry["version"] = self.version
        if found.keys() != self.entries.keys():
            self.version += 1
        self.entries = found

    def state(self, after: int = 0) -> dict[str, Any]:
        """All entries' names, and those entries that have changed after a version."""
        new = {name: entry for name, entry in self.entries.items() if entry["version"] > after}
        return {"version": self.version, "folder": shown(self.root), "names": list(self.entries), "changed": new}

    def report(self, name: str) -> Path | None:
        """The report of an entry, unless a link leads elsewhere."""
        if not self.entries.get(name, {}).get("report"):
            return None
        path = (self.root / name / records.REPORT).resolve()
        return path if path.is_file() and path.is_relative_to(self.root.resolve()) else None

    def _id(self, folder: Path) -> str:
        return str(folder.relative_to(self.root))

    def _place(self, folder: Path, parent: Path | None) -> Entry:
        return {
            "name": shown(folder.resolve().name if folder == self.root else folder.relative_to(self.root)),
            "parent": self._id(parent) if parent else "",
            "changed": round(changed(folder)),
        }

    def _run(self, folder: Path) -> Entry:
        run = self._runs.setdefault(folder, Run(folder))
        run.look()
        return run.entry()

    def _grid(self, folder: Path) -> Entry:
        from feddure.watch.grid import Grid

        return self._grids.setdefault(folder, Grid(folder)).entry()

    def _federation(self, folder: Path) -> Entry:
        about = read_yaml(folder / _FEDERATION_FILE)
        running = any(map(_lives, as_list(read_json(folder / "server" / "running.json"))))
        return {
            "kind": "federation",
            "title": str(about.get("name", ""))[:200],
            "status": RUNNING if running else STOPPED,
            "note": "" if running else "its server does not run: feddure federate server starts it",
            "sites": [str(site)[:80] for site in as_list(about.get("sites"))],
        }

    def _comparison(self, folder: Path) -> Entry:
        status = RUNNING if is_held(folder) else STOPPED
        return {"kind": "comparison", "status": status, "report": (folder / comparison.REPORT_FILE).is_file()}

    def _planned(self, folder: Path, entry: Entry) -> dict[str, Entry]:
        """The runs of a comparison that have not begun."""
        try:
            plan = comparison.read_plan(folder)
        except FeddureError as problem:
            entry |= {"note": str(problem), "status": FAILED}
            return {}
        reasons, runs = _failures(folder / comparison.TABLE_FILE), entry["status"] == RUNNING
        found: dict[str, Entry] = {}
        for name, seed in plan.runs()[:_MOST_FOLDERS] if plan else ():
            path = comparison.run_folder(folder, name, seed)
            if not (path / records.CONFIG).is_file():
                reason = reasons.get(name, "")
                found[self._id(path)] = self._place(path, folder) | {
                    "kind": "run",
                    "method": method(name)[0],
                    "status": FAILED if reason else WAITING if runs else STOPPED,
                    "note": reason or ("" if runs else "not begun"),
                    "round": 0,
                    "rounds": 0,
                    "curves": {},
                    "clients": [],
                }
        return found


def _conclude(entry: Entry, own: list[Entry]) -> None:
    """What only a comparison's runs together tell: how many have ended, and the time left."""
    if own and all(one["status"] == FINISHED for one in own):
        entry["status"] = FINISHED if entry["report"] or entry["status"] != RUNNING else RUNNING
    elif entry["status"] != RUNNING and any(one["status"] == FAILED for one in own):
        entry["status"] = FAILED
    speeds = [one["speed"] for one in own if one.get("speed")]
    lengths = [one["rounds"] for one in own if one["rounds"]]
    entry |= {"done": sum(one["status"] == FINISHED for one in own), "total": len(own), "left": None}
    if entry["status"] == RUNNING and speeds and lengths:
        usual = max(lengths) * sum(speeds) / len(speeds)
        going = [one.get("left") for one in own if one["status"] in (RUNNING, STALE, WAITING)]
        entry["left"] = sum(usual if left is None else left for left in going)


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
        if comparison.PLAN_FILE in entries:
            yield "comparison", folder, parent
        elif entries.keys() & _OF_A_GRID:
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


def _lives(noted: Any) -> bool:
    """Whether a process of a federation's server, as it was noted, is still there."""
    pid, then = as_dict(noted).get("pid"), as_dict(noted).get("began")
    began = began_at(pid)
    return began is not None and (not isinstance(then, int | float) or abs(began - then) < 2)


def _failures(table: Path) -> dict[str, str]:
    """Why methods of a finished comparison are not in it."""
    with suppress(OSError, UnicodeDecodeError, csv.Error):
        rows = csv.DictReader(read_regular(table).decode().splitlines())
        return {str(row["method"]): str(row["failed"]) for row in rows if row.get("method") and row.get("failed")}
    return {}
