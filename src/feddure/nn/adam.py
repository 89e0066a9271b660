"""Adam on one flat vector (Kingma & Ba, 2015), equal to `torch.optim.Adam`.

The step count is a tensor, so that a captured graph counts on, and a reset is one fill.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from feddure.nn.flat import Pieces


def _update(
    parameters: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    gradient = gradient.to(parameters.dtype)
    mean.copy_(beta1 * mean + (1 - beta1) * gradient)
    square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
    bias1 = 1 - beta1**count
    bias2 = 1 - beta2**count
    parameters.sub_(learning_rate / bias1 * mean / ((square / bias2).sqrt() + epsilon))


class Adam:
    """Moments and step count of one optimiser."""

    def __init__(
        self, like: Tensor, learning_rate: float, beta1: float, beta2: float, epsilon: float, compiled: bool = False
    ):
        self.mean = torch.zeros_like(like)
        self.square = torch.zeros_like(like)
        self.count = torch.zeros((), dtype=like.dtype, device=like.device)
        self._constants = (learning_rate, beta1, beta2, epsilon)
        self._update = _compiled_update() if compiled else _update

    def reset(self) -> None:
        """Forget everything, in place."""
        self.mean.zero_()
        self.square.zero_()
        self.count.zero_()

    def step(self, parameters: Tensor, gradient: Pieces) -> None:
        """One step of `parameters`, in place."""
        with torch.no_grad():
            self.count.add_(1)
            for part, values in gradient:
                moments = self.mean[part], self.square[part]
                self._update(parameters[part], values, *moments, self.count, *self._constants)


@cache
def _compiled_update() -> Callable[..., None]:
    return torch.compile(_update, dynamic=False)
