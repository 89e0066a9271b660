"""The metrics of an evaluation: their names, and how they follow from counts.

A class without test images is left out of every mean over classes: nothing is known of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

TITLES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "ece": "calibration error",
}
"""Every metric that is one number, a share of 1, as people write it. All but ECE are better where higher, and may rank
(`config.Metric`); a model that knows nothing can be calibrated."""

BINS = 15
"""Of confidence, equally wide, for calibration."""


def from_confusion(confusion: Sequence[Sequence[int]] | np.ndarray) -> dict[str, Any]:
    """What counts say (row: true class, column: predicted); `per_class` is each class's sensitivity, also its recall.

    None is what no image tells of.
    """
    counts = np.asarray(confusion, dtype=np.int64)
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    total, seen = int(counts.sum()), true > 0
    sensitivity = right / np.maximum(true, 1)
    f1 = 2 * right / np.maximum(true + predicted, 1)
    others = total - true
    correctly_not = others - (predicted - right)
    return {
        "accuracy": int(right.sum()) / max(total, 1),
        "per_class": sensitivity.tolist(),
        "balanced_accuracy": float(sensitivity[seen].mean()) if total else None,
        "macro_f1": float(f1[seen].mean()) if total else None,
        "specificity": [int(c) / int(n) if n else None for c, n in zip(correctly_not, others, strict=True)],
        "confusion": counts.tolist(),
    }


def from_bins(images: np.ndarray, confidence: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Calibration from each bin's images, their summed confidence, and how many of them were right.

    ECE (Guo et al., 2017) is |accuracy − confidence| of each bin, weighted by its images.
    """
    total, filled = float(images.sum()), np.maximum(images, 1)
    return {
        "ece": _finite(np.abs(right - confidence).sum() / max(total, 1)),
        "calibration": {
            "images": images.astype(np.int64).tolist(),
            "confidence": [_finite(value) for value in confidence / filled],
            "accuracy": (right / filled).tolist(),
        },
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known: neither None nor NaN."""
    known = [value for value in values if value is not None and value == value]
    return float(np.mean(known)) if known else None


def known(evaluation: Mapping[str, Any], name: str) -> Any:
    """A quantity of an evaluation, None where it has none; runs of earlier versions tell some by their confusion."""
    if name not in evaluation and name in ("balanced_accuracy", "macro_f1", "specificity"):
        confusion = evaluation.get("confusion")
        # The sum of several clients' confusions is not the mean of their metrics.
        return from_confusion(confusion)[name] if confusion and "by_client" not in evaluation else None
    return evaluation.get(name)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
