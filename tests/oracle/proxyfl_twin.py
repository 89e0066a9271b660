"""Textbook twin of ProxyFL (Chen & Wang, CVPR 2026), image by image: one client, and the server's part."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracle.client import Client, Named, Settings, cross_entropy


class Model(nn.Module):
    """A network that ends in its classifier, with ProxyFL's two heads."""

    def __init__(self, network: nn.Sequential, feature: nn.Linear, proxy: nn.Linear):
        super().__init__()
        self.network, self.feature, self.proxy = network, feature, proxy

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)


def contrast(
    z: Sequence[Tensor], proxies: Sequence[Tensor], q: Sequence[Tensor], counted: Sequence[bool], prior: Tensor
) -> list[Tensor]:
    """Each image against its proxies and all images that share no class with it."""

    def candidates(q: Tensor, counts: bool) -> set[int]:
        if counts:
            return {int(q.argmax())}
        return {c for c in range(len(q)) if q[c] > prior[c]}

    losses = []
    for z_i, q_i, counts in zip(z, q, counted, strict=True):
        mine = candidates(q_i, counts)
        share = {int(q_i.argmax()): 1.0} if counts else {c: q_i[c] for c in mine}
        positive = sum(weight * (z_i @ proxies[c]) for c, weight in share.items())
        others = [z_i @ z_j for z_j, *other in zip(z, q, counted, strict=True) if not mine & candidates(*other)]
        negatives = [similarity for similarity in others if similarity >= 1e-6]
        losses.append(-torch.stack([positive, *negatives]).log_softmax(0)[0])
    return losses


class ProxyFL(Client):
    def __init__(self, received: Model, settings: Settings, prior: Tensor):
        super().__init__(received, settings)
        self.prior = prior
        self.seen: list[list[int]] = []  # classes that counted, step by step

    def sure(self, q: Tensor) -> bool:
        return bool(q.max() >= self.settings.threshold)

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        h = nn.Sequential(*list(self.theta.network)[:-1])(torch.cat([x, weak, strong]))
        on_x, on_weak, on_strong = self.theta.network[-1](h).split([len(x), len(weak), len(strong)])
        with torch.no_grad():
            q_x, q = (self.received.eval()(images).softmax(1) for images in (x, weak))
        loss, counted = cross_entropy(y, on_x).mean(), []
        self.seen.append(y.tolist())
        for p_i, q_i, row in zip(on_weak.detach().softmax(1), q, on_strong, strict=True):
            counted.append(self.sure(p_i) or self.sure(q_i))
            if counted[-1]:
                self.seen[-1].append(int(q_i.argmax()))
                loss = loss - row.log_softmax(0)[q_i.argmax()] / len(q)
        z = [row / row.norm() for row in self.theta.feature(h)]
        proxies = [row / row.norm() for row in self.theta.proxy(self.theta.network[-1].weight)]
        each = [*map(self.sure, q_x), *counted, *counted]
        apart = contrast(z, proxies, [*q_x, *q, *q], each, self.prior)[len(x) :]
        self.descend(loss + sum(apart) / len(apart))
        return {"mask": torch.tensor(counted, dtype=on_x.dtype)}

    def count_classes(self, steps: int) -> Tensor:
        """Of the last steps: labels, and the global model's classes of images that counted."""
        every = [c for seen in self.seen[-steps:] for c in seen]
        return torch.tensor([float(every.count(c)) for c in range(len(self.prior))], dtype=self.prior.dtype)


def tune(mean: Tensor, uploaded: Sequence[Tensor], orders: Sequence[Sequence[int]], rate: float, most: float) -> Tensor:
    """The server's rows after epochs over all uploaded rows in these orders."""
    nearest = [min((a - b).norm() for k, b in enumerate(mean) if k != c) for c, a in enumerate(mean)]
    margin = min(max(nearest).item(), most)
    samples = [(row, c) for rows in uploaded for c, row in enumerate(rows)]
    rows = nn.Parameter(mean.clone())
    sgd = torch.optim.SGD([rows], lr=rate)
    for order in orders:
        for batch in torch.as_tensor(order).split(4):
            omega = torch.stack([samples[i][0] for i in batch])
            classes = torch.tensor([samples[i][1] for i in batch])
            distance = (omega.unsqueeze(1) - rows).norm(dim=2)
            sgd.zero_grad()
            F.cross_entropy(-(distance + margin * F.one_hot(classes, len(rows)).double()), classes).backward()
            sgd.step()
    return rows.detach()
