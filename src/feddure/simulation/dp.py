"""Differential privacy: clipping, Gaussian noise, and an account of what they cost.

`private_mean` is DP-FedAvg (McMahan et al., 2018) on a server that clients trust. With client updates Δ_k,

    θ ← θ + (Σ_k Δ_k min(1, C / |Δ_k|) + N(0, (z C)² I)) / S

where S is the *expected* number of clients: the true one would tell who took part. The unit is a client with all its
images: two federations are neighbours where one has a client more, which moves the sum by at most C. Each client joins
a round with probability S / K by itself (`server.sampling: poisson`); this is what Opacus's accountant assumes.
"""

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from feddure import rng
from feddure.errors import ConfigError
from feddure.methods.base import Method, State

Spent = tuple[float, float, int]
"""A noise multiplier (standard deviation over sensitivity), the probability to take part, and how often."""
DELTA = 1e-5
"""The probability that ε may fail with, where nobody says; far below one over any number of clients here."""
# Opacus's own orders, and larger ones: without them no ε below 0.2 can be told.
_ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(12, 64), 64, 80, 96, 128, 192, 256, 384, 512]


def private_mean(
    before: Tensor, uploads: Sequence[Tensor], clip: float, noise: float, expected: int, trained: int, *key: rng.Key
) -> Tensor:
    """The next θ from the clients' own, of which only the first `trained` values can differ.

    The noise is a function of `key`, so whoever knows the key can remove it.
    """
    total = torch.zeros_like(before)
    for upload in uploads:
        change = upload - before
        total += change * (clip / change.norm().clamp(min=clip))
    drawn = torch.from_numpy(gaussian(rng.bits(before.numel(), *key, "dp noise"))).to(before)
    drawn[trained:] = 0
    return before + (total + noise * clip * drawn) / expected


def gaussian(bits: np.ndarray) -> np.ndarray:
    """Normal numbers from uniform 64-bit integers, one each."""
    from scipy.special import ndtri  # a tenth of a second: only when it is needed

    return ndtri(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)


def epsilon(spent: Sequence[Spent], delta: float = DELTA) -> float:
    """ε at δ of all that was spent together, as Opacus's RDP accountant has it; infinite where there was no noise."""
    if not spent:
        return 0.0
    if any(not noise for noise, _, _ in spent):
        return math.inf
    total = sum(times * _renyi(noise, rate) for noise, rate, times in spent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the first or last: the bound holds, if loosely
        found, _ = _analysis().get_privacy_spent(orders=_ORDERS, rdp=total, delta=delta)
    return max(0.0, float(found))


def noise_for(budget: float, delta: float, times: int) -> float:
    """The least noise multiplier, to a thousandth of the budget, with which so many uses cost no more than ε."""
    low, high = 0.0, 1.0
    while (found := epsilon([(high, 1.0, times)], delta)) > budget:
        low, high = high, 2 * high
        if high > 1e12:
            raise ConfigError(f"dp-budget {budget:g} at dp-delta {delta:g} is too small for any noise")
    while budget - found > budget / 1000:
        middle = (low + high) / 2
        if (there := epsilon([(middle, 1.0, times)], delta)) <= budget:
            high, found = middle, there
        else:
            low = middle
    return high


@lru_cache
def _renyi(noise: float, rate: float) -> np.ndarray:
    """Of one use, for each order."""
    return _analysis().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=_ORDERS)


def _analysis() -> ModuleType:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError:
        raise ConfigError(
            "the account of differential privacy needs the package 'opacus': pip install 'feddure[flower]'"
        ) from None
    return rdp


def check_method(method: Method, state: State) -> None:
    """Refuse what clients would send beside the update that is clipped and made private."""
    kind = type(method)
    if kind.upload is not Method.upload or kind.aggregate is not Method.aggregate:
        raise ConfigError(
            f"server.dp_clip covers the model's parameters, but method '{method.experiment.method}' sends other "
            "things too; use another method, such as fedavg-matched or fedtutor"
        )
    if state["statistics"].numel():
        raise ConfigError("server.dp_clip: batch-norm statistics cannot be made private; use norm=group")
