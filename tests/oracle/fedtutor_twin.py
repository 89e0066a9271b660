"""Textbook twin of FedTutor on one client: a frozen module in evaluation mode labels, softly or not."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oracle.client import Client, Named, Settings, cross_entropy
from oracle.proxyfl_twin import contrast


@dataclass(frozen=True)
class Lesson:
    """FedTutor's switches."""

    targets: str = "soft"
    threshold: float = 0.95
    weight: float = 1.0
    on: str = "unlabelled"
    calibrate: str = "none"
    strength: float = 1.0
    contrast: float = 0.0
    view: str = "strong"


class FedTutor(Client):
    """`counts` are the client's labelled images of each class, `views` all its weak views of the round."""

    def __init__(
        self, received: nn.Module, settings: Settings, lesson: Lesson, tutor: nn.Module, counts: Tensor, views: Tensor
    ):
        super().__init__(received, settings)
        self.lesson = lesson
        self.tutor = copy.deepcopy(tutor).eval()
        shares = (counts + 1) / (counts.sum() + len(counts))
        self.prior_l = lesson.strength * shares.log() if lesson.calibrate != "none" else torch.zeros_like(shares)
        self.prior_u = torch.zeros_like(shares)
        if lesson.calibrate == "both":
            self.prior_u = lesson.strength * (self.ask(views).mean(0) + 1e-3).log()

    @torch.no_grad()
    def ask(self, images: Tensor) -> Tensor:
        return self.tutor(images).softmax(1)

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        seen = weak if self.lesson.view == "weak" else strong
        if self.lesson.contrast:
            h = nn.Sequential(*list(self.theta.network)[:-1])(torch.cat([x, seen]))
            on_x, on_u = self.theta.network[-1](h).split([len(x), len(seen)])
        else:
            on_x, on_u = self.predict(x, seen)
        loss = cross_entropy(y, on_x + self.prior_l).mean()
        if self.lesson.on != "unlabelled":
            loss = loss + self.lesson.weight * self.lessons(self.ask(x), on_x + self.prior_l).mean()
        if self.lesson.on != "labelled":
            loss = loss + self.lesson.weight * self.lessons(self.ask(weak), on_u + self.prior_u).mean()
        if self.lesson.contrast:
            loss = loss + self.lesson.contrast * self.apart(h, y, self.ask(weak))
        self.descend(loss)
        return {}

    def apart(self, h: Tensor, y: Tensor, q: Tensor) -> Tensor:
        """ProxyFL's loss of the unlabelled images; h are the features of x and of them."""
        z = [row / row.norm() for row in self.theta.feature(h)]
        proxies = [row / row.norm() for row in self.theta.proxy(self.theta.network[-1].weight)]
        classes = [*torch.eye(q.shape[1], dtype=q.dtype)[y], *q]
        uniform = torch.full_like(q[0], 1 / q.shape[1])
        sure = [bool(one.max() >= self.lesson.threshold) for one in classes]
        return torch.stack(contrast(z, proxies, classes, sure, uniform)[len(y) :]).mean()

    def lessons(self, q: Tensor, logits: Tensor) -> Tensor:
        """The loss of each image, one after the other."""
        found = []
        for target, row in zip(q, logits, strict=True):
            soft = -(target * row.log_softmax(0)).sum()
            hard = -row.log_softmax(0)[target.argmax()]
            sure = target.max() >= self.lesson.threshold
            if self.lesson.targets == "soft" or (self.lesson.targets == "mixed" and not sure):
                found.append(soft)
            else:
                found.append(hard if sure else 0 * hard)
        return torch.stack(found)
