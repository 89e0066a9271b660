"""The package from Python: `feddure.run(...)`, `compare`, `sweep` and `partition`, and what they return."""

import base64
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import nn

from feddure import data, experiments, methods, plugins, recommended
from feddure import nn as networks
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import Dataset, check
from feddure.data.partition import Partition, expect_clients
from feddure.data.sources import find_source
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods.base import Method
from feddure.reports import figures, style
from feddure.reports.run_report import write_report
from feddure.serving.load import read_network
from feddure.simulation import runs
from feddure.tracking import records
from feddure.tracking.observer import Observer
from feddure.tracking.sites import SiteAccuracy, site_accuracies
from feddure.tracking.summary import Summary, summarise
from feddure.tracking.tracker import trackers

if TYPE_CHECKING:
    from feddure.studies import sweep as sweeps
    from feddure.studies.compare_report import View
    from feddure.studies.grid.store import Store

Row = dict[str, Any]
"""A line of a table: plain values by the names of columns."""


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

    def _repr_html_(self) -> str:
        title = methods.title(self.experiment.method)
        line = figures.Line(title, self.metrics, style.run_line_styles([self.experiment.method])[0])
        drawn = style.render(figures.evaluated([line], self.experiment.metric), "png", 60)
        picture = f'<img src="data:image/png;base64,{base64.b64encode(drawn).decode()}">'
        return _html(pd.DataFrame(self.summary.rows()), str(self.folder), head=False) + picture


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
    clients: int | None = None,
    seed: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: bool = True,
    track: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    sets: dict[str, Any] | None = None,
    allow_modules: bool = False,
) -> Run:
    """Run one experiment and return it.

    A data set, method or network may be the object itself instead of its name; `sets` changes any field by its dotted
    name, like `--set` of the command: `feddure.run("demo", method="fedavg", sets={"partition.gamma": 0.3})`.
    `observers` are told of every round (`feddure.Observer`), and so are the services in `track`: `["mlflow", "wandb"]`.
    `init` is a model to start from. A `folder:` or `npz:` data set without preset and file takes the preset
    `recommended`. Modules that `config_file`, or a folder to resume, names are imported with `allow_modules` alone.

    >>> import feddure
    >>> done = feddure.run("demo", method="fedavg", rounds=1, out="runs/one", progress=False)
    >>> done.summary.rounds
    1
    """
    if resume and (out is None or (preset is None and config_file is None)):
        config_file = runs.config_to_resume(None if out is None else Path(out))
    changes = experiments.by_key(
        dataset=data_name(dataset),
        setting=setting,
        clients=clients,
        method=_method_name(method),
        model=_name(model, networks.register),
        init=_text(init),
        rounds=rounds,
        seed=seed,
    )
    read = _reader(dataset, data_dir, progress)
    changes, emptied = _changed(changes, sets)
    file = Path(config_file) if config_file else None
    experiments.expect_given(preset, file, changes, emptied)
    experiment, looked_at = recommended.load(preset, file, changes, emptied, read, _say(progress), allow_modules)
    plugins.expect_allowed(*experiment.modules)
    folder = Path(out) if out is not None else experiments.default_folder(experiment)
    watching = [*trackers(track, folder), *observers]
    images = looked_at or read(experiment.dataset)
    expect_clients(clients, experiment.partition.setting, images)
    runs.execute(experiment, images, folder, resume, progress, watching)
    return Run(folder)


