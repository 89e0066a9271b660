"""What pseudo labels were worth and what the regulators made of them, in numbers.

Few clients take part in a round, so rounds are noisy; tables speak of means over the last rounds.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from feddure.tracking.records import Record
from feddure.tracking.summary import NOTHING, number, points

LAST_ROUNDS = 20
"""Rounds that tables take their means over."""

TRAINING = ("loss", "loss_unlabelled", "d")
"""Quantities of a round's training that are shown here."""

Trace = dict[str, np.ndarray]
"""A run's quantities by name, a value a round, NaN in rounds without; a quantity without any value is left out."""

# From this many hundredths on, an AUROC is called so.
_JUDGEMENTS = {
    90: "very well",
    80: "well",
    70: "fairly well",
    60: "a little",
    53: "hardly",
    48: "not at all",
    40: "slightly the wrong way round",
    0: "the wrong way round",
}


def trace(metrics: Sequence[Record]) -> Trace:
    """What a run recorded about its pseudo labels, the mean of its clients' own AUROCs, and levels to compare with."""
    rows = []
    for record in metrics:
        row = (record.get("diagnostics") or {}) | {name: (record.get("train") or {}).get(name) for name in TRAINING}
        own = [client.get("weight_auroc") for client in row.get("clients") or ()]
        own = [value for value in own if value is not None]
        rows.append(row | {"auroc_within": float(np.mean(own)) if own else None})
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    found = {name: np.array([row.get(name) for row in rows], dtype=float) for name in names}
    found["round"] = np.array([record["round"] for record in metrics], dtype=float)
    percentiles = [name for name in found if name.startswith("weight_p")]
    if percentiles and np.isin([found[name] for name in percentiles], (0, 1)).mean() > 0.5:
        # Weights of a threshold: 0 or 1, so their mean says all.
        found = {name: values for name, values in found.items() if name not in percentiles}
        if "weight_auroc" in found:
            best = best_of_threshold(found["weight_mean"], found["pseudo_accuracy"])
            found["auroc_best"] = np.where(np.isfinite(found["weight_auroc"]), best, np.nan)
    classes = per_class(metrics, "coverage_per_class").shape[1]
    if classes:
        found |= {"chance": np.full(len(rows), 1 / classes), "cannot_tell": np.full(len(rows), 0.5)}
    # Far below every d, the level of ascent would only flatten the curve.
    if "d_lowest" in found:
        reach = found.get("reach", np.ones(len(rows)))
        level = -found["weight_mean"] / np.where(reach > 0, reach, np.nan)
        if np.isfinite(level).any() and np.nanmin(found["d_lowest"]) < np.nanmax(level):
            found["ascent_below"] = level
    return found


def per_class(metrics: Sequence[Record], name: str) -> np.ndarray:
    """A quantity of each class [rounds, classes], NaN where it has no value."""
    rows = [(record.get("diagnostics") or {}).get(name) or [] for record in metrics]
    size = max(map(len, rows), default=0)
    return np.array([row if len(row) == size else [None] * size for row in rows], dtype=float).reshape(len(rows), size)


def known_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is not NaN; NaN where nothing is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)


def best_of_threshold(passing: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The highest AUROC of weights 0 and 1, when these shares of the pseudo labels weigh 1 and are right."""
    right = np.clip(right, 1e-9, 1 - 1e-9)
    return 1 - np.maximum((right - passing) / right, (passing - right) / (1 - right)) / 2


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over a tenth of the run around each round, five rounds at least, cut off at its ends."""
    half = max(2, len(values) // 20)
    return np.array([known_mean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))])


def last_means(found: Trace) -> dict[str, float]:
    """Mean of each quantity in the last rounds, where it has one there."""
    means = {name: float(known_mean(values[-LAST_ROUNDS:])) for name, values in found.items()}
    return {name: value for name, value in means.items() if np.isfinite(value)}


def judged(auroc: float) -> str:
    """How well weights with this AUROC separate right from wrong, going by the two digits that are shown."""
    return next(word for least, word in _JUDGEMENTS.items() if round(100 * auroc) >= least)


def table(runs: Mapping[str, Sequence[Record]]) -> tuple[list[str], dict[str, list[str]]]:
    """Column names and, for each run with pseudo labels, its means of the last rounds; shares are in per cent."""
    rows = {}
    for label, metrics in runs.items():
        mean = last_means(trace(metrics))
        if "weight_mean" in mean:
            in_per_cent = ("pseudo_accuracy", "pseudo_accuracy_weighted", "ascent_share")
            shares = [points(mean.get(name)) for name in in_per_cent]
            numbers = [number(mean.get(name), 2) for name in ("weight_mean", "weight_auroc", "auroc_within")]
            reward = _signed(mean["d_mean"]) if "d_mean" in mean else NOTHING
            rows[label] = [*shares, reward, *numbers, _verdict(mean) if "weight_auroc" in mean else NOTHING]
    return ["right", "weighted", "ascent", "mean d", "mean m", "AUROC", "within clients", "m tells them apart"], rows


def class_names(classes: Sequence[str], size: int) -> list[str]:
    """Names of so many classes; numbers where they are not known."""
    return list(classes) if len(classes) == size else [f"class {place}" for place in range(size)]


def _verdict(mean: Mapping[str, float]) -> str:
    """A threshold that few pass cannot be far from 0.5, so it is measured by what it could reach."""
    return f"{mean['auroc_best']:.2f} at best" if "auroc_best" in mean else judged(mean["weight_auroc"])


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
