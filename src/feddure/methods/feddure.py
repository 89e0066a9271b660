"""FedDure: federated semi-supervised learning with dual regulators (Bai et al., AAAI 2024).

θ is the local model, φ the coarse-grained regulator C-reg (the same network), w the fine-grained regulator
F-reg. Equation numbers are the paper's. One local step on labelled (x, y) and unlabelled u:

    ŷ = argmax f(T_w(u); θ)                                                              (1)
    φ⁻ = φ − η ∇_φ U(φ, w),   U(φ, w) = mean_i H_i CE(ŷ_i, z_i),   H_i = f_w(z_i)        (4)
    w ← w − η ∇_w L_s(φ⁻(w))                                                             (5)
    φ_new = φ − η ∇_φ U(φ, w)                                                            (2)
    d = L_s(φ) − L_s(φ_new)                                                              (3)
    m_i = f_w(f(T_s(u_i); θ))                                                            (6)
    θ ← θ − η (∇L_s + mean_i m_i ∇CE_i + d · mean_i ∇CE_i)                               (7-10)

with z_i = f(T_s(u_i); φ). Every descent is Adam, but (4), which is plain. The gradient of (5) is exact without
second-order backpropagation through the network: with v = ∇L_s(φ⁻) and ż the derivative of z along v (one
forward-mode pass), ∂L_s/∂w = −η ∂/∂w U̇, where U̇ is the derivative of U as z moves along ż.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from feddure.config import Experiment
from feddure.data.batches import Batch, Needs
from feddure.methods import base
from feddure.methods.base import Client, State, cross_entropy, mean, record
from feddure.methods.teacher import Source, WithTeacher, soft_cross_entropy
from feddure.nn import regulator
from feddure.nn.network import Weights


class Options(base.Options):
    """Switches of FedDure and its ablations."""

    h_gradient: Literal["full", "detached"] = Field(
        "full", description="Whether C-reg's gradient flows through the weights H, as Eq. 4 says."
    )
    f_reg_input: Literal["softmax", "logits"] = Field("softmax", description="What F-reg reads.")
    f_reg_memory: Literal["none", "client"] = Field(
        "none", description="F-reg is fresh each round, or kept per client between its rounds."
    )
    reward: Literal["fall", "rise"] = Field(
        "fall",
        description="d is how far C-reg's labelled loss falls in its step (Eq. 3), or rises, as in the released code.",
    )
    d_clip: float | None = Field(None, gt=0, description="Bound on the absolute value of C-reg's reward d.")
    maml_order: Literal[1, 2] = Field(2, description="Order of the meta gradient of baseline+maml.")
    threshold: float = Field(0.95, ge=0, le=1, description="Confidence threshold of the ablations that need one.")
    reward_on: Literal["all", "confident"] = Field(
        "all", description="Unlabelled images that d acts on in c-reg and avg-c-reg: all, or those above the threshold."
    )
    pseudo: Source = Field(
        "local", description="Who makes pseudo labels; those of the global model or its average are soft for θ."
    )


class FedDure(WithTeacher):
    """Both regulators."""

    name = "feddure"
    title = "FedDure"
    section = "feddure"
    Options = Options
    passes = 2.6
    needs = Needs(weak=True, strong=True)
    owns_f_reg = True  # a client's F-reg is its own, not the server's

    def __init__(self, experiment: Experiment):
        super().__init__(experiment)
        if self.options.f_reg_memory == "client" and self.owns_f_reg:
            self.memory = ("w",)

    # --- a client's round ----------------------------------------------------------------------------
    def allocate(self, client: Client) -> None:
        client.state["phi"] = torch.zeros_like(client.theta)
        client.optimizers["phi"] = client.new_optimizer(client.theta[: client.network.parameters.trained])
        allocate_f_reg(client)

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        client.state["phi"].copy_(received["theta"])
        start_f_reg(client, received)

    def step(self, client: Client, batch: Batch) -> State:
        labelled, weak, strong = self.views(client, batch)
        pseudo = weak.argmax(1)  # (1)
        d = self.regulate(client, batch, pseudo)
        m = regulator.weigh(self.judge(client), self.reads(strong.detach()))  # (6)
        losses = self.losses(strong, weak, pseudo)
        supervised = mean(cross_entropy(labelled, batch.labels))
        loss = supervised + mean(m * losses)
        client.descend(loss if d is None else loss + d * mean(losses))  # (7-10)
        return record(supervised, losses, m, pseudo, d)

    def judge(self, client: Client) -> Tensor:
        """The F-reg whose weights count."""
        return client.state["w"]

    def losses(self, strong: Tensor, weak: Tensor, pseudo: Tensor) -> Tensor:
        """CE_i: with hard pseudo labels as published, with a teacher's soft ones."""
        if self.source == "local":
            return cross_entropy(strong, pseudo)
        return soft_cross_entropy(strong, weak.softmax(1))

    def regulate(self, client: Client, batch: Batch, pseudo: Tensor) -> Tensor | None:
        """Update F-reg, then C-reg; returns the reward d, where there is one."""
        network, phi, w = client.network, client.state["phi"], client.state["w"]
        if not len(batch.strong):
            return phi.new_zeros(())
        before = network.weights(phi)
        z = network.probe(before, batch.strong)
        if len(batch.labelled):
            self.update_f_reg(client, phi, before, z, batch, pseudo)
        loss_before = labelled_loss(client, before, batch)
        client.optimizers["phi"].step(phi, network.gradient(self.weighted_loss(client, w, z, pseudo), before))  # (2)
        return self.reward(loss_before, labelled_loss(client, network.weights(phi), batch))  # (3)

    def reward(self, before: Tensor, after: Tensor) -> Tensor:
        """d, from C-reg's loss on labels before its step and after it (the released code turns the sign round)."""
        d = before - after if self.options.reward == "fall" else after - before
        return d if self.options.d_clip is None else d.clamp(-self.options.d_clip, self.options.d_clip)

    def update_f_reg(
        self, client: Client, flat: Tensor, before: Weights, z: Tensor, batch: Batch, pseudo: Tensor
    ) -> None:
        """One step of w, by what a virtual step of the network `flat` with it does to the labelled loss."""
        network, w, eta = client.network, client.state["w"], client.optimizer.rate
        gradient = network.gradient(self.weighted_loss(client, w, z, pseudo), before, retain=True)
        virtual = network.moved(flat, gradient, eta)  # (4)
        ahead = mean(cross_entropy(network.probe(virtual, batch.labelled), batch.labels))
        with torch.no_grad():
            _, along = network.tangent(before, network.leaf_gradients(ahead, virtual), batch.strong)
        leaf = w.detach().requires_grad_()
        change = network.fuse(_change)(leaf, z.detach(), along, pseudo, *self._switches)
        (slope,) = torch.autograd.grad(change, leaf)
        client.optimizers["w"].step(w, [(slice(None), -eta * slope)])  # (5)

    def weighted_loss(self, client: Client, w: Tensor, z: Tensor, pseudo: Tensor) -> Tensor:
        """U: the loss on pseudo labels, weighed by F-reg."""
        return client.network.fuse(_weighted_loss)(w.detach(), z, pseudo, *self._switches)

    def reads(self, logits: Tensor) -> Tensor:
        """What F-reg sees of a network's output."""
        return _reads(logits, self.options.f_reg_input == "softmax")

    @property
    def _switches(self) -> tuple[bool, bool]:
        return self.options.f_reg_input == "softmax", self.options.h_gradient == "detached"


