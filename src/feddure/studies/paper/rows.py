"""What was measured for a study: a row for each of its places over all seeds, with the paper's number beside it.

Accuracies and differences here are in per cent and points, as the paper prints them. What is not measured has no
number.
"""

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from feddure import config
from feddure.reports.frame import Spread, mean_sd, paired
from feddure.studies.grid.store import Cell, Measurement, Store
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.numbers import PRESETS, method_name, printed
from feddure.tracking import summary

REFERENCE = "fedavg-matched"
"""Labels-only training with as many local steps: what any use of unlabelled images must beat."""

VARIED = ("fixmatch", "uda", "feddure", "fedmatch", "proximal")
"""Fields of methods: a cell that changes nothing else is a further row of the study it belongs to."""

_LONGEST_STEM = 110  # bytes: encrypted file systems take names of 143, ending and mark of an unfinished file included

Accuracies = Mapping[int, float]
"""Per cent by seed."""


@dataclass(frozen=True)
class Difference:
    """Points of accuracy between two things on the same seeds; the 95 % interval needs two seeds or more."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def below(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high is not None and self.high < 0

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return signed(self.mean, 1 if self.seeds > 1 else 2)
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


@dataclass(frozen=True)
class Row:
    """A method at one place of a study, over its seeds."""

    study: str
    preset: str
    dataset: str
    setting: str
    method: str
    options: str = ""
    value: float | None = None  # of the study's axis
    measured: Mapping[int, Measurement] = field(default_factory=dict)  # by seed
    missing: tuple[int, ...] = ()  # seeds
    failed: Mapping[int, str] = field(default_factory=dict)  # why, of those of the missing that were tried in vain
    reference: Accuracies = field(default_factory=dict)  # of labels-only training with as many steps
    paper: float | None = None

    @property
    def name(self) -> str:
        """The method, and what it changes."""
        return method_name(self.method, self.study) + (f", {self.options}" if self.options else "")

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(self.measured))

    @property
    def accuracies(self) -> dict[int, float]:
        """The mean of the last ten evaluations of each seed."""
        return {seed: 100 * self.measured[seed].accuracy_last10 for seed in self.seeds}

    @property
    def last10(self) -> Spread | None:
        return spread(list(self.accuracies.values()))

    @property
    def last(self) -> Spread | None:
        return spread([100 * found.accuracy_last for found in self.measured.values()])

    @property
    def averaged(self) -> Spread | None:
        """Last evaluation of the averaged model."""
        shares = [found.accuracy_ema for found in self.measured.values()]
        return spread([100 * share for share in shares if share is not None])

    @property
    def local_steps(self) -> float | None:
        steps = [found.local_steps for found in self.measured.values()]
        return statistics.fmean(steps) if steps else None

    @property
    def from_paper(self) -> float | None:
        """Ours − the paper's."""
        return None if self.last10 is None or self.paper is None else self.last10.mean - self.paper

    @property
    def beyond_labels(self) -> Difference | None:
        """What unlabelled images are worth: ours − labels-only training with as many steps, seed by seed."""
        return None if self.method == REFERENCE else difference(self.accuracies, self.reference)


def rows(cells: Sequence[Cell], store: Store, failed: Mapping[str, str] | None = None) -> list[Row]:
    """The rows of a study in the order of its cells, then the places where only the paper has a number.

    Experiments that are not the paper's have their own rows alone. `failed` says why cells could not be measured, by
    their hashes.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    study = preset = ""
    for cell in cells:
        study, preset = cell.study, cell.preset
        e = cell.experiment
        place = (e.dataset, e.partition.setting, e.method, cell.options, axis_value(cell))
        entry = found.setdefault(place, {"measured": {}, "missing": [], "failed": {}, "reference": {}})
        measurement = store.find(cell)
        if measurement is None:
            entry["missing"].append(e.seed)
            if failed and cell.hash in failed:
                entry["failed"][e.seed] = failed[cell.hash]
        else:
            entry["measured"][e.seed] = measurement
            reference = store.find(reference_cell(cell))
            if reference is not None:
                entry["reference"][e.seed] = 100 * reference.accuracy_last10
    paper = printed(study)
    table = [
        Row(
            study, preset, dataset, setting, method, options, value, entry["measured"], tuple(entry["missing"]),
            entry["failed"], entry["reference"], paper.get((dataset, setting, method)) if not options else None,
        )
        for (dataset, setting, method, options, value), entry in found.items()
    ]  # fmt: skip
    return table + _only_printed(table) if preset in PRESETS and not is_apart(cells) else table


def _only_printed(table: Sequence[Row]) -> list[Row]:
    """Rows of what the paper prints beyond a table; a whole data set has room for labels-only training too."""
    study, preset = table[0].study, table[0].preset
    paper = printed(study)
    datasets, there = {row.dataset for row in table}, {(row.dataset, row.setting, row.method) for row in table}
    found = []
    for dataset, setting in dict.fromkeys(place[:2] for place in paper):
        for method in reproduce.STUDIES[study].methods:
            place = (dataset, setting, method)
            wanted = place in paper or (method == REFERENCE and dataset not in datasets)
            if wanted and place not in there:
                found.append(Row(study, preset, *place, paper=paper.get(place)))
    return found


def mean_of(rows: Iterable[Row]) -> str:
    """What the accuracies of rows are the mean of, in the words of a run's summary; a short run has few evaluations."""
    counts = sorted({len(found.curve) for row in rows for found in row.measured.values()} or {summary.LAST})
    said = []
    for count in counts:
        records = [{"round": place, "test": {"accuracy": 0.0}} for place in range(count)]
        said.append(summary.summarise(records).mean_of + " evaluations" * (count > 1))
    return " or ".join(dict.fromkeys(said))