class Comparison:
    """A finished comparison: a row a method, whether differences are more than chance, and the runs one by one."""

    def __init__(self, view: "View", folder: Path):
        self.folder = folder
        self.view = view  # the same as frames, as the command prints them
        self.failed = view.failed
        """What has ended the methods that are not compared, by their names."""
        self.runs = [Run(one.folder) for one in view.runs]

    @cached_property
    def table(self) -> list[Row]:
        """comparison.csv: a row a method; accuracies in %, and None is what was not measured."""
        return _rows(self.folder / "comparison.csv")

    @cached_property
    def pairs(self) -> list[Row]:
        """paired.csv: each method's difference from the reference on the same seeds, in points."""
        return _rows(self.folder / "paired.csv")

    def report(self) -> Path:
        """(Re)make report.html and return its path."""
        from feddure.studies import compare_report

        return compare_report.write(self.folder, self.view)

    def __repr__(self) -> str:
        plan = self.view.plan
        return f"<feddure.Comparison {self.folder}: {', '.join(plan.methods)} on {len(plan.seeds)} seeds>"

    def _repr_html_(self) -> str:
        found = self.view.methods(), self.view.pairs()
        said = str(self.folder), f"against {methods.title(self.view.plan.against)}"
        return "".join(_html(frame, caption) for frame, caption in zip(found, said, strict=True) if len(frame))


def compare(
    preset: str | None = None,
    *,
    methods: Sequence[str | type[Method]] = (),
    seeds: Sequence[int] = (),
    against: str | type[Method] | None = None,
    config_file: Path | str | None = None,
    dataset: str | Dataset | None = None,
    setting: str | None = None,
    model: str | Callable[..., nn.Module] | None = None,
    init: Path | str | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: bool = True,
    track: Sequence[str] = (),
    sets: dict[str, Any] | None = None,
    allow_modules: bool = False,
) -> Comparison:
    """Compare methods on the same partitions, clients and seeds; the words are those of `feddure compare` and `run`.

    A method that fails is in `failed`; the others are compared.

    >>> import feddure
    >>> both = ["fedavg", "fedavg-fixmatch"]
    >>> found = feddure.compare("demo", methods=both, seeds=[0], rounds=1, out="runs/two", progress=False)
    >>> [row["method"] for row in found.table]
    ['fedavg', 'fedavg-fixmatch']
    """
    from feddure.studies import compare as study

    named, network = data_name(dataset), _name(model, networks.register)
    changes = experiments.by_key(
        dataset=named, setting=setting, clients=clients, model=network, init=_text(init), rounds=rounds
    )
    read = _reader(dataset, data_dir, progress)
    plan, experiment, looked_at, folder = study.prepare(
        preset,
        Path(config_file) if config_file else None,
        *_changed(changes, sets),
        [str(_method_name(method)) for method in methods],
        seeds,
        _method_name(against),
        None if out is None else Path(out),
        resume,
        read,
        _say(progress),
        allow_modules,
    )
    study.check(plan, experiment, folder, resume)  # before a data set is downloaded
    images = looked_at or read(experiment.dataset)
    expect_clients(clients, experiment.partition.setting, images)
    say = partial(_say(progress), f"comparison folder: {folder}")
    return Comparison(study.compare(plan, experiment, images, folder, resume, progress, track, started=say), folder)


class Sweep:
    """A measured sweep: its combinations, best first."""

    def __init__(self, wanted: "sweeps.Sweep", store: "Store", failed: Mapping[str, str]):
        self._wanted, self._store = wanted, store
        self.failed = failed
        """What has ended cells that are not measured, by their fingerprints."""

    @property
    def folder(self) -> Path:
        return self._store.folder

    @cached_property
    def table(self) -> list[Row]:
        """leaderboard.csv: a row a combination, best first; accuracies in %."""
        return _rows(self.folder / "leaderboard.csv")

    @property
    def verdict(self) -> str:
        """Whether the best differs from the second by more than chance; a sentence for each leaderboard."""
        return " ".join(board.verdict() for board in self._leaderboards())

    def report(self) -> Path:
        """(Re)make report.html and the tables beside it, and return its path."""
        from feddure.studies import sweep_report

        return next(path for path in sweep_report.write(self._wanted, self._store) if path.suffix == ".html")

    def _leaderboards(self) -> list[Any]:
        from feddure.studies import sweep_report

        return sweep_report.leaderboards(self._wanted, self._store)

    def __repr__(self) -> str:
        return f"<feddure.Sweep {self.folder}: {self.verdict}>"

    def _repr_html_(self) -> str:
        found = self._leaderboards()
        return "".join(_html(board.table(brief=True), f"{board.title} {board.verdict()}") for board in found)


