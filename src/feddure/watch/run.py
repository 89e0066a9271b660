"""A run's folder, read while another process writes it, from where the last look ended.

Nothing is written, locked or imported on behalf of what is read: a folder may come from anybody.
"""

import json
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from feddure.environment import began_at
from feddure.files import Tail, parse_yaml, read_regular, readable
from feddure.reports import style
from feddure.tracking import records, schema
from feddure.tracking.summary import duration

RUNNING, STALE, WAITING, FINISHED, STOPPED, FAILED = "running", "stale", "waiting", "finished", "stopped", "failed"

_MOST_POINTS, _MOST_CLIENTS = 400, 100
_LAST_ROUNDS = 20  # that the speed is measured over
_QUIET_SECONDS, _QUIET_ROUNDS = 60.0, 10  # a process that has not ended a round for so long is stale

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built

Entry = dict[str, Any]
Points = Sequence[tuple[float, float]]


class Run:
    """A run's folder as far as it was read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config: dict[str, Any] = {}
        self.federation: dict[str, Any] = {}
        self._metrics = Tail(folder / records.METRICS)
        self._timing = Tail(folder / records.TIMING)
        self._entry: Entry = {}
        self._is_new = False
        self._forget()

    def _forget(self) -> None:
        self.round = 0
        self.curves: dict[str, list[tuple[float, float]]] = {"test": [], "test_ema": [], "validation": [], "loss": []}
        self.clients: dict[str, tuple[int, str, bool]] = {}
        self.seconds: list[float] = []
        self.left_out = 0

    def look(self) -> None:
        """Read on."""
        if not self.config:
            self.config = read_yaml(self.folder / records.CONFIG)
        over, found = _new_records(self._metrics)
        if over:
            self._forget()
        self._is_new = over or bool(found)
        if any("federation" in record for record in found):
            self.federation = as_dict(read_json(self.folder / records.FEDERATION))
        for record in found:
            self._take(record)
        over, found = _new_records(self._timing)
        before = [] if over else self.seconds
        self.seconds = [*before, *(_number(record.get("seconds")) or 0.0 for record in found)][-_LAST_ROUNDS:]

    def _take(self, record: records.Record) -> None:
        self.round = record["round"]
        for model in ("test", "test_ema", "validation"):
            found = as_dict(record.get(model))
            value, number = _number(found.get("accuracy")), _number(found.get("round", self.round))
            if value is not None and number is not None:
                self.curves[model].append((number, per_cent(value)))
        if (loss := _number(as_dict(record.get("train")).get("loss"))) is not None:
            self.curves["loss"].append((self.round, float(f"{loss:.4g}")))
        left_out = set(map(str, as_list(record.get("left_out"))))
        self.left_out += len(left_out)
        sites = as_list(as_dict(record.get("federation")).get("sites"))
        for site in filter(None, map(as_dict, sites)):
            self._take_site(site)
        if sites:
            return
        suspicious = as_dict(record.get("suspicious"))
        for client, steps in zip(as_list(record.get("clients")), as_list(record.get("steps")), strict=False):
            said, bad = f"trained {steps} steps", False
            if str(client) in left_out:
                said, bad = "its update was not finite and was left out", True
            elif str(client) in suspicious:
                said, bad = "its update looked hostile", True
            self.clients[f"client {client}"] = self.round, said, bad

    def _take_site(self, site: dict[str, Any]) -> None:
        problem, test = site.get("problem"), _number(as_dict(site.get("test_of_received_model")).get("accuracy"))
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
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quiet(self) -> float:
        """Seconds since it wrote anything."""
        return max(
            0.0,
            time.time() - max(changed(self.folder / name) for name in (records.METRICS, records.CONFIG, records.LOCK)),
        )

    def status(self) -> tuple[str, str]:
        """Its state, and in words what a person may want to know of it."""
        if records.is_finished(self.folder):
            return FINISHED, ""
        if failure := as_dict(read_json(self.folder / records.FAILURE)).get("error"):
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
        status, note = self.status()
        if self._entry.get("status") == status == FINISHED and not self._is_new:
            return self._entry
        title, colour = method(str(self.config.get("method", "")))
        evaluated = self.curves["test"] or self.curves["validation"]
        names = map(str, as_list(self.federation.get("names")))
        said = dict.fromkeys(names, (0, "not drawn yet", False)) | self.clients
        left = (self.rounds - self.round) * self.round_seconds if self.round_seconds else None
        self._entry = {
            "kind": "run",
            "method": title,
            "status": status,
            "note": note,
            "round": self.round,
            "rounds": self.rounds,
            "accuracy": evaluated[-1][1] if evaluated else None,
            "left": left if status in (RUNNING, STALE) else None,
            "left_out": self.left_out,
            "curves": {name: thinned(points) for name, points in self.curves.items() if points},
            "clients": [[name, *about] for name, about in islice(_sorted(said.items()), _MOST_CLIENTS)],
            "sites": bool(self.federation),
            "color": style.themed(colour),
            "speed": self.round_seconds,
            "report": (self.folder / records.REPORT).is_file(),
        }
        return self._entry


def method(name: str) -> tuple[str, str]:
    """A method's title and colour; a user's own has its name."""
    from feddure import methods  # and with them PyTorch: seconds, for which the page's address does not wait

    return shown(methods.title(name)), style.line_styles([name])[name]["color"]


def is_held(folder: Path) -> bool:
    """Whether the process that noted itself in a folder's lock file lives; the lock itself is left alone."""
    path = folder / records.LOCK
    try:
        pid = int(read_regular(path).decode())
    except PermissionError:  # Windows lets nobody read a locked file
        return True
    except (OSError, ValueError):
        return False
    began = began_at(pid)
    return began is not None and began <= changed(path) + 2


# --- files of strangers --------------------------------------------------------------------------------------
def _new_records(tail: Tail) -> tuple[bool, list[records.Record]]:
    """Whether a file starts over, and its new records; lines that are not records are left out."""
    over, lines = tail.new()
    return over, [record for line in lines if (record := _record(line))]


def _record(line: bytes) -> records.Record | None:
    """A line's record, checked for its round alone: a folder may hold very many, and little is shown of each."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(number := found.get("round"), int) and 0 <= number < 2**53:
            return found
    return None


def read_yaml(path: Path) -> dict[str, Any]:
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        return as_dict(parse_yaml(read_regular(path).decode(), _LOADER))
    return {}


def read_json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return schema.parse(read_regular(path))
    return None


def changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def thinned(points: Points) -> Points:
    """Few enough to send and to draw; the last one stays."""
    kept = [points[place] for place in style.thinned(len(points), _MOST_POINTS)]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def per_cent(share: float) -> float:
    """For a chart; nothing but a share has one, and few digits of large numbers differ."""
    return round(100 * min(1.0, max(0.0, share)), 3)


def shown(name: str | Path) -> str:
    return readable(name)[:300]


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _sorted(clients: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Client 2 before client 10."""
    number = re.compile("[0-9]{1,18}").fullmatch
    return sorted(clients, key=lambda one: [(int(word) if number(word) else 0, word) for word in one[0].split()])


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100 else None
