"""A model on the whole test set, or on images set aside for validation.

`evaluate` leaves what it finds on the device, as one vector of numbers, and waits for nothing. `to_record` reads it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddure.data.batches import DeviceImages
from feddure.nn.network import Network
from feddure.tracking import metrics
from feddure.tracking.metrics import BINS

_MOST_SCORES = 2**23  # that are sorted at once; many classes are taken in parts


def evaluate(
    network: Network,
    theta: Tensor,
    statistics: Tensor,
    images: DeviceImages,
    classes: int,
    index: np.ndarray | None = None,
) -> Tensor:
    """Loss, confusion, calibration and each class's AUROC on the test images, or on the training images in `index`.

    One float64 vector, on the device, for `to_record`; the counts in it are exact. Where test images are sites' own it
    has how many each site has, and how many of them are right, too.
    """
    size = 2500 if images.device.type == "cuda" else network.piece
    loss = torch.zeros(1, dtype=torch.float64, device=images.device)
    run = network.evaluator(theta, statistics)
    every_logits, every_label = [], []
    for pixels, labels in images.test_batches(size) if index is None else images.training_batches(index, size):
        logits = run(pixels)
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").double()
        every_logits.append(logits.to(torch.float64, copy=True))
        every_label.append(labels)
    scores, labels = torch.cat(every_logits), torch.cat(every_label)
    predicted = scores.argmax(1)
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=images.device)
    confusion.scatter_add_(0, labels * classes + predicted, torch.ones_like(labels))
    scores, right = scores.softmax(1), predicted == labels
    found = [loss, confusion.double(), reliability(scores.amax(1), right).flatten(), auroc(scores, labels)]
    if index is None and images.test_site is not None:
        tallies = torch.zeros(2, 1 + images.sites, dtype=torch.int64, device=images.device)  # first: no site's own
        tallies.scatter_add_(
            1, (images.test_site + 1).expand(2, -1), torch.stack([torch.ones_like(labels), right.long()])
        )
        found.append(tallies[:, 1:].flatten().double())
    return torch.cat(found)


def to_record(found: Tensor, classes: int, sites: Sequence[str] = ()) -> dict[str, Any]:
    """What an evaluation found, as a record has it; copies it from its device where it is still there.

    Confusion counts have a row for each true class and a column for each prediction; AUROC is the mean over classes,
    each against the rest.
    """
    sizes = [1, classes**2, 3 * BINS, classes]
    loss, confusion, bins, ranks, tallies = np.split(found.cpu().numpy(), np.cumsum(sizes))
    counts = metrics.from_confusion(confusion.astype(np.int64).reshape(classes, classes))
    return {
        "accuracy": counts["accuracy"],
        "loss": float(loss[0]) / max(int(confusion.sum()), 1),
        **counts,
        "auroc": metrics.mean(ranks.tolist()),
        **metrics.from_bins(*bins.reshape(3, BINS)),
        **({"by_site": _by_site(sites, *tallies.reshape(2, -1).tolist())} if len(tallies) else {}),
    }


def _by_site(sites: Sequence[str], images: Sequence[float], right: Sequence[float]) -> dict[str, dict[str, float]]:
    """Sites that have test images of their own: how many, and the model's accuracy on them."""
    found = zip(sites, images, right, strict=True)
    return {site: {"images": int(count), "accuracy": hits / count} for site, count, hits in found if count}


def reliability(confidence: Tensor, right: Tensor) -> Tensor:
    """For each bin of confidence its images, their summed confidence, and how many of them are right: [3, bins]."""
    numbers = (confidence.nan_to_num() * BINS).long().clamp(max=BINS - 1)
    inside = (numbers[:, None] == torch.arange(BINS, device=confidence.device)).double()
    each = torch.stack([torch.ones_like(confidence), confidence, right.double()])
    return (each[:, :, None] * inside).sum(1)


def auroc(scores: Tensor, labels: Tensor) -> Tensor:
    """For each class, how often an image of it scores higher than one of another class; ties count half.

    NaN where all images are of the class, or none, or where scores are not finite.
    """
    images, classes = scores.shape
    found = []
    for part in torch.arange(classes, device=scores.device).split(max(1, _MOST_SCORES // max(images, 1))):
        columns = scores[:, part].T.contiguous()
        ordered = columns.sort(dim=1).values
        below = torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)  # twice
        own = labels == part[:, None]
        count = own.sum(1).double()
        wins = ((below * own).sum(1).double() - count * count) / 2  # without those over images of the same class
        share = wins / (count * (images - count))
        found.append(torch.where(columns.isfinite().all(1), share, torch.nan))
    return torch.cat(found)
