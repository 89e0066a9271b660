"""What observers that report to other people's services share: MLflow and Weights & Biases, by `--track`.

A service may be slow or away. A tracker therefore works in a thread of its own: training neither waits for it nor ends
with it. What could not be sent is kept and sent with the next round; the user is told once.
"""

import importlib.util
import json
import math
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from feddure import experiments
from feddure.config import Experiment
from feddure.errors import ConfigError, FeddureWarning, RunError, did_you_mean, first_line
from feddure.files import read_regular, write_json
from feddure.pretrained import MODEL_FILE
from feddure.tracking import tensorboard
from feddure.tracking.observer import Observer
from feddure.tracking.records import Record
from feddure.tracking.summary import Summary

NAMES = ("tensorboard", "mlflow", "wandb")
"""What `--track` takes; TensorBoard's files are in every run's folder, named or not."""

SECONDS_TO_CLOSE = 60.0
"""How long the end of a run waits for a service."""


class Tracker(Observer):
    """Reports a run to a service; a subclass says how, in methods that may take long and may fail."""

    name = ""  # of the package, of the extra that installs it, and for --track
    title = ""

    def __init__(self, folder: Path, run_name: str, group: str = "", files: Path | None = None):
        """`folder` keeps the run's id for a resumption; `files` is for what the service writes on this machine."""
        self.folder, self.run_name, self.group = folder, run_name, group
        self.files = folder if files is None else files
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._note: str | None = None
        self._told = self._finished = False

    # --- what a subclass says ----------------------------------------------------------------------------
    @classmethod
    def check(cls) -> None:
        """Refuse what can be known to fail before training starts."""

    def open(self, experiment: Experiment, run_id: str | None) -> tuple[str, str]:
        """Begin a run, or go on with an earlier one; returns its id and where a person finds it."""
        raise NotImplementedError

    def log(self, round_number: int, values: dict[str, float]) -> None:
        """The numbers of a round."""
        raise NotImplementedError

    def log_end(self, summary: dict[str, float | str], model: Path | None) -> None:
        """The numbers of the finished run, and its model's file where there is one."""
        raise NotImplementedError

    def end(self, finished: bool) -> None:
        """No more comes; the run is finished, or may be resumed."""
        raise NotImplementedError

    def note(self, sentence: str) -> None:
        """Tell the user, once in a run; called in any thread."""
        self._note = self._note or sentence

    # --- an observer -------------------------------------------------------------------------------------
    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        if not self._thread.is_alive():
            self._tasks.put(partial(self._open, federation.experiment))
            self._thread.start()
        values = dict(tensorboard.scalars(record, federation.dataset.classes)) | {"seconds": seconds}
        self._tasks.put(partial(self.log, record["round"], {k: v for k, v in values.items() if math.isfinite(v)}))
        self._tell()

    def run_done(self, summary: Summary, folder: Path) -> None:
        numbers = {name: value for name, value in vars(summary).items() if isinstance(value, int | float | str)}
        for metric, scores in summary.scores.items():
            numbers |= {f"{metric}_{name}": value for name, value in scores.known().items()}
        model = folder / MODEL_FILE
        self._finished = True
        self._tasks.put(partial(self.log_end, numbers, model if model.exists() else None))

    def close(self) -> None:
        if self._thread.is_alive():
            self._tasks.put(partial(self.end, self._finished))
            self._tasks.put(None)
            self._thread.join(SECONDS_TO_CLOSE)
            if self._thread.is_alive():
                self.note(f"{self.title} has not answered within {SECONDS_TO_CLOSE:.0f} s of the run's end")
        self._tell()

    def _open(self, experiment: Experiment) -> None:
        run_id, where = self.open(experiment, _read(self.folder, self.name).get("run"))
        with suppress(RunError, OSError):  # then a resumption begins a new one
            write_json(_file(self.folder, self.name), {"run": run_id, "where": where}, RunError)

    def _work(self) -> None:
        """Do what is waiting in its order; what fails is tried again with all that comes after it."""
        waiting: list[Callable[[], None]] = []
        ends = False
        while not ends:
            new = [self._tasks.get()]
            while not self._tasks.empty():  # a service that is away is tried once for all that has come meanwhile
                new.append(self._tasks.get())
            ends = new[-1] is None
            waiting += [task for task in new if task is not None]
            try:
                while waiting:
                    waiting[0]()
                    waiting.pop(0)
            except Exception as error:
                self.note(f"{self.title} could not be told of the run ({first_line(error)})")

    def _tell(self) -> None:
        if self._note is not None and not self._told:
            self._told = True
            warnings.warn(
                f"{self._note}; the run goes on, and its own records are complete", FeddureWarning, stacklevel=3
            )


def config(experiment: Experiment) -> dict[str, Any]:
    """The fields that decide an experiment, by their dotted keys."""
    return {key: value for key, value in experiments.flat(experiment).items() if experiments.counts(experiment, key)}


def expect(names: Sequence[str]) -> None:
    """Refuse what `--track` cannot mean, and services whose package is not installed."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--track {name}: expected {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    for kind in _kinds(names):
        if not _is_installed(kind.name):
            raise ConfigError(f"--track {kind.name}: {kind.title} is not installed; pip install 'feddure[{kind.name}]'")
        kind.check()


def trackers(
    names: Sequence[str], folder: Path, group: str = "", run_name: str = "", files: Path | None = None
) -> list[Observer]:
    """The trackers of a run; where none is named, those that an earlier part of this run has reported to."""
    names = names or [name for name in NAMES if _read(folder, name)]
    expect(names)
    return [kind(folder, run_name or folder.resolve().name, group, files) for kind in _kinds(names)]


def places(folder: Path) -> list[tuple[str, str]]:
    """Each service that a run has reported to, and where in it the run is found."""
    found = [(name, _read(folder, name).get("where")) for name in NAMES]
    return [(name, where) for name, where in found if isinstance(where, str)]


def _kinds(names: Sequence[str]) -> Iterator[type[Tracker]]:
    from feddure.tracking.mlflow import MLflow
    from feddure.tracking.wandb import WandB

    yield from (kind for kind in (MLflow, WandB) if kind.name in names)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _read(folder: Path, name: str) -> dict[str, Any]:
    """What a tracker has noted in a run's folder; nothing where it has not, or the file is damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(read_regular(_file(folder, name)))
        return found if isinstance(found, dict) and isinstance(found.get("run"), str) else {}
    return {}
