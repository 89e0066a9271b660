"""The paper's tables and charts as grids of experiments, its printed numbers, and which measured cells a table shows.

Studies share cells: table 1's FedDure under DIR-DIR is also a point of every chart, and is measured once.
"""

import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from typing import Any

from feddure import experiments, methods
from feddure.config import Experiment
from feddure.errors import ConfigError
from feddure.studies.grid.store import Cell, Store
from feddure.studies.plan import REFERENCE

PRESETS = ("aaai24", "aaai24-fine")
"""The paper's set-up, read in two ways."""

ROUNDS = 200
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

_LONGEST_STEM = 110  # encrypted file systems take names of 143 bytes, ending and mark of an unfinished file included

EMA = 0.9
"""Decay of the averaged model that is evaluated beside the global one; it changes nothing in training."""

Changes = dict[str, Any]
Measured = Mapping[str, Experiment]


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
    if study.axis == "gamma" and (without := [one for one in request.settings if "dir" not in one]):
        raise ConfigError(
            f"--settings {without[0]}: the study gamma varies γ, which shapes only Dirichlet shares; "
            f"expected {' or '.join(study.settings)}"
        )
    # Another number of lanes or another device is no other experiment.
    options = {key: value for key, value in request.changes.items() if not key.startswith("engine.")}
    told = " ".join(f"{key}={value}" for key, value in options.items())
    found = []
    for dataset, seed, method, setting, value in product(
        request.datasets or study.datasets,
        request.seeds,
        request.methods or study.methods,
        request.settings or study.settings,
        study.values or (None,),
    ):
        fixed = {
            "dataset": dataset,
            "seed": seed,
            "method": method,
            "partition.setting": setting,
            "rounds": request.rounds,
            "server.ema": EMA,
            **_changes(study, value, dataset),
        }
        if taken := fixed.keys() & request.changes.keys():
            raise ConfigError(f"--set {min(taken)}: the study {name} sets this field itself; use its own option")
        experiment = experiments.load(request.preset, changes=fixed | request.changes)
        found.append(Cell(name, request.preset, experiment, told))
    return found


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


def reference_cell(cell: Cell) -> Cell:
    """The same experiment with labelled images alone and as many steps."""
    return Cell(cell.study, cell.preset, cell.experiment.model_copy(update={"method": REFERENCE, "proximal": None}))


def gather(asked: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells of a study that were asked for, and what else was measured for the same study and preset.

    A later look at one method does not make the others disappear from the study's table. Cells that change what the
    study says (other rounds, other options) make a table of their own.
    """
    if not asked or is_apart(asked):
        return list(asked)
    known = measured_for(asked[0].study, asked[0].preset, measured_experiments(store))
    return list({cell.hash: cell for cell in (*known, *asked)}.values())


def measured_experiments(store: Store) -> Measured:
    """All that was measured in a folder, by hash."""
    return {found.config_hash: experiments.build(found.experiment) for found in store.measurements()}


def measured_for(study: str, preset: str, measured: Measured) -> list[Cell]:
    """What was measured for a study under a preset, and the rest of the study's cells for the same seeds.

    Data sets beyond the study's own count where something was measured on them that table 1 would not ask for; a
    preset that is not the paper's has no data sets of its own.
    """
    usual = STUDIES[study].datasets if preset in PRESETS else ()
    datasets = (*usual, *sorted({experiment.dataset for experiment in measured.values()} - set(usual)))
    seeds = tuple(sorted({experiment.seed for experiment in measured.values()}))
    every = _plain(study, preset, datasets, seeds)
    shared = set() if study == "table1" else {cell.hash for cell in _plain("table1", preset, datasets, seeds)}
    own = {cell.experiment.dataset for cell in every if cell.hash in measured.keys() - shared} | set(usual)
    begun = {cell.experiment.seed for cell in every if cell.hash in measured}
    return [cell for cell in every if cell.experiment.dataset in own and cell.experiment.seed in begun]


def begun(store: Store) -> list[Cell]:
    """The cells of all studies of which something is measured: more than what a chart shares with table 1."""
    found, measured = [], measured_experiments(store)
    for preset in PRESETS:
        table1 = {cell.hash for cell in measured_for("table1", preset, measured)}
        for name, study in STUDIES.items():
            own = measured_for(name, preset, measured)
            shared = table1 if study.axis or name == "table2" else set()
            if any(cell.hash in measured.keys() - shared for cell in own):
                found += own
    return found


def is_apart(cells: Sequence[Cell]) -> bool:
    """Whether cells differ from their study."""
    return bool(cells[0].options) or cells[0].experiment.rounds != experiments.load(cells[0].preset).rounds


def stem(cells: Sequence[Cell]) -> str:
    """The name of the files of a study's cells, without ending; a hash stands for what is too long in it."""
    preset, rounds = cells[0].preset, cells[0].experiment.rounds
    name = f"{cells[0].study}-{preset}"
    if not is_apart(cells):
        return name
    if rounds != experiments.load(preset).rounds:
        name += f"-{rounds}-rounds"
    whole = "-".join(filter(None, [name, cells[0].options]))
    name = re.sub(r"[^A-Za-z0-9.=-]", "-", whole)
    if len(name) <= _LONGEST_STEM:
        return name
    return f"{name[: _LONGEST_STEM - 11]}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


@cache
def printed(study: str) -> dict[tuple[str, str, str], float]:
    """Accuracies in per cent as the paper prints them, by data set, setting and method, in its order.

    Figure 1 shows how runs of table 1 came to their numbers; the charts print none.
    """
    if study == "figure1":
        return {place: value for place, value in printed("table1").items() if place[:2] == ("cifar10", "dir-dir")}
    if study not in ("table1", "table2"):
        return {}
    text = (resources.files("feddure.studies.paper") / f"{study}.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(text.splitlines())
    return {(line["dataset"], line["setting"], line["method"]): float(line["accuracy"]) for line in lines}


def method_name(method: str, study: str = "") -> str:
    """A method as the paper writes it; the ablation calls one of them its baseline."""
    return "Baseline" if (study, method) == ("table2", "fedavg-fixmatch") else methods.title(method)


def axis_text(study: str, value: float) -> str:
    """A point of a study's axis: γ = 0.3, 4 % labels, S = 10."""
    return {"gamma": f"γ = {value:g}", "labels": f"{value:g} % labels", "clients": f"S = {value:g}"}[study]


@cache
def _plain(study: str, preset: str, datasets: tuple[str, ...], seeds: tuple[int, ...]) -> tuple[Cell, ...]:
    return tuple(cells(study, Request(preset, datasets=datasets, seeds=seeds)))
