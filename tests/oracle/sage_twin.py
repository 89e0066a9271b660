"""Textbook twin of SAGE (Liu et al., CVPR 2025) on one client, image by image."""

import torch
from torch import Tensor, nn

from oracle.client import Client, Named, Settings, cross_entropy


class SAGE(Client):
    def __init__(self, received: nn.Module, settings: Settings, half_life: float):
        super().__init__(received, settings)
        self.half_life = half_life

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        with torch.no_grad():
            q = self.received.eval()(weak).softmax(1)
        tau, total, counted = self.settings.threshold, 0, []
        for p_i, q_i, row in zip(on_weak.detach().softmax(1), q, on_strong, strict=True):
            own, theirs = -row.log_softmax(0)[p_i.argmax()], -row.log_softmax(0)[q_i.argmax()]
            share = 0.5 ** (abs(p_i.max() - q_i.max()) / self.half_life) if p_i.max() >= tau else 0.0
            counts = bool(p_i.max() >= tau or q_i.max() >= tau)
            total = total + counts * (share * own + (1 - share) * theirs)
            counted.append(float(counts))
        self.descend(cross_entropy(y, on_x).mean() + self.settings.weight * total / len(on_strong))
        return {"mask": torch.tensor(counted, dtype=on_x.dtype)}