def axis_value(cell: Cell) -> float | None:
    """What a chart's cell has on its axis; None in a table."""
    axis = reproduce.STUDIES[cell.study].axis
    return float(cell.coordinates()[axis]) if axis else None


def reference_cell(cell: Cell) -> Cell:
    """The same experiment with labelled images alone and as many steps."""
    plain = {name: config.Experiment.model_fields[name].default for name in VARIED}
    return Cell(cell.study, cell.preset, cell.experiment.model_copy(update={"method": REFERENCE} | plain))


def gather(study: str, asked: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells asked for, and what else was measured for the same study and preset.

    A later look at one method does not make the others disappear from the study's table. Cells that change more than
    a method (other rounds, another server) make a table of their own.
    """
    if not asked or is_apart(asked):
        return list(asked)
    return _once([*known(study, asked[0].preset, store), *asked])


def known(study: str, preset: str, store: Store) -> list[Cell]:
    """What was measured for a study under a preset, and the rest of the study's cells for the same seeds.

    Data sets beyond the study's own count where something was measured on them that table 1 would not ask for; a
    preset that is not the paper's has no data sets of its own.
    """
    found = list(store.measurements())
    experiments = [config.Experiment.model_validate(one.experiment) for one in found]
    usual = reproduce.STUDIES[study].datasets if preset in PRESETS else ()
    datasets = [*usual, *sorted({experiment.dataset for experiment in experiments} - set(usual))]
    seeds = tuple(sorted({experiment.seed for experiment in experiments}))
    every = _cells(study, preset, tuple(datasets), seeds)
    there = {one.config_hash for one in found}
    table1 = () if study == "table1" else _cells("table1", preset, tuple(datasets), seeds)
    shared = {cell.hash for cell in table1}
    own = {cell.experiment.dataset for cell in every if cell.hash in there - shared} | set(usual)
    begun = {cell.experiment.seed for cell in every if cell.hash in there}
    chosen = [cell for cell in every if cell.experiment.dataset in own and cell.experiment.seed in begun]
    return _once([*chosen, *_variants(chosen, experiments)])


def is_apart(cells: Sequence[Cell]) -> bool:
    """Whether cells differ from their study in more than a method's own fields."""
    changed = {text.partition("=")[0].partition(".")[0] for cell in cells for text in cell.options.split()}
    return bool(changed - set(VARIED)) or _rounds(cells) != usual_rounds(cells[0].preset)


def usual_rounds(preset: str) -> int:
    return config.load(preset).rounds


def stem(study: str, cells: Sequence[Cell], preset: str) -> str:
    """The name of a study's files, without ending; a hash stands for what is too long in it."""
    name = f"{study}-{preset}"
    if not cells or not is_apart(cells):
        return name
    if _rounds(cells) != usual_rounds(preset):
        name += f"-{_rounds(cells)}-rounds"
    options = "-".join(sorted({cell.options for cell in cells} - {""}))
    whole = f"{name}-{options}".rstrip("-")
    name = "".join(sign if sign.isalnum() or sign in "-.=" else "-" for sign in whole)
    if len(name.encode()) <= _LONGEST_STEM:
        return name
    kept = name.encode()[: _LONGEST_STEM - 11].decode(errors="ignore").rstrip("-")
    return f"{kept}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


def difference(ours: Accuracies, theirs: Accuracies) -> Difference | None:
    """Ours − theirs on the seeds that both have."""
    found = paired(ours, theirs)
    return None if found is None else Difference(found.mean, found.low, found.high, found.n)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and standard deviation; nothing of nothing."""
    return mean_sd(values)


def signed(value: float, digits: int = 1) -> str:
    """Points with their sign; what rounds to zero has none."""
    text = f"{value:+.{digits}f}"
    return (text[1:] if not text.strip("+-0.") else text).replace("-", "−")


def axis_text(axis: str, value: float) -> str:
    """A point of an axis: γ = 0.3, 4 % labels, 10 clients."""
    return {"gamma": f"γ = {value:g}", "labels": f"{value:g} % labels", "clients_per_round": f"S = {value:g}"}[axis]


@cache
def _cells(study: str, preset: str, datasets: tuple[str, ...], seeds: tuple[int, ...]) -> tuple[Cell, ...]:
    return tuple(reproduce.cells(study, reproduce.Request(preset, datasets=datasets, seeds=seeds)))


def _variants(every: Sequence[Cell], experiments: Iterable[config.Experiment]) -> Iterator[Cell]:
    """Measured experiments that differ from a cell of the study in fields of their method alone."""
    by_place: dict[str, Cell] = {_but_method_fields(cell.experiment): cell for cell in every}
    hashes = {cell.hash for cell in every}
    for experiment in experiments:
        cell = by_place.get(_but_method_fields(experiment))
        if cell is not None and experiment.fingerprint()[:16] not in hashes:
            changed = summary.differences([cell.experiment, experiment])
            tree = summary.flat(experiment)
            options = " ".join(f"{key}={tree[key]}" for key in changed if key.partition(".")[0] in VARIED)
            if options:
                yield Cell(cell.study, cell.preset, experiment, options)


def _but_method_fields(experiment: config.Experiment) -> str:
    return experiment.model_dump_json(exclude={*VARIED, "engine", "checkpoint_every"})


def _once(cells: Iterable[Cell]) -> list[Cell]:
    """Each experiment once, in the study's order: by data set, method, setting, axis and seed as first seen."""
    return list({cell.hash: cell for cell in cells}.values())


def _rounds(cells: Sequence[Cell]) -> int:
    return cells[0].experiment.rounds