def sweep(
    plan: Path | str | Mapping[str, Any],
    *,
    out: Path | str | None = None,
    init: Path | str | None = None,
    merge: Sequence[Path | str] = (),
    data_dir: Path | str | None = None,
    progress: bool = True,
    track: Sequence[str] = (),
    allow_modules: bool = False,
) -> Sweep:
    """Measure every combination of any fields and methods on several seeds, and rank them.

    `plan` is a file as `feddure sweep` reads it, or what would stand in it. Finished cells are kept: call it again
    after an interruption and it goes on. Several processes or machines: `feddure sweep --jobs` and `--ray`.

    >>> import feddure
    >>> plan = {"preset": "demo", "set": {"rounds": 1}, "grid": {"method": ["fedavg", "fedavg-fixmatch"]}, "seeds": [0]}
    >>> found = feddure.sweep(plan, out="runs/rates", progress=False)
    >>> len(found.table), found.report().name
    (2, 'report.html')
    """
    from feddure.studies import sweep as study
    from feddure.studies import sweep_report
    from feddure.studies.grid import failures
    from feddure.studies.grid.measure import measure
    from feddure.studies.grid.store import named
    from feddure.tracking import tracker

    start = _text(init)
    if isinstance(plan, Mapping):
        wanted, name = study.from_tree(_named_objects(plan), start), "sweep"
    else:
        wanted = study.read(Path(plan), start, allow_modules)
        name = f"sweep-{wanted.name}"
    tracker.expect(track)
    where = Path(data_dir) if data_dir else None
    store = study.open_folder(wanted, Path("runs") / name if out is None else Path(out), [*map(Path, merge)], where)
    cells = wanted.cells()
    problems = measure(cells, store, where, track=track, progress=progress)
    if problems:
        ended = [(named([cell]), problems[cell.hash]) for cell in cells if cell.hash in problems]
        told = "\n".join(failures.told(ended))
        if not any(store.has(cell) for cell in cells):
            raise ConfigError(told)
        warnings.warn(told, FeddureWarning, stacklevel=2)
    sweep_report.write(wanted, store)
    return Sweep(wanted, store, {name: problem.reason for name, problem in problems.items()})


class PartitionView:
    """A partition of a data set, and what there is to know of it."""

    def __init__(self, partition: Partition, dataset: Dataset):
        self.partition, self._dataset = partition, dataset

    @cached_property
    def summary(self) -> Row:
        """All of it as plain values, as `feddure partition --json` prints them."""
        return partitions.describe(self.partition, self._dataset)

    @property
    def table(self) -> list[Row]:
        """A row a client: how many images it has with and without labels, of each class, and which classes not."""
        return self.summary["clients"]

    def save(self, file: Path | str) -> None:
        """Keep the partition in an .npz with its hash."""
        self.partition.save(file)

    def plot(self, file: Path | str) -> Path:
        """Draw class × client as bubbles into a .png, .svg or .pdf."""
        from feddure.reports import partition_figure

        about = partitions.summarise(self.partition, self._dataset)
        style.save(partition_figure.figure(about, self._dataset.name), Path(file))
        return Path(file)

    def __repr__(self) -> str:
        return f"<feddure.PartitionView {self._title}>"

    @property
    def _title(self) -> str:
        about = self.partition.parameters
        return f"{about['dataset']}, {about['setting']}, {self.partition.clients} clients"

    def _repr_html_(self) -> str:
        shown = pd.DataFrame(self.table)
        columns = ["site" if "site" in shown else "client", "labelled", "unlabelled"]
        return _html(shown[columns], self._title)


