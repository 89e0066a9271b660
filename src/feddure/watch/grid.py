"""The cells of a sweep or of `reproduce`; imported, and with it PyTorch, only where a folder has some."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from feddure import experiments
from feddure.config import Experiment
from feddure.errors import FeddureError
from feddure.reports import names
from feddure.studies import sweep
from feddure.studies.grid.store import Measurement, Progress, Store
from feddure.tracking import records
from feddure.tracking.metrics import TITLES
from feddure.tracking.summary import duration, percent
from feddure.watch.run import FAILED, FINISHED, RUNNING, STOPPED, Entry, changed, method, per_cent, thinned

_MOST_CELLS = 60
_MOST_LABELS = 300  # cells that are named by what sets them apart
_MOST_PLANNED = 2000  # cells whose experiments are made: each takes a millisecond, and the page waits for all


class Grid:
    """What cells under way say of themselves is kept, as nobody else does."""

    def __init__(self, folder: Path):
        self._store = Store(folder)
        self._folder = folder
        self._points: dict[str, list[tuple[float, float]]] = {}
        self._planned: tuple[float, dict[str, Experiment], int] = -1.0, {}, 0
        self._labels: tuple[object, dict[str, str]] = None, {}

    def entry(self) -> Entry:
        """What the page shows of it."""
        try:
            measured = {one.config_hash: one for one in self._store.measurements()}
            noted, failures = self._store.notes(), self._store.failures()
        except (FeddureError, TypeError) as problem:
            return {"kind": "cells", "status": FAILED, "note": str(problem), "cells": [], "done": 0, "total": None}
        planned, number = self._plan()
        known = dict(planned)
        for name, one in measured.items():
            if name not in known:
                with suppress(FeddureError, ValueError, TypeError):
                    known[name] = experiments.build(one.experiment)
        under_way = {name: one for name, one in noted.items() if one.is_alive and name not in measured}
        failed = {name: problem for name, problem in failures.items() if name not in measured}
        best = sorted(measured.values(), key=lambda one: -(one.accuracy_last10 or 0.0))
        cells = {name: self._trained(name, one, known.get(name)) for name, one in under_way.items()}
        cells |= {name: _cell(FAILED, problem.reason[:2000]) for name, problem in failed.items()}
        cells |= {found.config_hash: _measured(found) for found in best[:_MOST_CELLS]}
        labels = self._named(known)
        total = len(planned.keys() | measured.keys()) if planned else max(number, len(measured)) if number else None
        status = RUNNING if under_way else FAILED if failed else STOPPED
        if not under_way and total is not None and len(measured) >= total:
            status = FINISHED
        return {
            "kind": "cells",
            "status": status,
            "note": f"the best {_MOST_CELLS} of {len(best)} are listed" if len(best) > _MOST_CELLS else "",
            "cells": [cell | {"name": labels.get(name, name)} for name, cell in cells.items()],
            "done": len(measured),
            "failed": len(failed),
            "total": total,
            "left": _seconds_left(measured.values(), under_way, known, total),
            "report": (self._folder / records.REPORT).is_file(),
        }

    def _trained(self, name: str, noted: Progress, experiment: Experiment | None) -> Entry:
        """A cell under way; a score that is no accuracy is told in words."""
        points = self._points.setdefault(name, [])
        note, accuracy = f"process {noted.pid}", None
        if noted.score is not None and experiment is not None and experiment.metric != "accuracy":
            note += f", {TITLES[experiment.metric]} {percent(noted.score, 1)}"
        elif noted.score is not None:
            accuracy = per_cent(noted.score)
            if not points or points[-1][0] < noted.round:
                points.append((noted.round, accuracy))
        rounds = experiment.rounds if experiment else 0
        return _cell(RUNNING, note, round=noted.round, rounds=rounds, accuracy=accuracy, points=thinned(points))

    def _plan(self) -> tuple[dict[str, Experiment], int]:
        """The experiments that a sweep's file names, and how many: the number alone where they are very many, start
        from a file that lies elsewhere, or name code of a user's own, which is not run."""
        path = self._folder / sweep.SWEEP_FILE
        then = changed(path)
        if then != self._planned[0]:
            found: dict[str, Experiment] = {}
            number = 0
            with suppress(FeddureError, OSError):
                number = sweep.number_of_cells(path) if then else 0
                few = 0 < number <= _MOST_PLANNED
                found = {cell.hash: cell.experiment for cell in sweep.read(path).cells()} if few else {}
            self._planned = then, found, number
        return self._planned[1:]

    def _named(self, known: dict[str, Experiment]) -> dict[str, str]:
        if self._labels[0] != known.keys():
            if len(known) <= _MOST_LABELS:
                found = names.labels(list(known.values()))
            else:
                found = [f"{method(one.method)[0]}, seed {one.seed} ({name})" for name, one in known.items()]
            self._labels = set(known), dict(zip(known, found, strict=True))
        return self._labels[1]


def _cell(status: str, note: str, **about: Any) -> Entry:
    nothing: Entry = {"round": 0, "rounds": 0, "accuracy": None, "mean": None, "points": []}
    return nothing | {"status": status, "note": note} | about


def _measured(found: Measurement) -> Entry:
    shares = {"accuracy": found.accuracy_last, "mean": found.accuracy_last10}
    return _cell(
        FINISHED,
        duration(found.seconds),
        round=found.rounds,
        rounds=found.rounds,
        points=thinned([(number, per_cent(accuracy)) for number, accuracy, _ in found.curve]),
        **{name: per_cent(share) for name, share in shares.items() if share is not None},
    )


def _seconds_left(
    measured: Iterable[Measurement], under_way: dict[str, Progress], known: dict[str, Experiment], total: int | None
) -> float | None:
    """By the mean cell, with as many processes as there are now."""
    seconds = [one.seconds + one.build_seconds for one in measured]
    if not seconds or not under_way or total is None:
        return None
    begun = sum(one.round / known[name].rounds for name, one in under_way.items() if name in known)
    return (total - len(seconds) - begun) * sum(seconds) / len(seconds) / len(under_way)
