"""The ablations of the paper's Table 2: FedDure with parts taken away, and a plain meta-learning baseline.

`f-reg` has no C-reg: F-reg learns by a virtual step of θ itself. `c-reg` has no F-reg: a fixed confidence threshold
takes the place of its weights, and d acts on all images or on the confident ones (`feddure.reward_on`: the paper only
says that low-confidence pseudo labels are filtered). `avg-f-reg` and `avg-c-reg` use the mean of the regulators that
clients trained in earlier rounds, instead of their own. `baseline+maml` adds a first-order or exact meta gradient to
FixMatch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddure.config import Experiment
from feddure.data.batches import Batch
from feddure.errors import ConfigError
from feddure.methods.base import Client, OptionsClass, State, cross_entropy, mean, record
from feddure.methods.feddure import FedDure, allocate_f_reg, labelled_loss, start_f_reg
from feddure.methods.fixmatch import FedAvgFixMatch, confident
from feddure.nn import regulator


class FReg(FedDure):
    """F-reg alone: no φ, no reward d."""

    name = "f-reg"
    title = "F-reg"
    passes = 2.2

    def allocate(self, client: Client) -> None:
        allocate_f_reg(client)

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        start_f_reg(client, received)

    def regulate(self, client: Client, batch: Batch, pseudo: Tensor) -> None:
        """Equations 4 and 5 with θ in the place of φ."""
        if len(batch.labelled) and len(batch.strong):
            before = client.network.weights(client.theta)
            z = client.network.probe(before, batch.strong)
            self.update_f_reg(client, client.theta, before, z, batch, pseudo)


class _WithMean(FedDure):
    """A regulator as the mean over all that clients trained in earlier rounds; the server keeps it."""

    averaged: str

    def fresh(self, theta: Tensor, classes: int, seed: int) -> Tensor:
        """The mean of none."""
        raise NotImplementedError

    def start(self, theta: Tensor, statistics: Tensor, classes: int, seed: int) -> State:
        mean = {self.averaged: self.fresh(theta, classes, seed), f"{self.averaged}_count": theta.new_zeros(())}
        return {**super().start(theta, statistics, classes, seed), **mean}

    def broadcast(self, server: State, client: int, round_number: int) -> State:
        return {**super().broadcast(server, client, round_number), self.averaged: server[self.averaged]}

    def aggregate(self, server: State, uploads: Sequence[State], *arguments) -> State:
        name, before = self.averaged, server[f"{self.averaged}_count"]
        count = before + len(uploads)
        total = server[name] * before + torch.stack([upload[name] for upload in uploads]).sum(0)
        return {**super().aggregate(server, uploads, *arguments), name: total / count, f"{name}_count": count}


class AvgFReg(_WithMean, FReg):
    """F-reg as the mean of earlier rounds; the client trains a copy for upload only."""

    name = "avg-f-reg"
    title = "Avg F-reg"
    averaged = "w"
    passes = 2.6
    owns_f_reg = False

    def allocate(self, client: Client) -> None:
        super().allocate(client)
        client.state["w_mean"] = torch.zeros_like(client.state["w"])

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        super().start_round(client, received)
        client.state["w_mean"].copy_(received["w"])

    def judge(self, client: Client) -> Tensor:
        return client.state["w_mean"]

    def upload(self, client: Client) -> State:
        return {**super().upload(client), "w": client.state["w"]}

    def fresh(self, theta: Tensor, classes: int, seed: int) -> Tensor:
        return torch.from_numpy(regulator.initial(classes, "f-reg", seed, 0, 0)).to(theta)


class CReg(FedDure):
    """C-reg alone: a fixed threshold instead of F-reg's weights."""

    name = "c-reg"
    title = "C-reg"
    owns_f_reg = False

    def allocate(self, client: Client) -> None:
        client.state["phi"] = torch.zeros_like(client.theta)
        client.optimizers["phi"] = client.new_optimizer(client.theta[: client.network.parameters.trained])

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        client.state["phi"].copy_(received["theta"])

    def step(self, client: Client, batch: Batch) -> State:
        labelled, weak, strong = self.views(client, batch)
        pseudo, mask = confident(weak, self.options.threshold)
        d = self.regulate_by(mask, client, batch, pseudo) if len(batch.strong) else client.theta.new_zeros(())
        losses = self.losses(strong, weak, pseudo)
        supervised = mean(cross_entropy(labelled, batch.labels))
        filtered = self.options.reward_on == "confident"
        client.descend(supervised + mean(mask * losses) + d * mean(mask * losses if filtered else losses))
        found = record(supervised, losses, mask, pseudo, d)
        return found | {"reach": mean(mask)} if filtered else found

    def regulate_by(self, mask: Tensor, client: Client, batch: Batch, pseudo: Tensor) -> Tensor:
        """Equations 2 and 3 with the mask in the place of H; returns the reward d."""
        network, phi = client.network, client.state["phi"]
        before = network.weights(phi)
        loss_before = labelled_loss(client, before, batch)
        loss = mean(mask * cross_entropy(network.probe(before, batch.strong), pseudo))
        client.optimizers["phi"].step(phi, network.gradient(loss, before))  # (2)
        return self.reward(loss_before, labelled_loss(client, network.weights(phi), batch))  # (3)


