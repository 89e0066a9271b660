"""Results as one table, a row a run, and the statistics that every view of them shares.

Comparisons, sweeps and the paper's tables and charts are views of this frame. Metrics are in per cent, differences
in points; a run that was not measured has its place and no number.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from feddure import experiments, methods
from feddure.config import DIRICHLET, Experiment
from feddure.data import recipes
from feddure.data.sources import find_source
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports.diagnostics import last_means, probe_means, trace
from feddure.tracking import summary
from feddure.tracking.metrics import TITLES
from feddure.tracking.records import Run
from feddure.tracking.summary import VALIDATION, Scores, evaluations, signed, summarise, validation

CONFIDENCE = 0.95

EVALUATIONS = ("last10", "last", "ema_last10", "ema")
"""The mean of the last ten and the last one, of the model itself and of its average over rounds."""

_OTHERS = tuple(f"{name}_{which}" for name in TITLES if name != "accuracy" for which in EVALUATIONS)

COLUMNS = (
    "study", "preset", "name", "method", "title", "dataset", "setting", "gamma", "labels", "clients_per_round", "seed",
    "rounds", "local_steps", "options", "accuracy_last", "accuracy_last10", "accuracy_ema", "accuracy_ema_last10",
    "seconds", "left_out", "cell", "curve", "bytes_up", "bytes_down", "diagnostics", "environment", "failed",
    *VALIDATION, "metric", *_OTHERS,
)  # fmt: skip
"""`name` is that of a sweep's combination, where it has one. `local_steps` are those of a client in a round, `left_out`
is the share of updates that were not finite, `curve` has (round, accuracy, accuracy of the averaged model), `bytes_*`
are of the whole run, `failed` says why there is none. `metric` is the one that ranks: validation is by it, and
`test_best` is its value on the test set in the round that is best on validation images."""

_SAME = 1e-10  # accuracies that differ by less differ by rounding

_SHARES = (*(f"accuracy_{which}" for which in EVALUATIONS), *VALIDATION, *_OTHERS)  # in per cent

RESULTS = (
    "study", "preset", "method", "dataset", "setting", "gamma", "labels", "clients_per_round", "seed", "rounds",
    "local_steps", "accuracy_last", "accuracy_last10", "accuracy_ema", "accuracy_ema_last10", "seconds", "options",
    "config_hash", "commit", "hardware", "versions", *VALIDATION, "metric", *_OTHERS, "name",
)  # fmt: skip
"""Columns of results.csv."""


def of_cells(cells: Iterable[Any], store: Any) -> pd.DataFrame:
    """A row for each cell of a grid's store (`studies.grid`)."""
    rows, failures = [], store.failures()
    for cell in cells:
        row = _place(cell.experiment) | {"labels": labels(cell.experiment), "cell": cell.hash}
        row |= {"study": cell.study, "preset": cell.preset, "options": cell.options, "name": cell.name}
        found = store.find(cell)
        if found is None:
            row["failed"] = failures[cell.hash].reason if cell.hash in failures else ""
        else:
            same = ("rounds", "local_steps", "seconds", "left_out", "diagnostics", "environment")
            row |= {name: getattr(found, name) for name in same}
            row |= _scores({name: found.scores(name) for name in TITLES}, cell.experiment.metric)
            row["curve"] = [(number, 100 * share, _per_cent(averaged)) for number, share, averaged in found.curve]
            row |= {f"bytes_{way}": size * found.rounds for way, size in found.bytes_per_round.items()}
        rows.append(row)
    return _frame(rows)


