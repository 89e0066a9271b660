"""A model on the whole test set, or on images set aside for validation."""

import numpy as np
import torch
from torch import Tensor

from feddure.data.batches import DeviceImages
from feddure.nn.network import Network


def evaluate(
    network: Network,
    theta: Tensor,
    statistics: Tensor,
    images: DeviceImages,
    classes: int,
    index: np.ndarray | None = None,
) -> dict:
    """Accuracy, loss, accuracy per class and confusion counts (row: true class, column: predicted).

    On the test images, or on the training images in `index`.
    """
    size = 2500 if images.device.type == "cuda" else 500
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=images.device)
    loss = torch.zeros((), dtype=torch.float64, device=images.device)
    run = network.evaluator(theta, statistics)
    for pixels, labels in images.test_batches(size) if index is None else images.training_batches(index, size):
        logits = run(pixels)
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").double()
        confusion += torch.bincount(labels * classes + logits.argmax(1), minlength=classes * classes)
    counts = confusion.view(classes, classes).cpu()
    total = max(int(counts.sum()), 1)
    per_class = counts.diagonal().double() / counts.sum(1).clamp(min=1)
    return {
        "accuracy": counts.diagonal().sum().item() / total,
        "loss": loss.item() / total,
        "per_class": per_class.tolist(),
        "confusion": counts.tolist(),
    }