class AvgCReg(_WithMean, CReg):
    """Every step's C-reg starts at the mean of earlier rounds, with a fresh optimiser; a copy trains on for upload."""

    name = "avg-c-reg"
    title = "Avg C-reg"
    averaged = "phi"
    passes = 3.5

    def allocate(self, client: Client) -> None:
        super().allocate(client)
        client.state["phi_mean"] = torch.zeros_like(client.theta)
        client.state["phi_copy"] = torch.zeros_like(client.theta)
        client.optimizers["phi_copy"] = client.new_optimizer(client.theta[: client.network.parameters.trained])

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        client.state["phi_mean"].copy_(received["phi"])
        client.state["phi_copy"].copy_(received["phi"])

    def regulate_by(self, mask: Tensor, client: Client, batch: Batch, pseudo: Tensor) -> Tensor:
        network, copy = client.network, client.state["phi_copy"]
        weights = network.weights(copy)
        loss = mean(mask * cross_entropy(network.probe(weights, batch.strong), pseudo))
        client.optimizers["phi_copy"].step(copy, network.gradient(loss, weights))
        client.state["phi"].copy_(client.state["phi_mean"])
        client.optimizers["phi"].reset()
        return super().regulate_by(mask, client, batch, pseudo)

    def upload(self, client: Client) -> State:
        return {**super().upload(client), "phi": client.state["phi_copy"]}

    def fresh(self, theta: Tensor, classes: int, seed: int) -> Tensor:
        return theta.clone()


class BaselineMAML(FedAvgFixMatch):
    """FixMatch plus the meta gradient: ∇_θ [L_s(θ − η ∇L_u(θ)) + L_s(θ) + L_u(θ)].

    With v = ∇L_s at the virtual weights, the first term is v − η ∇²L_u v; the product with the Hessian is the gradient
    of L_u's derivative along v, which one forward-mode pass gives (`maml_order: 1` leaves it out).
    """

    name = "baseline+maml"
    title = "Baseline+MAML"
    passes = 2.6

    def __init__(self, experiment: Experiment):
        super().__init__(experiment)
        if self.options.pseudo != "local" or self.options.targets != "hard":
            raise ConfigError("method 'baseline+maml' knows only fixmatch.pseudo=local and fixmatch.targets=hard")

    @classmethod
    def sections(cls) -> dict[str, OptionsClass]:
        return super().sections() | FedDure.sections()

    def step(self, client: Client, batch: Batch) -> State:
        options = self.options
        labelled, weak, strong = client.model(batch.labelled, batch.weak, batch.strong)
        pseudo, mask = confident(weak, options.threshold)
        losses = cross_entropy(strong, pseudo)
        supervised = mean(cross_entropy(labelled, batch.labels))
        gradients = client.network.leaf_gradients(supervised + options.weight * mean(mask * losses), client.weights)
        if len(batch.labelled) and len(batch.strong):
            meta = self.meta_gradient(client, batch, pseudo, options.weight * mask)
            gradients = [one + other for one, other in zip(gradients, meta, strict=True)]
        client.descend_along(client.network.parameters.gather(gradients))
        return record(supervised, losses, mask, pseudo)

    def meta_gradient(self, client: Client, batch: Batch, pseudo: Tensor, mask: Tensor) -> list[Tensor]:
        """∇_θ L_s(θ − η ∇L_u(θ)), leaf by leaf."""
        network, eta = client.network, client.optimizer.rate
        before = network.weights(client.theta)
        loss = mean(mask * cross_entropy(network.probe(before, batch.strong), pseudo))
        virtual = network.moved(client.theta, network.gradient(loss, before), eta)
        ahead = mean(cross_entropy(network.probe(virtual, batch.labelled), batch.labels))
        v = network.leaf_gradients(ahead, virtual)
        if self.read_options(FedDure.section).maml_order == 1:
            return v
        z, along = network.tangent(before, v, batch.strong)
        change = ((z.softmax(1) - torch.nn.functional.one_hot(pseudo, z.shape[1])) * along).sum(1)
        hessian = network.leaf_gradients(mean(mask * change), before)
        return [one - eta * other for one, other in zip(v, hessian, strict=True)]
