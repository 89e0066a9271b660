"""Textbook twins of FixMatch (Sohn et al., 2020) and UDA (Xie et al., 2020) on one client."""

from torch import Tensor

from oracle.client import Client, Named, confident, cross_entropy


class FixMatch(Client):
    """CE on labelled images + λ · mean of the CE between confident hard pseudo labels and the strong view."""

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        mask = confident(on_weak, self.settings.threshold)
        unlabelled = mask * cross_entropy(on_weak.argmax(1), on_strong)
        self.descend(cross_entropy(y, on_x).mean() + self.settings.weight * unlabelled.mean())
        return {"mask": mask}


class UDA(Client):
    """The same with soft targets: p ∝ p^(1/T), the threshold still on p itself."""

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        mask = confident(on_weak, self.settings.threshold)
        sharpened = on_weak.softmax(1).detach() ** (1 / self.settings.temperature)
        targets = sharpened / sharpened.sum(1, keepdim=True)
        unlabelled = -mask * (targets * on_strong.log_softmax(1)).sum(1)
        self.descend(cross_entropy(y, on_x).mean() + self.settings.weight * unlabelled.mean())
        return {"mask": mask}
