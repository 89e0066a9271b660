"""ProxyFL's tuning on a GPU: thousands of small steps, one after the other, in one kernel that keeps the rows.

Launched step by step they would wait for each other, and for whatever else the GPU does, far longer than they take.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST = 2**15
"""Numbers that one block's registers hold."""


def fits(rows: Tensor) -> bool:
    """Whether the kernel can keep these rows."""
    classes, features = map(triton.next_power_of_2, rows.shape)
    return classes * features <= _MOST


def tune(rows: Tensor, uploaded: Tensor, margin: Tensor, orders: Tensor, rate: float, batch: int) -> Tensor:
    """What `proxyfl.tune` computes."""
    found, (epochs, number) = rows.contiguous().clone(), orders.shape
    constants = torch.stack([margin, torch.full_like(margin, rate)])
    sizes = [triton.next_power_of_2(size) for size in rows.shape]
    warps = min(max(sizes[0] * sizes[1] // 1024, 1), 16)
    _steps[(1,)](
        found, uploaded.contiguous(), orders.contiguous(), constants, epochs, number, *rows.shape, batch, *sizes,
        num_warps=warps,
    )  # fmt: skip
    return found


@triton.jit
def _steps(
    rows, uploaded, orders, constants, epochs, number, classes, features, batch, K: tl.constexpr, D: tl.constexpr
):
    k, d = tl.arange(0, K), tl.arange(0, D)
    inside = (k[:, None] < classes) & (d[None, :] < features)
    places = rows + k[:, None] * features + d[None, :]
    omegas = tl.load(places, mask=inside, other=0.0)
    margin, rate = tl.load(constants), tl.load(constants + 1)
    for epoch in range(epochs):
        for first in range(0, number, batch):
            size = tl.minimum(number - first, batch)
            gradient = tl.zeros_like(omegas)
            for place in range(size):
                which = tl.load(orders + epoch * number + first + place)
                one = tl.load(uploaded + which * features + d, mask=d < features, other=0.0)
                apart = one[None, :] - omegas
                distance = tl.sqrt(tl.sum(apart * apart, axis=1))
                target = (k == which % classes).to(omegas.dtype)
                logits = tl.where(k < classes, -(distance + margin * target), float("-inf"))
                p = tl.exp(logits - tl.max(logits, axis=0))
                pull = (p / tl.sum(p, axis=0) - target) / tl.maximum(distance, 1e-30)
                gradient += tl.where(k < classes, pull, 0.0)[:, None] * apart
            omegas -= rate / size * gradient
    tl.store(places, omegas, mask=inside)
