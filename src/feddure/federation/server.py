"""Server optimisers and averaging of the global model (Reddi et al., 2021; Polyak averaging)."""

import torch
from torch import Tensor

from feddure.config import Server as Options

State = dict[str, Tensor]


def optimise(options: Options, before: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
    """The next global parameters from the old ones and the clients' mean; `state` holds the moments."""
    if options.optimizer == "mean":
        return mean, state
    change = mean - before
    first = options.beta1 * state.get("momentum", torch.zeros_like(before))
    if options.optimizer == "momentum":
        first = first + change
        return before + options.learning_rate * first, {"momentum": first}
    first = first + (1 - options.beta1) * change
    second = options.beta2 * state.get("square", torch.zeros_like(before)) + (1 - options.beta2) * change * change
    after = before + options.learning_rate * first / (second.sqrt() + options.epsilon)
    return after, {"momentum": first, "square": second}


def average(decay: float, averaged: Tensor, current: Tensor) -> Tensor:
    """Exponential average of the global model over rounds."""
    return decay * averaged + (1 - decay) * current
