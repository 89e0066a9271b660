"""The package from Python: `feddure.run(...)` and what it returns."""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from feddure import data, methods, plugins, recommended
from feddure import nn as networks
from feddure.config import Experiment
from feddure.data.dataset import Dataset, check
from feddure.errors import ConfigError
from feddure.methods.base import Method
from feddure.reports.run_report import write_report
from feddure.serving.load import read_network
from feddure.simulation import runs
from feddure.tracking import records
from feddure.tracking.observer import Observer
from feddure.tracking.sites import SiteAccuracy, site_accuracies
from feddure.tracking.summary import Summary, summarise


class Run:
    """A finished run: its numbers, its model, its report."""

    def __init__(self, folder: Path | str, allow_modules: bool = False):
        """`allow_modules` lets `model` import the network's own module that the folder names."""
        self._run = records.read_run(Path(folder))
        self._allow_modules = allow_modules

    @property
    def folder(self) -> Path:
        return self._run.folder

    @property
    def experiment(self) -> Experiment:
        return self._run.experiment

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record a round, as in metrics.jsonl."""
        return self._run.metrics

    @property
    def summary(self) -> Summary:
        """Every metric at the last evaluation and over the last 10, steps, time."""
        return summarise(self._run.metrics, self._run.timing, self._run.experiment.metric)

    @property
    def sites(self) -> list[SiteAccuracy]:
        """Each client's accuracy under its own class mix and on the common test set; of the averaged model if any."""
        averaged = self.summary.accuracy_ema_last is not None
        return site_accuracies(self._run.metrics, self._run.partition, "test_ema" if averaged else "test")

    @property
    def model(self) -> nn.Module:
        """The trained global model, ready to evaluate."""
        return read_network(self.folder, allow_modules=self._allow_modules)[1]

    def report(self) -> Path:
        """(Re)make report.html and return its path."""
        return write_report([self.folder], self.folder / runs.REPORT_FILE)

    def __repr__(self) -> str:
        return f"<feddure.Run {self.folder}: {self.summary}>"


def run(
    preset: str | None = None,
    *,
    config_file: Path | str | None = None,
    dataset: str | Dataset | None = None,
    setting: str | None = None,
    method: str | type[Method] | None = None,
    model: str | Callable[..., nn.Module] | None = None,
    init: Path | str | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: bool = True,
    observers: Sequence[Observer] = (),
    sets: dict[str, Any] | None = None,
    allow_modules: bool = False,
) -> Run:
    """Run one experiment and return it.

    A data set, method or network may be the object itself instead of its name; `sets` changes any field by its dotted
    name, like `--set` of the command: `feddure.run("demo", method="fedavg", sets={"partition.gamma": 0.3})`.
    `observers` are told of every round (`feddure.Observer`); `init` is a model to start from. A `folder:` or `npz:`
    data set without preset and file takes the preset `recommended`. Modules that `config_file`, or a folder to resume,
    names are imported with `allow_modules` alone.
    """
    if resume and preset is None and config_file is None:
        config_file = runs.config_to_resume(None if out is None else Path(out))
    changes = {
        "dataset": dataset.name if isinstance(dataset, Dataset) else dataset,
        "partition.setting": setting,
        "method": _name(method, methods.register),
        "model": _name(model, networks.register),
        "init": None if init is None else str(init),
        "rounds": rounds,
        "seed": seed,
        **(sets or {}),
    }

    def read(name: str) -> Dataset:
        if isinstance(dataset, Dataset):
            return check(dataset, f"data set '{dataset.name}'")
        return data.load(name, Path(data_dir) if data_dir else None, progress)

    file = Path(config_file) if config_file else None
    say = partial(print, file=sys.stderr) if progress else lambda line: None
    experiment, looked_at = recommended.load(preset, file, changes, (), read, say, allow_modules)
    plugins.expect_allowed(*experiment.modules)
    folder = Path(out) if out is not None else default_folder(experiment)
    images = looked_at or read(experiment.dataset)
    runs.execute(experiment, images, folder, resume, progress, observers)
    return Run(folder)


def load_dataset(name: str, data_dir: Path | None = None, progress: bool = False) -> Dataset:
    """The data set of this name; `data_dir` is where downloaded ones live."""
    plugins.allow(name)
    return data.load(name, data_dir, progress)


def default_folder(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """A folder under `runs/` named after the experiment that is not there yet."""
    words = (experiment.dataset, experiment.partition.setting, experiment.method, f"seed{experiment.seed}")
    return new_folder("-".join(words), root)


def new_folder(name: str, root: Path = Path("runs")) -> Path:
    """A folder of this name, or with a number after it, that is not there yet."""
    name = re.sub(r"[/:?]", "_", name)
    numbered = (root / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())


def _name(thing: Any, register: Callable[[str, Any], None]) -> str | None:
    """A name stays; a class or function is registered under its import path, by which the run can be replayed."""
    if thing is None or isinstance(thing, str):
        return thing
    if not hasattr(thing, "__qualname__"):
        raise ConfigError(f"{thing!r} was given, expected a name, a class or a function")
    path = f"{thing.__module__}:{thing.__qualname__}"
    register(path, thing)
    return path
