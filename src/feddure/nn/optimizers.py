"""Clients' optimisers on one flat vector, equal to `torch.optim.Adam` and `torch.optim.SGD`.

Step counts and rates are tensors, so that a captured graph counts on and follows a schedule, and a reset is one fill.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from feddure.config import OptimizerOptions
from feddure.nn.flat import Pieces

Fuse = Callable[[Callable[..., None]], Callable[..., None]]


class Optimizer:
    """What all share: a rate on the device, the clipping of gradients, and one step for all pieces of a gradient."""

    def __init__(self, like: Tensor, options: OptimizerOptions, fuse: Fuse = lambda function: function):
        self.options = options
        self.rate = torch.zeros((), dtype=like.dtype, device=like.device)
        self.set_rate(options.learning_rate)
        self.count = torch.zeros_like(self.rate)
        self._fuse = fuse

    def set_rate(self, rate: float) -> None:
        """Go on with this rate, or with the largest that the parameters' arithmetic has."""
        self.rate.fill_(min(rate, torch.finfo(self.rate.dtype).max))

    def reset(self) -> None:
        """Forget everything but the rate, in place."""
        self.count.zero_()

    def step(self, parameters: Tensor, gradient: Pieces) -> None:
        """One step of `parameters`, in place."""
        with torch.no_grad():
            self.count.add_(1)
            for place, values in self._clipped(gradient):
                self._update(parameters, place, values)

    def _update(self, parameters: Tensor, place: slice, gradient: Tensor) -> None:
        raise NotImplementedError

    def _clipped(self, gradient: Pieces) -> Pieces:
        """The gradient, shortened to `clip_norm` where it is longer (`torch.nn.utils.clip_grad_norm_`)."""
        limit = self.options.clip_norm
        if limit is None:
            return gradient
        norms = [torch.linalg.vector_norm(values.to(self.rate.dtype)) for _, values in gradient]
        factor = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        return [(place, values.to(self.rate.dtype) * factor) for place, values in gradient]


class Adam(Optimizer):
    """Kingma & Ba, 2015; weight decay as an L2 penalty."""

    def __init__(self, like: Tensor, options: OptimizerOptions, fuse: Fuse = lambda function: function):
        super().__init__(like, options, fuse)
        self.mean = torch.zeros_like(like)
        self.square = torch.zeros_like(like)

    def reset(self) -> None:
        super().reset()
        self.mean.zero_()
        self.square.zero_()

    def _update(self, parameters: Tensor, place: slice, gradient: Tensor) -> None:
        o = self.options
        moments = self.mean[place], self.square[place]
        constants = (o.beta1, o.beta2, o.epsilon, o.weight_decay)
        self._fuse(_adam)(parameters[place], gradient, *moments, self.count, self.rate, *constants)


class SGD(Optimizer):
    """Gradient descent with (Nesterov) momentum and weight decay, as PyTorch writes it."""

    def __init__(self, like: Tensor, options: OptimizerOptions, fuse: Fuse = lambda function: function):
        super().__init__(like, options, fuse)
        self.velocity = torch.zeros_like(like) if options.momentum else like.new_zeros(0)

    def reset(self) -> None:
        super().reset()
        self.velocity.zero_()

    def _update(self, parameters: Tensor, place: slice, gradient: Tensor) -> None:
        o = self.options
        velocity = self.velocity[place] if o.momentum else self.velocity
        self._fuse(_sgd)(parameters[place], gradient, velocity, self.rate, o.momentum, o.nesterov, o.weight_decay)


def make(options: OptimizerOptions, like: Tensor, fuse: Fuse = lambda function: function) -> Optimizer:
    """A fresh optimiser for a flat vector like this one; `fuse` compiles its arithmetic."""
    return (Adam if options.name == "adam" else SGD)(like, options, fuse)


def scheduled_rate(options: OptimizerOptions, round_number: int, rounds: int) -> float:
    """The learning rate of a round, counted from 1: a linear warm-up, then constant or a cosine down to 0."""
    rate = options.learning_rate
    if round_number <= options.warm_up:
        return rate * round_number / (options.warm_up + 1)
    if options.schedule == "constant":
        return rate
    done = (round_number - 1 - options.warm_up) / max(1, rounds - options.warm_up)
    return rate * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _adam(
    parameters: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    gradient = gradient.to(parameters.dtype)
    if decay:
        gradient = gradient + decay * parameters
    mean.copy_(beta1 * mean + (1 - beta1) * gradient)
    square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
    bias1 = 1 - beta1**count
    bias2 = 1 - beta2**count
    parameters.sub_(rate / bias1 * mean / ((square / bias2).sqrt() + epsilon))


def _sgd(
    parameters: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    rate: Tensor,
    momentum: float,
    nesterov: bool,
    decay: float,
) -> None:
    gradient = gradient.to(parameters.dtype)
    if decay:
        gradient = gradient + decay * parameters
    if momentum:
        velocity.copy_(momentum * velocity + gradient)  # PyTorch's first step takes the gradient itself: the same
        gradient = gradient + momentum * velocity if nesterov else velocity
    parameters.sub_(rate * gradient)
