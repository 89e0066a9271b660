"""The paper's tables and charts as grids of experiments.

Studies share cells: table 1's FedDure under DIR-DIR is also a point of every chart, and is measured once.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddure import config
from feddure.errors import ConfigError
from feddure.studies.grid.store import Cell

SETTINGS = ("iid-iid", "iid-dir", "dir-dir")
TABLE1 = (
    "fedavg", "fedavg-matched", "fedavg-sl", "fedprox-sl", "fedavg-uda", "fedprox-uda", "fedavg-fixmatch",
    "fedprox-fixmatch", "fedmatch", "feddure",
)  # fmt: skip
"""The paper's nine methods, and labels-only training with as many steps as theirs."""

TABLE2 = ("fedavg-fixmatch", "baseline+maml", "f-reg", "avg-f-reg", "c-reg", "avg-c-reg", "feddure")
"""The paper calls the first one Baseline."""

CHARTED = ("feddure", "fedmatch", "fedavg-fixmatch", "fedavg-matched")
"""The three methods of the paper's charts, and labels-only training with as many steps."""

EMA = 0.9
"""Decay of the averaged model that is evaluated beside the global one; it changes nothing in training."""

Changes = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A table or chart of the paper: which experiments it is made of."""

    name: str
    about: str
    datasets: tuple[str, ...] = ("cifar10",)
    settings: tuple[str, ...] = SETTINGS
    methods: tuple[str, ...] = TABLE1
    axis: str = ""  # what a chart varies: a column of results.csv
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Request:
    """What a user asked for; empty means all that the study has."""

    preset: str = "aaai24"
    datasets: Sequence[str] = ()
    settings: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = (0, 1, 2)
    rounds: int | None = None
    changes: Changes = field(default_factory=dict)  # of any field, by dotted keys


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study("figure1", "Accuracy against rounds, all methods", settings=("dir-dir",)),
        Study("table1", "Table 1: all methods, data sets and settings", datasets=("cifar10", "fashion-mnist")),
        Study("table2", "Table 2: the ablation", methods=TABLE2),
        Study("gamma", "Accuracy against the Dirichlet parameter γ", settings=("iid-dir", "dir-dir"), methods=CHARTED,
              axis="gamma", values=(0.3, 0.5, 0.7, 1.0)),
        Study("labels", "Accuracy against the share of labelled images", settings=("iid-dir", "dir-dir"),
              methods=CHARTED, axis="labels", values=(2, 4, 10, 15, 20)),
        Study("clients", "Accuracy against the number of clients in a round", ("cifar10", "fashion-mnist"),
              ("dir-dir",), CHARTED, axis="clients_per_round", values=(2, 5, 10, 20)),
    )
}  # fmt: skip
"""The studies that train. CINIC-10 is one more `--datasets` away."""


def cells(name: str, request: Request) -> list[Cell]:
    """The cells of a study: data set by data set and seed by seed, so that what comes first is complete first."""
    study = STUDIES[name]
    if study.axis == "gamma":
        _check_gamma(request.settings)
    found = []
    for dataset in request.datasets or study.datasets:
        for seed in request.seeds:
            for method in request.methods or study.methods:
                for setting in request.settings or study.settings:
                    for value in study.values or (None,):
                        changes = _changes(study, value, dataset)
                        found.append(_cell(study, request, dataset, seed, method, setting, changes))
    return found


def _cell(study: Study, request: Request, dataset: str, seed: int, method: str, setting: str, changes: Changes) -> Cell:
    fixed = {
        "dataset": dataset,
        "seed": seed,
        "method": method,
        "partition.setting": setting,
        "rounds": request.rounds,
        "server.ema": EMA,
    }
    for key in request.changes:
        if key in fixed or key in changes:
            raise ConfigError(f"--set {key}: the study {study.name} sets this field itself; use its own option")
    experiment = config.load(request.preset, changes=fixed | changes | request.changes)
    # Another number of lanes or another device is no other experiment.
    options = {key: value for key, value in request.changes.items() if not key.startswith("engine.")}
    return Cell(study.name, request.preset, experiment, " ".join(f"{key}={value}" for key, value in options.items()))


def _changes(study: Study, value: float | None, dataset: str) -> Changes:
    """What a chart's point changes; the point that is the paper's own set-up is the same cell as in its tables."""
    if study.axis == "gamma":
        return {"partition.gamma": value}
    if study.axis == "labels":
        assert value is not None
        own = value == 10 and dataset == "cifar10"  # five labels per class and client
        return {"local_steps": 5} | ({} if own else {"partition.label_fraction": value / 100})
    if study.axis == "clients_per_round":
        return {"clients_per_round": value}
    return {}


def check_names(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that does not exist, before anything is done."""
    known = tuple(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"{option} {name}: expected one of {', '.join(known)}{hint}")


def check_once(option: str, given: Sequence[object]) -> None:
    """Refuse a value that was given twice: the grid would count its cells twice."""
    for place, value in enumerate(given):
        if value in given[:place]:
            raise ConfigError(f"{option}: {value} was given twice; name each once")


def _check_gamma(settings: Iterable[str]) -> None:
    """Without a Dirichlet share every γ is the same experiment."""
    for setting in settings:
        if "dir" not in setting:
            raise ConfigError(
                f"--settings {setting}: the study gamma varies γ, which shapes only Dirichlet shares; "
                f"expected {' or '.join(STUDIES['gamma'].settings)}"
            )
