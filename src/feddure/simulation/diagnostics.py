"""What the pseudo labels of a round were worth, what the regulators made of them, and how far clients drifted.

A simulation knows the true classes of unlabelled images; methods never see them, diagnostics do.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddure.data.dataset import UNKNOWN
from feddure.nn.network import Network
from feddure.simulation.evaluate import reliability
from feddure.tracking import metrics

Arrays = dict[str, np.ndarray]
Model = tuple[Tensor, Tensor]
"""θ and its batch-norm statistics."""


def diagnose(clients: Sequence[Arrays], truths: Sequence[np.ndarray], classes: int) -> dict[str, Any]:
    """A round's diagnostics, over all its steps, and the main ones of each client.

    Each client gives `weight` and `pseudo` [steps, batch] and, where its method has them, `d`, `loss`,
    `loss_unlabelled` and `reach`, the share of the images that d acts on [steps]. Clients without unlabelled
    images or pseudo labels do not count.
    """
    found = [
        (arrays, truth)
        for arrays, truth in zip(clients, truths, strict=True)
        if truth.size and _has(arrays, "weight", truth.shape) and _has(arrays, "pseudo", truth.shape)
    ]
    if not found:
        return {}
    weight = np.concatenate([arrays["weight"].ravel() for arrays, _ in found])
    pseudo = np.concatenate([arrays["pseudo"].ravel() for arrays, _ in found]).astype(np.int64)
    truth = np.concatenate([truth.ravel() for _, truth in found])
    low, middle, high = np.percentile(weight, [10, 50, 90])
    result: dict[str, Any] = {
        "weight_mean": float(weight.mean()),
        "weight_p10": float(low),
        "weight_p50": float(middle),
        "weight_p90": float(high),
    }
    known = truth != UNKNOWN
    right = pseudo == truth
    if known.any():
        of_class = [known & (truth == number) for number in range(classes)]
        result |= {
            "pseudo_accuracy": float(right[known].mean()),
            "pseudo_accuracy_weighted": _share(weight[known], right[known]),
            "weight_auroc": auroc(weight[known], right[known]),
            "pseudo_accuracy_per_class": [_mean(right[mask]) for mask in of_class],
            "coverage_per_class": [_mean(weight[mask]) for mask in of_class],
        }
    if all(_has(arrays, "d", truth.shape[:1]) for arrays, truth in found):
        d = np.concatenate([arrays["d"] for arrays, _ in found])
        steps = np.concatenate([arrays["weight"].mean(1) for arrays, _ in found])
        reach = np.concatenate([arrays.get("reach", np.ones(len(truth))) for arrays, truth in found])
        result |= {
            "d_mean": float(d.mean()),
            "d_lowest": float(d.min()),
            "d_highest": float(d.max()),
            "ascent_share": float((steps + reach * d < 0).mean()),
        }
        if any("reach" in arrays for arrays, _ in found):
            result["reach"] = float(reach.mean())
    result["clients"] = [_of_client(arrays, truth) for arrays, truth in found]
    return result


def auroc(score: np.ndarray, positive: np.ndarray) -> float | None:
    """Chance that a positive scores above a negative, ties counting half; None when one kind is missing."""
    wins = int(positive.sum())
    losses = len(positive) - wins
    if not wins or not losses:
        return None
    if np.isnan(score).any():
        return math.nan
    ordered = np.sort(score)  # scipy.stats has ranks too, and takes half a second of every start to import
    ranks = (np.searchsorted(ordered, score) + np.searchsorted(ordered, score, "right") + 1) / 2
    return float((ranks[positive].sum() - wins * (wins + 1) / 2) / (wins * losses))


def probe_labels(
    network: Network, labellers: Mapping[str, Sequence[Model]], images: Sequence[Tensor], truths: Sequence[Tensor]
) -> dict[str, float | None]:
    """How good each labeller's labels of the clients' images are; it has a model for each client.

    Images of unknown class are left out.
    """
    known = [truth != UNKNOWN for truth in truths]
    truth = torch.cat([truth[mask] for truth, mask in zip(truths, known, strict=True)])
    found: dict[str, float | None] = {}
    for name, models in labellers.items() if len(truth) else ():
        triples = zip(models, images, known, strict=True)
        logits = torch.cat([network.evaluate_many(*model, views[mask]) for model, views, mask in triples])
        confidence, label = logits.double().softmax(1).max(1)
        right = label == truth
        found[f"{name}_accuracy"] = right.double().mean().item()
        found[f"{name}_confidence"] = confidence.mean().item()
        bins = reliability(confidence, right).cpu().numpy()
        found[f"{name}_calibration_error"] = metrics.from_bins(*bins)["ece"]
    return found


def probe_drift(start: Tensor, ends: Sequence[Tensor]) -> dict[str, float | None]:
    """How far clients moved from the model they received, relative to its length, and how much in one direction."""
    moves = torch.stack(list(ends)).double() - start.double()
    directions, pairs = F.normalize(moves, dim=1), len(moves) * (len(moves) - 1)
    cosines = (directions @ directions.T).fill_diagonal_(0)
    return {
        "drift": (moves.norm(dim=1).mean() / start.double().norm()).item(),
        "cosine": cosines.sum().item() / pairs if pairs else None,
    }


def _of_client(arrays: Arrays, truth: np.ndarray) -> dict[str, float | None]:
    known = truth != UNKNOWN
    right = (arrays["pseudo"].astype(np.int64) == truth)[known]
    per_step = [name for name in ("loss", "loss_unlabelled", "d") if _has(arrays, name, truth.shape[:1])]
    return {
        "weight": _mean(arrays["weight"]),
        "pseudo_accuracy": _mean(right),
        "weight_auroc": auroc(arrays["weight"][known], right),
        **{name: _mean(arrays[name]) for name in per_step},
    }


def _has(arrays: Arrays, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a quantity was recorded in this shape; a method of one's own may mean something else by the name."""
    return name in arrays and arrays[name].shape == shape


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


def _share(weight: np.ndarray, right: np.ndarray) -> float | None:
    total = weight.sum()
    return float((weight * right).sum() / total) if total > 0 else None