def partition(
    dataset: str | Dataset = "fashion-mini",
    setting: str = "dir-dir",
    *,
    clients: int | None = None,
    seed: int = 0,
    data_dir: Path | str | None = None,
    **fields: Any,
) -> PartitionView:
    """Deal a data set's images to clients, 20 unless told otherwise.

    Further fields are those of the section `partition`: gamma, labels_per_class, label_fraction, labelled_clients, …

    >>> import feddure
    >>> dealt = feddure.partition("fashion-mini", "iid-dir", clients=5, gamma=0.3)
    >>> len(dealt.table), sum(row["labelled"] for row in dealt.table)
    (5, 250)
    """
    options = {"setting": setting, "clients": 20 if clients is None else clients, **fields}
    found = experiments.build({"partition": options, "clients_per_round": 1}).partition
    name = data_name(dataset)
    plugins.allow(name)
    images = _reader(dataset, data_dir, False)(str(name))
    expect_clients(clients, setting, images)
    return PartitionView(partitions.make(images, found, seed), images)


def load_dataset(name: str, data_dir: Path | str | None = None, progress: bool = False) -> Dataset:
    """The data set of this name; `data_dir` is where downloaded ones live."""
    plugins.allow(name)
    return data.load(name, Path(data_dir) if data_dir else None, progress)


def _changed(changes: Mapping[str, Any], sets: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """All changes, and as texts those that empty a field: among changes, None means as it was."""
    sets = sets or {}
    return {**changes, **sets}, [f"{key}=null" for key, value in sets.items() if value is None]


def _reader(dataset: str | Dataset | None, data_dir: Path | str | None, progress: bool) -> Callable[[str], Dataset]:
    """Gives the data set of a name, or the one that was given."""

    def read(name: str) -> Dataset:
        if isinstance(dataset, Dataset):
            return check(dataset, f"data set '{dataset.name}'")
        return data.load(name, Path(data_dir) if data_dir else None, progress)

    return read


def data_name(dataset: str | Dataset | None) -> str | None:
    """The name of a data set, which is known; a path that is there is one of own images."""
    if isinstance(dataset, Dataset):
        return dataset.name
    if dataset is None:
        return None
    name = data.resolve(dataset)
    if ":" not in name:
        find_source(name)
    return name


def _text(path: Path | str | None) -> str | None:
    return None if path is None else str(path)


def _say(progress: bool) -> Callable[[str], None]:
    return partial(print, file=sys.stderr) if progress else lambda line: None


def _rows(file: Path) -> list[Row]:
    """The lines of a table on disk."""
    found = pd.read_csv(file).astype(object)
    return found.where(found.notna(), None).to_dict("records")  # type: ignore[return-value]


def _html(shown: pd.DataFrame, caption: str, head: bool = True) -> str:
    """A small table for a notebook."""
    with pd.option_context("display.max_colwidth", None):
        return f"<p>{escape(caption)}</p>{shown.to_html(index=False, header=head, border=0, max_rows=20)}"


def _method_name(method: str | type[Method] | None) -> str | None:
    return _name(method, methods.register)


def _named_objects(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep's values with classes and functions by their names."""

    def named(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: named(inner, one) for inner, one in value.items()}
        if isinstance(value, list | tuple):
            return [named(key, one) for one in value]
        if key == "method":
            return _method_name(value)
        return _name(value, networks.register) if key == "model" else value

    return {key: named(key, value) for key, value in tree.items()}


def _name(thing: Any, register: Callable[[str, Any], None]) -> str | None:
    """A name stays; a class or function is registered under its import path, by which the run can be replayed."""
    if thing is None or isinstance(thing, str):
        return thing
    if not hasattr(thing, "__qualname__"):
        raise ConfigError(f"{thing!r} was given, expected a name, a class or a function")
    path = f"{thing.__module__}:{thing.__qualname__}"
    register(path, thing)
    return path
