"""What a comparison says: a row for each method, and its difference from the reference, seed by seed."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.studies.compare import PAIRED_FILE, TABLE_FILE, Plan
from feddure.studies.grid.failures import Problem
from feddure.tracking.records import Run
from feddure.tracking.summary import NOTHING, Summary, duration, number, points, summarise

CONFIDENCE = 0.95
ACCURACIES = ("last10", "last")
"""The mean of the last ten evaluations, which comparisons use, and the last round."""

_SAME = 1e-12  # accuracies that differ by less differ by rounding


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; one seed has no deviation."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Row:
    """A method over its seeds; what differs between seeds is their mean."""

    method: str
    seeds: tuple[int, ...]
    rounds: int
    steps_per_round: float
    steps_per_client: float  # and round
    last: Spread
    last10: Spread
    mean_of: str  # what last10 is the mean of, as a short run has fewer than ten evaluations
    bytes_down: float | None
    bytes_up: float | None
    seconds: float | None
    shared_by: int  # methods and seeds whose training these seconds include


@dataclass(frozen=True)
class Pair:
    """How much more accurate a method is than the reference on the same seeds."""

    method: str
    against: str
    accuracy: str  # one of ACCURACIES
    seeds: int
    difference: float
    low: float | None = None  # of the interval; None where the seeds cannot give one
    high: float | None = None

    @property
    def verdict(self) -> str:
        """What the seeds can tell, in words."""
        if self.seeds < 2:
            return "one seed cannot tell"
        if self.low is None or self.high is None:
            return "no difference" if abs(self.difference) < _SAME else "equal on all seeds: more seeds are needed"
        if self.low <= 0 <= self.high:
            return "no difference can be told"
        ends = sorted(abs(100 * end) for end in (self.low, self.high))
        return f"{'better' if self.low > 0 else 'worse'} by {ends[0]:.1f} to {ends[1]:.1f} points"


def rows(plan: Plan, runs: Sequence[Run]) -> list[Row]:
    """The methods of a comparison in the plan's order."""
    return [_row(method, [run for run in runs if run.experiment.method == method]) for method in plan.methods]


def pairs(plan: Plan, runs: Sequence[Run]) -> list[Pair]:
    """Each method beside the reference, by both accuracies; nothing where the reference is not there."""
    if plan.against not in plan.methods:
        return []
    found = {(run.experiment.method, run.experiment.seed): summarise(run.metrics) for run in runs}
    compared = []
    for method in plan.methods:
        if method == plan.against:
            continue
        for accuracy in ACCURACIES:
            mine = [_accuracy(found[method, seed], accuracy) for seed in plan.seeds]
            reference = [_accuracy(found[plan.against, seed], accuracy) for seed in plan.seeds]
            difference, low, high = paired(mine, reference)
            compared.append(Pair(method, plan.against, accuracy, len(plan.seeds), difference, low, high))
    return compared


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of the differences and the ends of its 95 % interval by Student's t.

    There is no interval for a single pair, nor for differences that are all the same: two seeds that happen to agree
    would make an interval without width out of nothing.
    """
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2 or max(differences) - min(differences) < _SAME:
        return mean, None, None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * error
    return mean, mean - half, mean + half


def method_cells(rows: Sequence[Row], failed: Mapping[str, Problem]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells, as people read them, methods that have failed last; accuracies in per cent."""
    columns = ["method", "seeds", "rounds", "steps", "last", "last 10", "sent", "time"]
    lines = [
        [
            row.method,
            f"{len(row.seeds)}",
            f"{row.rounds:,}",
            number(row.steps_per_client, 1),
            _with_deviation(row.last),
            _with_deviation(row.last10),
            _size(row.bytes_down, row.bytes_up),
            duration(row.seconds),
        ]
        for row in rows
    ]
    vain = ["failed" if column == "last" else NOTHING for column in columns[1:]]
    return columns, lines + [[method, *vain] for method in failed]


