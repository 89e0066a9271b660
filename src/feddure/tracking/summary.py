"""The numbers of a run: pure functions of its records, and how people write them.

Two values of a metric are reported, that of the last evaluation and the mean of the last ten. The best on the test
set is not: choosing the round by it would make the test set part of the training. Images set aside for validation may
choose it.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddure.tracking.metrics import TITLES, known
from feddure.tracking.records import Record, Run

LAST = 10
"""Evaluations in the mean that comparisons use."""

VALIDATION = ("validation_last10", "validation_ema", "validation_best", "test_best")
"""What tables say where images are set aside for validation."""

NOTHING = "–"

PRIVACY = "privacy of a client with all its images"


@dataclass(frozen=True)
class Scores:
    """A metric of a run: of the global model, of the averaged one (`ema`), on validation images; None is none yet."""

    last: float | None = None
    last10: float | None = None
    ema_last: float | None = None
    ema_last10: float | None = None
    validation_last: float | None = None
    validation_last10: float | None = None
    validation_ema: float | None = None  # last evaluation of the averaged model
    best_round: int | None = None  # by the metric on validation images
    validation_best: float | None = None
    best: float | None = None  # on the test set, at that round

    def known(self) -> dict[str, float]:
        """Its values by their names, without those that it has not."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers; None where it has none yet."""

    rounds: int
    evaluations: int
    local_steps: int
    mean_local_steps: float | None  # of a client in a round
    left_out: int
    seconds: float | None
    clients_per_second: float | None
    privacy: str | None = None
    metric: str = "accuracy"  # which ranks
    scores: dict[str, Scores] = field(default_factory=dict)  # of every metric

    @property
    def score(self) -> Scores:
        """The metric that ranks."""
        return self.scores[self.metric]

    @property
    def accuracy_last(self) -> float | None:
        return self.scores["accuracy"].last

    @property
    def accuracy_last10(self) -> float | None:
        return self.scores["accuracy"].last10

    @property
    def accuracy_ema_last(self) -> float | None:
        return self.scores["accuracy"].ema_last

    @property
    def accuracy_ema_last10(self) -> float | None:
        return self.scores["accuracy"].ema_last10

    def __str__(self) -> str:
        return f"{self.rounds:,} rounds, {TITLES[self.metric]} {percent(self.score.last10)} ({self.mean_of})"

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) for a table; the averaged model only where there is one."""
        name, score = TITLES[self.metric], self.score
        rows = [("rounds", f"{self.rounds:,}"), (f"{name}, last evaluation", percent(score.last))]
        rows += [(f"{name}, {self.mean_of}", percent(score.last10))] if self.evaluations != 1 else []
        if score.ema_last is not None:
            rows.append(("averaged model, last evaluation", percent(score.ema_last)))
            rows += [(f"averaged model, {self.mean_of}", percent(score.ema_last10))] if self.evaluations != 1 else []
        if score.best_round is not None:
            rows += [
                ("validation, last evaluation", percent(score.validation_last)),
                ("validation, averaged model", percent(score.validation_ema)),
                (f"validation, best (round {score.best_round:,})", percent(score.validation_best)),
                (f"test {name} in that round", percent(score.best)),
            ]
            rows = [row for row in rows if row[1] != NOTHING]
        for other, found in self.scores.items():
            if other != self.metric and found.last is not None:
                averaged = f", averaged model {percent(found.ema_last)}" if found.ema_last is not None else ""
                rows.append((f"{TITLES[other]}, last evaluation", percent(found.last) + averaged))
        if self.privacy is not None:
            rows.append((PRIVACY, self.privacy))
        return [
            *rows,
            ("local steps", f"{self.local_steps:,}"),
            ("local steps per client and round", number(self.mean_local_steps, 1)),
            ("clients left out", f"{self.left_out:,}"),
            ("time", duration(self.seconds)),
            ("clients per second", number(self.clients_per_second, 1)),
        ]

    @property
    def mean_of(self) -> str:
        """What `last10` is the mean of."""
        return mean_of(self.evaluations)


def mean_of(*counts: int) -> str:
    """What the mean of the last ten of so many evaluations is called, of one run or of several."""
    heading = mean_heading(counts)
    return f"mean of {heading}" if heading else "its only evaluation"


def mean_heading(counts: Iterable[int]) -> str:
    """The same at the head of a column; a young run has fewer than ten, and of a single one there is nothing to say."""
    found = set(counts) - {0}
    fewer = {count for count in found if count < LAST}
    if found == {1}:
        return ""
    return f"last {LAST}" if not fewer else f"all {found.pop()}" if len(found) == 1 else f"last {LAST} or fewer"


def summarise(metrics: Sequence[Record], timing: Sequence[Record] = (), metric: str = "accuracy") -> Summary:
    """The numbers of a run from its records, of which `metric` ranks."""
    steps = [step for record in metrics for step in record.get("steps", [])]
    seconds = math.fsum(record["seconds"] for record in timing) if timing else None
    clients = sum(record.get("clients", 0) for record in timing)
    return Summary(
        rounds=metrics[-1]["round"] if metrics else 0,
        evaluations=len(evaluations(metrics, "accuracy")),
        local_steps=sum(steps),
        mean_local_steps=sum(steps) / len(steps) if steps else None,
        left_out=sum(len(record.get("left_out", [])) for record in metrics),
        seconds=seconds,
        clients_per_second=clients / seconds if seconds else None,
        privacy=_privacy(metrics),
        metric=metric,
        scores={name: scores(metrics, name) for name in TITLES},
    )


def validation(found: Scores) -> dict[str, float | None]:
    """What tables say of validation, by their names."""
    values = (found.validation_last10, found.validation_ema, found.validation_best, found.best)
    return dict(zip(VALIDATION, values, strict=True))


def scores(metrics: Sequence[Record], name: str) -> Scores:
    """A metric of a run."""
    test, averaged = evaluations(metrics, name), evaluations(metrics, name, "test_ema")
    validation = evaluations(metrics, name, "validation")
    best = max(validation, key=lambda found: found[1], default=None) if name != "ece" else None
    return Scores(
        last=_last(test),
        last10=_mean_of_last(test),
        ema_last=_last(averaged),
        ema_last10=_mean_of_last(averaged),
        validation_last=_last(validation),
        validation_last10=_mean_of_last(validation),
        validation_ema=_last(evaluations(metrics, name, "validation_ema")),
        best_round=best[0] if best else None,
        validation_best=best[1] if best else None,
        best=dict(test).get(best[0]) if best else None,
    )


def evaluations(metrics: Iterable[Record], quantity: str, model: str = "test") -> list[tuple[int, Any]]:
    """(round, value) of an evaluated quantity of the global model, or of the averaged one (`test_ema`).

    Sites of a federation evaluate the model that they receive: such an evaluation names the round that made it.
    """
    found: list[tuple[int, Record]] = [(record["round"], record.get(model) or {}) for record in metrics]
    every = [(one.get("round", number), known(one, quantity)) for number, one in found]
    return [(number, value) for number, value in every if value is not None]


def display_name(name: str) -> str:
    """A method's, data set's or network's name as people write it; names of their own stay as they are."""
    from feddure import methods, nn  # and with them PyTorch
    from feddure.data.sources import sources

    titles = {source.name: source.title for source in sources()} | nn.TITLES
    return titles.get(name) or methods.title(name)