def of_runs(runs: Iterable[Run], metric: str = "") -> pd.DataFrame:
    """A row for each run folder; of an unfinished one, what it has reached. `metric` ranks in place of the run's own.

    Its curve is that of the metric.
    """
    rows = []
    for run in runs:
        e = run.experiment
        ranks = metric or e.metric
        found = summarise(run.metrics, run.timing, ranks)
        averaged = dict(evaluations(run.metrics, ranks, "test_ema"))
        curve = [(n, 100 * share, _per_cent(averaged.get(n))) for n, share in evaluations(run.metrics, ranks)]
        labelled, unlabelled = images_of(run.partition)
        updates = sum(len(record.get("clients", ())) for record in run.metrics)
        rows.append(
            _place(e)
            | {
                "labels": round(100 * labelled / (labelled + unlabelled), 2) if labelled else "",
                "rounds": run.rounds,
                "local_steps": found.mean_local_steps,
                "seconds": found.seconds,
                "left_out": found.left_out / max(1, updates),
                "cell": experiments.fingerprint(e)[:16],
                "curve": curve,
                "bytes_up": _bytes(run, "up"),
                "bytes_down": _bytes(run, "down"),
                "diagnostics": last_means(trace(run.metrics)) | probe_means(run.metrics),
                "environment": run.environment,
            }
            | _scores(found.scores, ranks)
        )
    return _frame(rows)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; one seed has no deviation."""

    mean: float
    sd: float | None
    n: int

    def __str__(self) -> str:
        """67.1 ± 0.4, or 67.13 of a single seed: more digits would be lost in the deviation."""
        return f"{self.mean:.2f}" if self.sd is None else f"{self.mean:.1f} ± {self.sd:.1f}"


def mean_sd(values: Iterable[float | None]) -> Spread | None:
    """Mean and standard deviation of what there is; nothing of nothing."""
    known = [float(value) for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Difference:
    """Points between two things on the same seeds, with the ends of the 95 % interval of their mean.

    There is no interval for a single seed, nor for differences that are all the same: two seeds that happen to agree
    would make an interval without width out of nothing.
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def below(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high is not None and self.high < 0

    @property
    def interval(self) -> str:
        """−0.27 to +3.41; nothing where there is none."""
        return "" if self.low is None or self.high is None else f"{signed(self.low, 2)} to {signed(self.high, 2)}"

    @property
    def verdict(self) -> str:
        """What the seeds can tell, in words."""
        if self.n < 2:
            return "one seed cannot tell"
        if self.low is None or self.high is None:
            return "no difference" if abs(self.mean) < _SAME else "equal on all seeds: more seeds are needed"
        if not self.above and not self.below:
            return "no difference can be told"
        least, most = sorted((abs(self.low), abs(self.high)))
        return f"{'better' if self.above else 'worse'} by {least:.1f} to {most:.1f} points"

    def __str__(self) -> str:
        """+1.2 [+0.3, +2.1], or +1.23 of a single seed."""
        if self.low is None or self.high is None:
            return signed(self.mean, 1 if self.n > 1 else 2)
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours − theirs on the seeds that both have, by Student's t; None where they share none."""
    from scipy.stats import t as student  # half a second: only when it is needed

    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    mean, n = statistics.fmean(differences), len(differences)
    if n < 2 or max(differences) - min(differences) < _SAME:
        return Difference(mean, None, None, n)
    half = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def rounded(found: Spread | Difference | None, what: str) -> float | None:
    """One of its numbers, as the files of comparisons and sweeps have it; None where there is none."""
    value = getattr(found, what, None)
    return None if value is None else round(value, 4)


def mean_and_sd(rows: pd.DataFrame, columns: Iterable[str]) -> dict[str, float | None]:
    """Both of each column, as the files of comparisons and sweeps have them."""
    found = {column: mean_sd(rows[column]) for column in columns}
    return {f"{column}_{what}": rounded(one, what) for column, one in found.items() for what in ("mean", "sd")}


def metrics_of(rows: pd.DataFrame) -> list[str]:
    """Accuracy, and every other metric that one of these rows has."""
    return [name for name in TITLES if name == "accuracy" or rows[f"{name}_last10"].notna().any()]


def metric_of(rows: pd.DataFrame) -> str:
    """The metric that ranks these rows: accuracy where they do not agree."""
    found = set(rows["metric"])
    return found.pop() if len(found) == 1 else "accuracy"


def heading(metric: str, text: str) -> str:
    """The head of a column; accuracy, which ranks where nothing else is said, goes without its name."""
    return text if metric == "accuracy" else f"{TITLES[metric]}, {text}"


def by_seed(rows: pd.DataFrame, column: str = "accuracy_last10") -> dict[int, float]:
    """The values of measured rows by their seeds, to be paired."""
    return {int(seed): float(value) for seed, value in zip(rows["seed"], rows[column], strict=True) if value == value}


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that have numbers; data without test images have those of validation images alone."""
    return rows[rows["accuracy_last10"].notna() | rows["validation_last10"].notna()]


def mean_of(rows: pd.DataFrame, spelled_out: bool = False) -> str:
    """What `accuracy_last10` of these rows is the mean of; `spelled_out` says of what even outside a table."""
    text = summary.mean_of(*map(len, measured(rows)["curve"]))
    return f"{text} evaluations" if spelled_out and not text.endswith("evaluation") else text


def mean_heading(rows: pd.DataFrame) -> str:
    """The same at the head of a column; nothing where it would repeat the last evaluation."""
    return summary.mean_heading(map(len, measured(rows)["curve"]))


def provenance(rows: pd.DataFrame) -> list[str]:
    """Where the numbers come from, in a sentence; none where nothing is measured."""
    about = list(measured(rows)["environment"])
    hardware, versions = dict.fromkeys(map(_hardware, about)), dict.fromkeys(map(_versions, about))
    commits = list(dict.fromkeys(str(one["commit"]) for one in about if one.get("commit")))
    more = f" and {len(commits) - 3} more" if len(commits) > 3 else ""
    commit = f", commit {', '.join(commits[:3])}{more}" if commits else ""
    return [f"Measured on {', '.join(hardware)} with {', '.join(versions)}{commit}."] if about else []


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """A table as CSV, whole or not at all; what is missing is empty."""
    write_whole(path, frame.to_csv(index=False, lineterminator="\n").encode(), RunError)


def write_results(folder: Path, rows: pd.DataFrame) -> None:
    """results.csv of a folder: a line for each measured row; those of other studies and cells that it has stay."""
    path, found = folder / "results.csv", measured(rows).rename(columns={"cell": "config_hash"})
    found["commit"] = [about.get("commit") or "" for about in found["environment"]]
    found["hardware"] = [_hardware(about) for about in found["environment"]]
    found["versions"] = [_versions(about) for about in found["environment"]]
    digits = {"local_steps": 2, "seconds": 1} | dict.fromkeys(_SHARES, 4)
    found = found.round(digits)[list(RESULTS)].astype(object)
    if path.exists():
        try:
            before = pd.read_csv(path, dtype=str, keep_default_na=False)
            before = before.rename(columns={"accuracy_best": "test_best"})  # in files of an earlier version
            absent = {name: "" for name in ("accuracy_ema_last10", *VALIDATION, *_OTHERS, "name") if name not in before}
            absent |= {"metric": "accuracy"} if "metric" not in before else {}
            before = before.assign(**absent)[list(RESULTS)]
        except (OSError, ValueError, KeyError) as problem:
            raise RunError(f"{path}: not a table of results ({problem}); move it away, it is made anew") from None
        found = pd.concat([before, found]).drop_duplicates(["study", "config_hash"], keep="last")
    write_csv(path, found)


def labels(experiment: Experiment) -> float | str:
    """How many per cent of the training images are labelled; nothing where the data come with their own labels."""
    part = experiment.partition
    if part.label_fraction is not None:
        return round(100 * part.label_fraction, 4)
    source = None if ":" in experiment.dataset else find_source(experiment.dataset)
    if source is None or source.train is None or source.classes is None:
        return ""
    per_class = recipes.LABELS_PER_CLASS if part.labels_per_class is None else part.labels_per_class
    return round(100 * per_class * source.classes * part.clients / source.train, 2)


def images_of(partition: Mapping[str, Any]) -> tuple[int, int]:
    """Labelled and unlabelled images of all clients."""
    labelled, unlabelled = (sum(map(sum, partition.get(kind, ()))) for kind in ("labelled", "unlabelled"))
    return labelled, unlabelled + sum(partition.get("unknown") or ())


def _place(e: Experiment) -> dict[str, Any]:
    """The columns that say what an experiment is."""
    return {
        "method": e.method,
        "title": methods.title(e.method),
        "dataset": e.dataset,
        "setting": e.partition.setting,
        "gamma": e.partition.gamma if e.partition.setting in DIRICHLET else "",
        "clients_per_round": e.clients_per_round,
        "seed": e.seed,
        "rounds": e.rounds,
        "metric": e.metric,
    }


def _scores(found: Mapping[str, Scores], metric: str) -> dict[str, Any]:
    """The columns of every metric, and of validation by the one that ranks."""
    row: dict[str, Any] = {"metric": metric}
    for name, one in found.items():
        values = (one.last10, one.last, one.ema_last10, one.ema_last)
        row |= {f"{name}_{which}": value for which, value in zip(EVALUATIONS, values, strict=True)}
    row |= validation(found[metric])
    return {name: _per_cent(value) if name in _SHARES else value for name, value in row.items()}


def _hardware(about: Mapping[str, Any]) -> str:
    return str(about.get("gpu") or "") or f"{about.get('cpu')}, {about.get('cores')} cores"


def _versions(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {about.get(name)}" for name in ("python", "torch", "numpy"))


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    empty: dict[str, Any] = dict.fromkeys(("study", "preset", "name", "options", "failed"), "")
    empty |= {"curve": [], "diagnostics": {}, "environment": {}}
    frame = pd.DataFrame([empty | row for row in rows], columns=list(COLUMNS))
    numbers = [*_SHARES, "bytes_up", "bytes_down", "local_steps", "seconds", "left_out"]
    return frame.astype(dict.fromkeys(numbers, float))


def _per_cent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _bytes(run: Run, way: str) -> float | None:
    """Bytes of a run in all its rounds; None where a round does not say."""
    told = [record.get("communication") or {} for record in run.metrics]
    return sum(sizes[way] for sizes in told) if told and all(way in sizes for sizes in told) else None
