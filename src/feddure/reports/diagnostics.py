"""What pseudo labels were worth and what the regulators made of them, in numbers.

Few clients take part in a round, so rounds are noisy; tables speak of means over the last rounds.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from feddure.tracking.records import Record
from feddure.tracking.summary import NOTHING, number, points, signed

LAST_ROUNDS = 20
"""Rounds that tables take their means over."""

LAST_PROBES = 10
"""Looks at clients before aggregation that means are taken over."""

TRAINING = ("loss", "loss_unlabelled", "d")
"""Quantities of a round's training that are shown here."""


def numbers(metrics: Sequence[Record], group: str) -> pd.DataFrame:
    """The numbers in a group of the records by round, NaN in rounds without; what never has one is left out."""
    groups = [record.get(group) or {} for record in metrics]
    rows = [{name: value for name, value in found.items() if isinstance(value, int | float)} for found in groups]
    return pd.DataFrame(rows, index=[record["round"] for record in metrics], dtype=float)


def trace(metrics: Sequence[Record]) -> pd.DataFrame:
    """What a run recorded about its pseudo labels, the mean of its clients' own AUROCs, and levels to compare with."""
    found = numbers(metrics, "diagnostics").assign(**numbers(metrics, "train").filter(items=TRAINING))
    clients = [(record.get("diagnostics") or {}).get("clients") or () for record in metrics]
    own = [pd.Series([client.get("weight_auroc") for client in each], dtype=float).mean() for each in clients]
    if np.isfinite(own).any():
        found["auroc_within"] = own
    percentiles = found.filter(like="weight_p")
    if percentiles.size and percentiles.isin((0, 1)).to_numpy().mean() > 0.5:
        # Weights of a threshold: 0 or 1, so their mean says all.
        found = found.drop(columns=percentiles.columns)
        if {"weight_auroc", "weight_mean", "pseudo_accuracy"} <= set(found):
            best = best_of_threshold(found["weight_mean"].to_numpy(), found["pseudo_accuracy"].to_numpy())
            found["auroc_best"] = np.where(found["weight_auroc"].notna(), best, np.nan)
    classes = per_class(metrics, "coverage_per_class").shape[1]
    if classes:
        found = found.assign(chance=1 / classes, cannot_tell=0.5)
    # Far below every d, the level of ascent would only flatten the curve.
    if {"d_lowest", "weight_mean"} <= set(found):
        reach = found["reach"] if "reach" in found else pd.Series(1.0, found.index)
        level = -found["weight_mean"] / reach.where(reach > 0)
        if found["d_lowest"].min() < level.max():
            found["ascent_below"] = level
    return found


def per_class(metrics: Sequence[Record], name: str) -> pd.DataFrame:
    """A quantity of each class by round, NaN where it has no value."""
    rows = [dict(enumerate((record.get("diagnostics") or {}).get(name) or ())) for record in metrics]
    return pd.DataFrame(rows, index=[record["round"] for record in metrics], dtype=float)


def best_of_threshold(passing: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The highest AUROC of weights 0 and 1, when these shares of the pseudo labels weigh 1 and are right."""
    right = np.clip(right, 1e-9, 1 - 1e-9)
    return 1 - np.maximum((right - passing) / right, (passing - right) / (1 - right)) / 2


def running_mean(values: pd.Series) -> pd.Series:
    """Mean over a tenth of the run around each round, five rounds at least, cut off at its ends."""
    return values.rolling(2 * max(2, len(values) // 20) + 1, center=True, min_periods=1).mean()


def last_means(found: pd.DataFrame) -> dict[str, float]:
    """Mean of each quantity in the last rounds, where it has one there."""
    return {str(name): mean for name, mean in found.tail(LAST_ROUNDS).mean().dropna().items()}


def probes(metrics: Sequence[Record]) -> pd.DataFrame:
    """What a run's probes found, by round; nothing where there were none."""
    return numbers(metrics, "probe").dropna(how="all")


def probe_means(metrics: Sequence[Record]) -> dict[str, float]:
    """Mean of each quantity over the last probes."""
    return {f"probe_{name}": mean for name, mean in probes(metrics).tail(LAST_PROBES).mean().dropna().items()}


def table(runs: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """For each run with pseudo labels its means of the last rounds, where any run has one; shares are in per cent."""
    rows = []
    for label, metrics in runs.items():
        mean = last_means(trace(metrics))
        if "weight_mean" in mean:
            rows.append(
                {
                    "run": label,
                    "right": points(mean.get("pseudo_accuracy")),
                    "weighted": points(mean.get("pseudo_accuracy_weighted")),
                    "ascent": points(mean.get("ascent_share")),
                    "mean d": signed(mean["d_mean"], 3) if "d_mean" in mean else NOTHING,
                    "mean weight": number(mean["weight_mean"], 2),
                    "AUROC": number(mean.get("weight_auroc"), 2),
                    "within clients": number(mean.get("auroc_within"), 2),
                    "threshold at best": number(mean.get("auroc_best"), 2),  # few that pass cannot be far from 0.5
                }
            )
    found = pd.DataFrame(rows)
    return found.loc[:, (found != NOTHING).any()]


def class_names(classes: Sequence[str], size: int) -> list[str]:
    """Names of so many classes; numbers where they are not known."""
    return list(classes[:size]) if len(classes) >= size else [f"class {place}" for place in range(size)]