def model_to_use(run: Run, found: Summary) -> tuple[float, str] | None:
    """How good the model is that `export` and `predict` take, by the last evaluation, and what that is known by.

    There is none where sites train alone, nor without test images.
    """
    from scipy.stats import binomtest  # takes a second: only when it is needed

    from feddure import methods

    score, evaluated = found.score, [record for record in run.metrics if record.get("test")]
    averaged = score.ema_last is not None
    value, key = (score.ema_last, "test_ema") if averaged else (score.last, "test")
    confusion = ((evaluated[-1].get(key) or {}) if evaluated else {}).get("confusion")
    if value is None or not confusion or not methods.exchanges(run.experiment.method):
        return None
    of_classes = [sum(row) for row in confusion]
    total, most, right = sum(of_classes), max(of_classes), sum(row[place] for place, row in enumerate(confusion))
    if not total:
        return None
    note = f"{'averaged, ' if averaged else ''}round {evaluated[-1]['round']}; {total:,} images"
    if found.metric == "accuracy":
        low, high = binomtest(right, total).proportion_ci(method="wilson")
        note += f", 95 % interval {100 * low:.1f} to {100 * high:.1f}"
        if most * len(of_classes) > 1.2 * total:
            note += f"; {100 * most / total:.1f} for always the same answer"
    return value, note


def percent(share: float | None, digits: int = 2) -> str:
    """0.6690 as 66.90 %."""
    return NOTHING if share is None else f"{100 * share:.{digits}f}\u202f%"


def points(share: float | None) -> str:
    """0.6690 as 66.90, for tables that say per cent at their head."""
    return NOTHING if share is None else f"{100 * share:.2f}"


def number(value: float | None, digits: int) -> str:
    """1234.5 as 1,234.5."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign; what rounds to zero has none."""
    text = f"{value:+.{digits}f}"
    return (text[1:] if not text.strip("+-0.") else text).replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds as people write them: 8.2 s, 1:25 min, 2:03 h."""
    if seconds is None:
        return NOTHING
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02} min"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02} h"


def _privacy(metrics: Sequence[Record]) -> str | None:
    """What all rounds together tell about one client."""
    found = metrics[-1].get("privacy") if metrics else None
    if found is None:
        return None
    return "none: no noise" if found["epsilon"] is None else f"ε {found['epsilon']:.2f} at δ {found['delta']:g}"


def _last(values: list[tuple[int, Any]]) -> float | None:
    return values[-1][1] if values else None


def _mean_of_last(values: list[tuple[int, Any]]) -> float | None:
    return statistics.fmean(value for _, value in values[-LAST:]) if values else None