def allocate_f_reg(client: Client) -> None:
    """Room for F-reg and its optimiser."""
    client.state["w"] = client.theta.new_zeros(regulator.size(client.classes))
    client.optimizers["w"] = client.new_optimizer(client.state["w"])


def start_f_reg(client: Client, received: Mapping[str, Tensor]) -> None:
    """F-reg as received or remembered, else fresh."""
    fresh = received.get("w")
    if fresh is None:
        fresh = torch.from_numpy(regulator.initial(client.classes, "f-reg", *client.key))
    client.state["w"].copy_(fresh)


def labelled_loss(client: Client, weights: Weights, batch: Batch) -> Tensor:
    """L_s of other weights than θ, for comparison only."""
    if not len(batch.labelled):
        return client.theta.new_zeros(())
    with torch.no_grad():
        return mean(cross_entropy(client.network.probe(weights, batch.labelled), batch.labels))


def _reads(logits: Tensor, softmax: bool) -> Tensor:
    return logits.softmax(1) if softmax else logits


def _weighted_loss(w: Tensor, z: Tensor, pseudo: Tensor, softmax: bool, detached: bool) -> Tensor:
    weights = regulator.weigh(w, _reads(z.detach() if detached else z, softmax))
    return mean(weights * cross_entropy(z, pseudo))


def _change(w: Tensor, z: Tensor, along: Tensor, pseudo: Tensor, softmax: bool, detached: bool) -> Tensor:
    """U̇: how U changes, as a function of w, when the logits z move along a direction."""
    p = z.softmax(1)
    p_along = p * (along - (p * along).sum(1, keepdim=True))
    loss_along = (p * along).sum(1) - along.gather(1, pseudo.unsqueeze(1)).squeeze(1)
    weight, weight_along = regulator.weigh_along(w, p if softmax else z, p_along if softmax else along)
    change = weight * loss_along
    return mean(change if detached else change + weight_along * cross_entropy(z, pseudo))
