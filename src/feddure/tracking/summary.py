"""The numbers of a run: pure functions of its records, and how people write them.

Two accuracies are reported, that of the last evaluation and the mean of the last ten. The best on the test
set is not: choosing the round by its test accuracy would make the test set part of the training. Images set aside for
validation may choose it.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from feddure import methods, nn
from feddure.data.sources import sources
from feddure.tracking.records import Record

LAST = 10
"""Evaluations in the mean that comparisons use."""

VALIDATION = ("validation_last10", "validation_ema", "validation_best", "accuracy_best")
"""What a summary says where images are set aside for validation, under the names that tables have for it."""

NOTHING = "–"


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers; None where it has none yet."""

    rounds: int
    evaluations: int
    accuracy_last: float | None
    accuracy_last10: float | None
    accuracy_ema_last: float | None
    accuracy_ema_last10: float | None
    local_steps: int
    mean_local_steps: float | None  # of a client in a round
    left_out: int
    seconds: float | None
    clients_per_second: float | None
    validation_last: float | None = None
    validation_last10: float | None = None
    validation_ema: float | None = None  # last evaluation of the averaged model
    best_round: int | None = None  # by its accuracy on validation images
    validation_best: float | None = None
    accuracy_best: float | None = None  # on the test set, at that round

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) for a table; the averaged model only where there is one."""
        rows = [
            ("rounds", f"{self.rounds:,}"),
            ("accuracy, last evaluation", percent(self.accuracy_last)),
            (f"accuracy, {self.mean_of}", percent(self.accuracy_last10)),
        ]
        if self.accuracy_ema_last is not None:
            rows += [
                ("averaged model, last evaluation", percent(self.accuracy_ema_last)),
                (f"averaged model, {self.mean_of}", percent(self.accuracy_ema_last10)),
            ]
        if self.best_round is not None:
            rows += [
                ("validation, last evaluation", percent(self.validation_last)),
                ("validation, averaged model", percent(self.validation_ema)),
                (f"validation, best (round {self.best_round:,})", percent(self.validation_best)),
                ("test accuracy in that round", percent(self.accuracy_best)),
            ]
            rows = [row for row in rows if row[1] != NOTHING]
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
        """What `accuracy_last10` is the mean of."""
        return mean_of(self.evaluations)


def mean_of(count: int) -> str:
    """What the mean of the last ten of so many evaluations is called; a young run has fewer than ten."""
    if 0 < count < LAST:
        return "its only evaluation" if count == 1 else f"mean of all {count}"
    return f"mean of last {LAST}"


def summarise(metrics: Sequence[Record], timing: Sequence[Record] = ()) -> Summary:
    """The numbers of a run from its records."""
    accuracy, averaged = evaluations(metrics, "accuracy"), evaluations(metrics, "accuracy", "test_ema")
    validation = evaluations(metrics, "accuracy", "validation")
    best = max(validation, key=lambda found: found[1], default=None)
    steps = [step for record in metrics for step in record.get("steps", [])]
    seconds = math.fsum(record["seconds"] for record in timing) if timing else None
    clients = sum(record.get("clients", 0) for record in timing)
    return Summary(
        rounds=metrics[-1]["round"] if metrics else 0,
        evaluations=len(accuracy),
        accuracy_last=_last(accuracy),
        accuracy_last10=_mean_of_last(accuracy),
        accuracy_ema_last=_last(averaged),
        accuracy_ema_last10=_mean_of_last(averaged),
        local_steps=sum(steps),
        mean_local_steps=sum(steps) / len(steps) if steps else None,
        left_out=sum(len(record.get("left_out", [])) for record in metrics),
        seconds=seconds,
        clients_per_second=clients / seconds if seconds else None,
        validation_last=_last(validation),
        validation_last10=_mean_of_last(validation),
        validation_ema=_last(evaluations(metrics, "accuracy", "validation_ema")),
        best_round=best[0] if best else None,
        validation_best=best[1] if best else None,
        accuracy_best=dict(accuracy).get(best[0]) if best else None,
    )


def evaluations(metrics: Iterable[Record], quantity: str, model: str = "test") -> list[tuple[int, Any]]:
    """(round, value) of an evaluated quantity of the global model, or of the averaged one (`test_ema`).

    Sites of a federation evaluate the model that they receive: such an evaluation names the round that made it.
    """
    found: list[tuple[int, Record]] = [(record["round"], record.get(model) or {}) for record in metrics]
    return [(one.get("round", number), one[quantity]) for number, one in found if one.get(quantity) is not None]


def display_name(name: str) -> str:
    """A method's, data set's or network's name as people write it; names of their own stay as they are."""
    titles = {source.name: source.title for source in sources()} | nn.TITLES
    return titles.get(name) or methods.title(name)


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


def _last(values: list[tuple[int, Any]]) -> float | None:
    return values[-1][1] if values else None


def _mean_of_last(values: list[tuple[int, Any]]) -> float | None:
    return statistics.fmean(value for _, value in values[-LAST:]) if values else None