def pair_cells(pairs: Sequence[Pair]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of the differences by the accuracy that comparisons use."""
    columns = ["method", "difference", "95 % interval", "verdict"]
    return columns, [
        [
            pair.method,
            _points(pair.difference),
            NOTHING if pair.low is None or pair.high is None else f"{_points(pair.low)} to {_points(pair.high)}",
            pair.verdict,
        ]
        for pair in pairs
        if pair.accuracy == "last10"
    ]


def explain_methods(rows: Sequence[Row], against: str, failed: Mapping[str, Problem]) -> str:
    """What the columns of `method_cells` are, and why methods have `failed`; `against` is the reference."""
    spread = " ± standard deviation over seeds" if len(rows[0].seeds) > 1 else ""
    shared = max(row.shared_by for row in rows)
    time = "each run's own" if shared == 1 else f"that of {shared} runs, which share the lanes"
    vain = [f"{method} failed: {problem.reason}." for method, problem in failed.items()]
    if against in failed:
        vain.append("It was the reference: no difference from it can be told.")
    return " ".join(
        [
            f"Test accuracy in %{spread}: last round, and {rows[0].mean_of}. Steps: local ones per client and round. "
            f"Sent: by server and clients in one run. Time: {time}.",
            *vain,
        ]
    )


def explain_pairs(plan: Plan, against: str) -> str:
    """What the columns of `pair_cells` are; `against` is the reference's name."""
    if len(plan.seeds) == 1:
        interval = "One seed gives no interval: any of these differences may be chance"
    else:
        interval = f"Each has its own 95 % interval, by Student's t over {len(plan.seeds)} seeds"
    return f"Points of accuracy (last 10) beyond {against} on the same seeds. {interval}."


def write(folder: Path, rows: Sequence[Row], pairs: Sequence[Pair], failed: Mapping[str, Problem]) -> None:
    """comparison.csv and paired.csv; accuracies are shares of 1, bytes and seconds those of a run.

    Methods that have `failed` have a line with the reason and no number.
    """
    methods: dict[str, list[Any]] = {
        "method": [row.method for row in rows],
        "seeds": [" ".join(map(str, row.seeds)) for row in rows],
        "rounds": [row.rounds for row in rows],
        "local_steps_per_round": [_rounded(row.steps_per_round) for row in rows],
        "local_steps_per_client_and_round": [_rounded(row.steps_per_client) for row in rows],
        "accuracy_last_mean": [_rounded(row.last.mean) for row in rows],
        "accuracy_last_sd": [_rounded(row.last.deviation) for row in rows],
        "accuracy_last10_mean": [_rounded(row.last10.mean) for row in rows],
        "accuracy_last10_sd": [_rounded(row.last10.deviation) for row in rows],
        "bytes_down": [_rounded(row.bytes_down, 0) for row in rows],
        "bytes_up": [_rounded(row.bytes_up, 0) for row in rows],
        "seconds": [_rounded(row.seconds, 2) for row in rows],
        "seconds_are_of": ["this run" if row.shared_by == 1 else f"{row.shared_by} runs together" for row in rows],
        "failed": ["" for _ in rows],
    }
    for method, problem in failed.items():
        for name, column in methods.items():
            column.append({"method": method, "failed": problem.reason}.get(name, ""))
    differences = {
        "method": [pair.method for pair in pairs],
        "against": [pair.against for pair in pairs],
        "accuracy": [pair.accuracy for pair in pairs],
        "seeds": [pair.seeds for pair in pairs],
        "difference_mean": [_rounded(pair.difference) for pair in pairs],
        "interval_low": [_rounded(pair.low) for pair in pairs],
        "interval_high": [_rounded(pair.high) for pair in pairs],
        "verdict": [pair.verdict for pair in pairs],
    }
    for name, columns in ((TABLE_FILE, methods), (PAIRED_FILE, differences)):
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(columns)
        lines.writerows(zip(*columns.values(), strict=True))
        write_whole(folder / name, text.getvalue().encode(), RunError)


def _row(method: str, runs: Sequence[Run]) -> Row:
    summaries = [summarise(run.metrics, run.timing) for run in runs]
    rounds = runs[0].rounds
    seconds = [found.seconds for found in summaries if found.seconds is not None]
    return Row(
        method=method,
        seeds=tuple(run.experiment.seed for run in runs),
        rounds=rounds,
        steps_per_round=statistics.fmean(found.local_steps for found in summaries) / rounds,
        steps_per_client=statistics.fmean(found.mean_local_steps or 0.0 for found in summaries),
        last=_spread([_accuracy(found, "last") for found in summaries]),
        last10=_spread([_accuracy(found, "last10") for found in summaries]),
        mean_of=summaries[0].mean_of + " evaluations" * (summaries[0].evaluations > 1),
        bytes_down=_bytes(runs, "down"),
        bytes_up=_bytes(runs, "up"),
        seconds=statistics.fmean(seconds) if seconds else None,
        shared_by=max((record.get("shared_by", 1) for run in runs for record in run.timing), default=1),
    )


def _accuracy(found: Summary, accuracy: str) -> float:
    value = getattr(found, f"accuracy_{accuracy}")
    assert value is not None, "a finished run is evaluated after its last round"
    return value


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _bytes(runs: Sequence[Run], way: str) -> float | None:
    """Bytes of a run in all its rounds; None where a round does not say."""
    told = [record.get("communication") or {} for run in runs for record in run.metrics]
    return sum(sizes[way] for sizes in told) / len(runs) if all(way in sizes for sizes in told) else None


def _rounded(value: float | None, digits: int = 6) -> float | int | str:
    if value is None:
        return ""
    return round(value, digits) if digits else round(value)


def _with_deviation(spread: Spread) -> str:
    if spread.deviation is None:
        return points(spread.mean)
    return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}"  # more digits would be lost in the spread


def _points(share: float) -> str:
    return f"{100 * share:+.2f}".replace("-", "−")


def _size(down: float | None, up: float | None) -> str:
    if down is None or up is None:
        return NOTHING
    size, unit = down + up, 0
    while size >= 999.5 and unit < 4:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
