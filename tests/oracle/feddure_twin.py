"""The textbook twin of FedDure (Bai et al., AAAI 2024) and of its ablations on one client.

θ is the local model, φ the coarse-grained regulator C-reg (a second copy of the network), w the fine-grained
regulator F-reg (a small perceptron). Equation numbers are the paper's.
"""

import copy

import torch
from torch import Tensor, nn

from oracle.client import (
    Client,
    Named,
    Settings,
    adam_step,
    confident,
    cross_entropy,
    probe,
    trained,
    virtual_step,
)


def new_f_reg(classes: int) -> nn.Sequential:
    """f_w: one fully connected layer with 128 units, and a sigmoid over their weighted sum."""
    return nn.Sequential(nn.Linear(classes, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())


class Regulated(Client):
    """The parts that FedDure and its ablations are put together from."""

    f_reg: nn.Module

    def weigh(self, f_reg: nn.Module, logits: Tensor) -> Tensor:
        """f_w of each sample's prediction."""
        return f_reg(logits.softmax(1) if self.settings.f_reg_input == "softmax" else logits).squeeze(1)

    def weights_in_u(self, f_reg: nn.Module, logits: Tensor) -> Tensor:
        """H(w; φ), by which φ's own loss on an unlabelled image is multiplied."""
        return self.weigh(f_reg, logits.detach() if self.settings.h_gradient == "detached" else logits)

    def weighted_loss(
        self, f_reg: nn.Module, model: nn.Module, parameters: Named, strong: Tensor, pseudo: Tensor
    ) -> Tensor:
        """U = E_u H(w; φ) L_ce(ŷ, f(T_s(u); φ))."""
        logits = self.pass_of_regulator(model, parameters, strong)
        return (self.weights_in_u(f_reg, logits) * cross_entropy(pseudo, logits)).mean()

    def labelled_loss(self, model: nn.Module, parameters: Named, x: Tensor, y: Tensor) -> Tensor:
        """E_{x,y} L_ce(y, f(x; φ))."""
        return cross_entropy(y, self.pass_of_regulator(model, parameters, x)).mean()

    def pass_of_regulator(self, model: nn.Module, parameters: Named, images: Tensor) -> Tensor:
        """Every pass but θ's own uses its batch's statistics alone."""
        return probe(model, parameters, images)

    def train_f_reg(
        self,
        f_reg: nn.Module,
        adam: torch.optim.Adam,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        strong: Tensor,
        pseudo: Tensor,
    ) -> None:
        """Eqs. 4 and 5: a virtual step of `model`, then w moves to where that step helps labelled images."""
        parameters = trained(model)
        loss = self.weighted_loss(f_reg, model, parameters, strong, pseudo)
        moved = virtual_step(parameters, loss, self.settings.learning_rate)  # Eq. 4: φ⁻(w)
        adam_step(adam, self.labelled_loss(model, moved, x, y))  # Eq. 5: w_new

    def sample_weights(self, on_strong: Tensor) -> Tensor:
        """Eq. 6: m_i, fixed numbers."""
        return self.weigh(self.f_reg, on_strong).detach()

    def reward(self, before: Tensor, after: Tensor) -> Tensor:
        """Eq. 3: d, by how much φ's step lowered its loss on labelled images."""
        sign = {"fall": 1, "rise": -1}[self.settings.reward]
        d = sign * (before - after).detach()
        bound = self.settings.d_clip
        return d if bound is None else d.clamp(-bound, bound)


class FedDure(Regulated):
    """Both regulators."""

    def __init__(self, received: nn.Module, settings: Settings, f_reg: nn.Module):
        super().__init__(received, settings)
        self.phi = copy.deepcopy(received)
        self.phi_adam = self.new_adam(trained(self.phi).values())
        self.f_reg = copy.deepcopy(f_reg)
        self.f_reg_adam = self.new_adam(self.f_reg.parameters())

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        pseudo = on_weak.argmax(1)  # Eq. 1
        self.train_f_reg(self.f_reg, self.f_reg_adam, self.phi, x, y, strong, pseudo)  # Eqs. 4, 5
        d = self.train_c_reg(x, y, strong, pseudo)  # Eqs. 2, 3
        m = self.sample_weights(on_strong)  # Eq. 6
        ce = cross_entropy(pseudo, on_strong)
        g_u = (m * ce).mean()  # Eq. 7
        g_d = d * ce.mean()  # Eq. 8
        g_s = cross_entropy(y, on_x).mean()  # Eq. 9
        self.descend(g_s + g_u + g_d)  # Eq. 10
        return {"d": d, "m": m}

    def train_c_reg(self, x: Tensor, y: Tensor, strong: Tensor, pseudo: Tensor) -> Tensor:
        """Eq. 2: one step of φ under w_new; returns d."""
        parameters = trained(self.phi)
        before = self.labelled_loss(self.phi, parameters, x, y)
        adam_step(self.phi_adam, self.weighted_loss(self.f_reg, self.phi, parameters, strong, pseudo))
        return self.reward(before, self.labelled_loss(self.phi, parameters, x, y))


class TaughtFedDure(FedDure):
    """Pseudo labels of a frozen teacher: soft in θ's losses, its classes for the regulators."""

    teacher: nn.Module

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_strong = self.predict(x, strong)
        with torch.no_grad():
            q = self.teacher.eval()(weak).softmax(1)
        self.train_f_reg(self.f_reg, self.f_reg_adam, self.phi, x, y, strong, q.argmax(1))
        d = self.train_c_reg(x, y, strong, q.argmax(1))
        m = self.sample_weights(on_strong)
        ce = -(q * on_strong.log_softmax(1)).sum(1)
        self.descend(cross_entropy(y, on_x).mean() + (m * ce).mean() + d * ce.mean())
        return {"d": d, "m": m}


class FReg(Regulated):
    """F-reg alone: no φ and no g_d; the virtual step is taken from θ itself."""

    def __init__(self, received: nn.Module, settings: Settings, f_reg: nn.Module):
        super().__init__(received, settings)
        self.f_reg = copy.deepcopy(f_reg)
        self.f_reg_adam = self.new_adam(self.f_reg.parameters())

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        pseudo = on_weak.argmax(1)
        self.update_f_reg(x, y, strong, pseudo)
        m = self.sample_weights(on_strong)
        self.descend(cross_entropy(y, on_x).mean() + (m * cross_entropy(pseudo, on_strong)).mean())
        return {"m": m}

    def update_f_reg(self, x: Tensor, y: Tensor, strong: Tensor, pseudo: Tensor) -> None:
        self.train_f_reg(self.f_reg, self.f_reg_adam, self.theta, x, y, strong, pseudo)


class AvgFReg(FReg):
    """F-reg is the server's mean w̄, fixed in the round; a copy learns by Eq. 5, only to be sent."""

    def __init__(self, received: nn.Module, settings: Settings, mean_f_reg: nn.Module):
        super().__init__(received, settings, mean_f_reg)
        self.sent = copy.deepcopy(mean_f_reg)
        self.sent_adam = self.new_adam(self.sent.parameters())

    def update_f_reg(self, x: Tensor, y: Tensor, strong: Tensor, pseudo: Tensor) -> None:
        self.train_f_reg(self.sent, self.sent_adam, self.theta, x, y, strong, pseudo)


class CReg(Regulated):
    """C-reg alone: a confidence mask takes the place of F-reg, as H and as m, and where asked to it filters g_d too."""

    def __init__(self, received: nn.Module, settings: Settings):
        super().__init__(received, settings)
        self.phi = copy.deepcopy(received)
        self.phi_adam = self.new_adam(trained(self.phi).values())

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        pseudo = on_weak.argmax(1)
        mask = confident(on_weak, self.settings.threshold)
        d = self.train_c_reg(mask, x, y, strong, pseudo)
        ce = cross_entropy(pseudo, on_strong)
        g_u = (mask * ce).mean()
        g_d = {"all": ce.mean(), "confident": g_u}[self.settings.reward_on]
        self.descend(cross_entropy(y, on_x).mean() + g_u + d * g_d)
        return {"d": d, "m": mask}

    def train_c_reg(self, mask: Tensor, x: Tensor, y: Tensor, strong: Tensor, pseudo: Tensor) -> Tensor:
        parameters = trained(self.phi)
        before = self.labelled_loss(self.phi, parameters, x, y)
        self.masked_step(self.phi, self.phi_adam, mask, strong, pseudo)
        return self.reward(before, self.labelled_loss(self.phi, parameters, x, y))

    def masked_step(self, phi: nn.Module, adam: torch.optim.Adam, mask: Tensor, strong: Tensor, pseudo: Tensor) -> None:
        """Eq. 2 with the mask as H."""
        logits = self.pass_of_regulator(phi, trained(phi), strong)
        adam_step(adam, (mask * cross_entropy(pseudo, logits)).mean())


class AvgCReg(CReg):
    """Each step asks what one step from the server's mean φ̄ would do; a copy learns on, only to be sent."""

    def __init__(self, received: nn.Module, settings: Settings, mean_phi: nn.Module):
        super().__init__(received, settings)
        self.mean_phi = mean_phi
        self.sent = copy.deepcopy(mean_phi)
        self.sent_adam = self.new_adam(trained(self.sent).values())

    def train_c_reg(self, mask: Tensor, x: Tensor, y: Tensor, strong: Tensor, pseudo: Tensor) -> Tensor:
        self.masked_step(self.sent, self.sent_adam, mask, strong, pseudo)
        self.phi = copy.deepcopy(self.mean_phi)
        self.phi_adam = self.new_adam(trained(self.phi).values())
        return super().train_c_reg(mask, x, y, strong, pseudo)


class MAML(Regulated):
    """The baseline of Table 2 with a meta gradient: L_s(θ − η ∇L_u(θ)) + L_s(θ) + L_u(θ), L_u of FixMatch."""

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        pseudo, mask = on_weak.argmax(1), confident(on_weak, self.settings.threshold)

        def unlabelled_loss(logits: Tensor) -> Tensor:
            return self.settings.weight * (mask * cross_entropy(pseudo, logits)).mean()

        parameters = trained(self.theta)
        inner = unlabelled_loss(self.pass_of_regulator(self.theta, parameters, strong))
        moved = virtual_step(parameters, inner, self.settings.learning_rate)
        if self.settings.maml_order == 1:  # the virtual step's own derivative is left out
            moved = {name: p + (moved[name] - p).detach() for name, p in parameters.items()}
        meta = self.labelled_loss(self.theta, moved, x, y)
        self.descend(meta + cross_entropy(y, on_x).mean() + unlabelled_loss(on_strong))
        return {"mask": mask}


class RunningMean:
    """What the server of the avg- ablations keeps: the mean of all uploads so far, or where they start from."""

    def __init__(self, start: Tensor):
        self.start = start
        self.total = torch.zeros_like(start)
        self.count = 0

    def add(self, upload: Tensor) -> None:
        self.total = self.total + upload
        self.count += 1

    def value(self) -> Tensor:
        return self.total / self.count if self.count else self.start
