"""F-reg, the fine-grained regulator: a small perceptron that weighs each unlabelled image.

Linear(classes → 128), ReLU, Linear(128 → 1), sigmoid: 1,537 parameters at 10 classes, as pure functions of one flat
vector.
"""

import math

import numpy as np
import torch
from torch import Tensor

from feddure import rng

HIDDEN = 128


def size(classes: int) -> int:
    """Number of parameters."""
    return HIDDEN * classes + HIDDEN + HIDDEN + 1


def initial(classes: int, *key: rng.Key) -> np.ndarray:
    """Fresh parameters, uniform in ±1/√fan-in as PyTorch's linear layers start."""
    uniform = rng.bits(size(classes), *key) / 2.0**64 * 2 - 1
    first = HIDDEN * (classes + 1)
    return uniform * np.where(np.arange(size(classes)) < first, 1 / math.sqrt(classes), 1 / math.sqrt(HIDDEN))


def weigh(w: Tensor, inputs: Tensor) -> Tensor:
    """f_w: one weight in (0, 1) for each row of `inputs`."""
    matrix, bias, row, last = _layers(w, inputs.shape[1])
    return torch.sigmoid(torch.relu(inputs @ matrix.T + bias) @ row + last)


def weigh_along(w: Tensor, inputs: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """f_w and its derivative when `inputs` move along `change`."""
    matrix, bias, row, last = _layers(w, inputs.shape[1])
    hidden = inputs @ matrix.T + bias
    weight = torch.sigmoid(torch.relu(hidden) @ row + last)
    return weight, weight * (1 - weight) * ((hidden > 0) * (change @ matrix.T) @ row)


def _layers(w: Tensor, classes: int) -> tuple[Tensor, ...]:
    matrix, bias, row, last = w.split([HIDDEN * classes, HIDDEN, HIDDEN, 1])
    return matrix.view(HIDDEN, classes), bias, row, last
