"""The textbook twin of FedMatch (Jeong et al., 2021): one client's round, and a whole federation.

Every tensor of the network is a sum θ = σ + ψ of two ordinary `nn.Parameter`s, and σ and ψ have a `torch.optim`
optimiser each; normalisation layers and frozen tensors are σ alone. The confident images C are picked out of the
batch, votes are counted one by one, helpers are found by sorting distances. Slow, plain, from the equations alone.
"""

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from feddure import experiments, rng
from feddure import nn as networks
from feddure.config import Experiment
from feddure.data.batches import Batch, BatchPlan, DeviceImages, Needs
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition

Named = dict[str, Tensor]


def decomposed(module: nn.Module) -> list[str]:
    """Names of the parameters that have a part in ψ."""
    alone = {id(p) for m in module.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm) for p in m.parameters()}
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in alone]


def first_psi(module: nn.Module, factor: float) -> Named:
    """ψ before the first round: a multiple of σ."""
    named = dict(module.named_parameters())
    return {name: factor * named[name].detach() for name in decomposed(module)}


def add(sigma: nn.Module, psi: Mapping[str, Tensor]) -> Named:
    """θ = σ + ψ by name."""
    return {name: p + psi[name] if name in psi else p for name, p in sigma.named_parameters()}


class Client:
    """One client in one round: σ and the running statistics are a module's own, ψ lies beside it."""

    def __init__(self, sigma: nn.Module, psi: Mapping[str, Tensor], helpers: Sequence[Named], experiment: Experiment):
        self.options = experiments.options(experiment, "fedmatch")
        self.helpers = helpers
        self.sigma = copy.deepcopy(sigma).train()
        self.psi = {name: nn.Parameter(value.clone()) for name, value in psi.items()}
        self.proximal = experiment.proximal or 0.0
        self.received = {name: p.detach().clone() for name, p in self.theta().items()}
        of_sigma = [p for p in self.sigma.parameters() if p.requires_grad]
        self.of_sigma, self.of_psi = (self.new_optimizer(p, experiment) for p in (of_sigma, [*self.psi.values()]))

    def new_optimizer(self, parameters: list[nn.Parameter], experiment: Experiment) -> torch.optim.Optimizer:
        if self.options.optimizer == "original":
            return torch.optim.SGD(parameters, lr=self.options.learning_rate)
        o = experiment.optimizer
        return torch.optim.Adam(parameters, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon)

    def theta(self) -> Named:
        return add(self.sigma, self.psi)

    def predict(self, images: Tensor) -> Tensor:
        """θ's logits; the running statistics of σ's module move on."""
        return functional_call(self.sigma, self.theta(), (images,))

    def predict_as_helper(self, psi: Named, images: Tensor) -> Tensor:
        """p of σ + ψ_h, with the statistics of these images alone."""
        with torch.no_grad():
            return functional_call(copy.deepcopy(self.sigma), add(self.sigma, psi), (images,)).softmax(1)

    def step(self, x: Tensor, y: Tensor, plain: Tensor, strong: Tensor) -> dict[str, Tensor]:
        found = {"loss": torch.zeros((), dtype=torch.float64)}
        if len(x):
            found["loss"] = F.cross_entropy(self.predict(x), y)
            self.descend(self.of_sigma, self.options.lambda_s * found["loss"])
        if len(plain):
            found |= self.learn_from_unlabelled(plain, strong)
        return {name: value.detach() for name, value in found.items()}

    def learn_from_unlabelled(self, plain: Tensor, strong: Tensor) -> dict[str, Tensor]:
        o = self.options
        on_plain, on_strong = self.predict(torch.cat([plain, strong])).split(len(plain))
        p = on_plain.softmax(1)
        opinions = [self.predict_as_helper(psi, plain) for psi in self.helpers]
        labels = torch.tensor([self.agree([q[i] for q in (p, *opinions)]) for i in range(len(p))])
        sure = p.detach().max(1).values >= o.threshold
        size = max(int(sure.sum()), 1)
        distances = [self.divergence(p[sure], q[sure]) / size for q in opinions]
        inter = torch.stack(distances).sum() / o.helpers if distances else torch.zeros((), dtype=p.dtype)
        agreement = F.cross_entropy(on_strong[sure], labels[sure], reduction="sum") / size
        sigma = dict(self.sigma.named_parameters())
        length = sum(psi.abs().sum() for psi in self.psi.values())
        apart = sum((sigma[name] - psi).square().sum() for name, psi in self.psi.items())
        loss = o.lambda_i * inter + o.lambda_a * agreement + o.lambda_1 * length + o.lambda_2 * apart
        self.descend(self.of_psi, loss)
        return {
            "loss_unlabelled": F.cross_entropy(on_strong, labels),
            "loss_inter_client": inter,
            "weight": sure.to(p.dtype),
            "pseudo": labels,
        }

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(q ‖ p), the sum over images."""
        return F.kl_div(p.log(), q, reduction="sum")

    def agree(self, opinions: Sequence[Tensor]) -> int:
        """The class most models vote for; the lowest of those in a tie."""
        votes = Counter(int(p.argmax()) for p in opinions)
        return min(votes, key=lambda number: (-votes[number], number))

    def descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """One step of σ or of ψ, the other one fixed, on `loss` + (μ/2) ‖θ − θ_global‖²."""
        distance = sum((p - self.received[name]).square().sum() for name, p in self.theta().items())
        for parameter in (*self.sigma.parameters(), *self.psi.values()):
            parameter.grad = None
        (loss + self.proximal / 2 * distance).backward()
        optimizer.step()


class Federation:
    """All clients and the server: `play` runs a round; σ, ψ and the statistics are those of the server."""

    def __init__(self, experiment: Experiment, dataset: Dataset, partition: Partition, noise: Tensor):
        self.experiment, self.partition, self.noise = experiment, partition, noise
        self.feed = DeviceImages(dataset, torch.device("cpu"), torch.float64)
        norm = "none" if experiments.options(experiment, "fedmatch").net == "original" else experiment.norm
        shape = (dataset.shape[2], len(dataset.classes))
        self.sigma = networks.make(experiment.model, *shape, norm, experiment.seed).double()
        self.psi = first_psi(self.sigma, experiments.options(experiment, "fedmatch").psi_factor)
        self.psi_of: dict[int, Named] = {}
        self.embedding_of: dict[int, Tensor] = {}
        self.round = 0
        self.records: list[list[dict[str, Tensor]]] = []
        self.helped: dict[int, list[int]] = {}

    def theta(self) -> Named:
        """The global model: σ + ψ and the running statistics."""
        buffers = {name: b for name, b in self.sigma.named_buffers() if b.is_floating_point()}
        return {name: value.detach() for name, value in {**add(self.sigma, self.psi), **buffers}.items()}

    def play(self) -> None:
        self.round += 1
        number = min(self.experiment.clients_per_round, self.partition.clients)
        drawn = rng.sample(self.partition.clients, number, self.experiment.seed, "sample", self.round).tolist()
        self.helped = {client: self.helpers(client) for client in drawn}
        trained = {}
        self.records = []
        for client in drawn:
            helpers = [self.psi_of[helper] for helper in self.helped[client]]
            trained[client] = Client(self.sigma, self.psi, helpers, self.experiment)
            self.records.append([trained[client].step(*batch) for batch in self.batches(client)])
        for client, local in trained.items():
            self.psi_of[client] = {name: p.detach() for name, p in local.psi.items()}
            self.embedding_of[client] = embed(local, self.noise)
        states = [local.sigma.state_dict() for local in trained.values()]
        self.sigma.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
        psis = [self.psi_of[client] for client in trained]
        self.psi = {name: sum(psi[name] for psi in psis) / len(psis) for name in self.psi}

    def helpers(self, client: int) -> list[int]:
        """Every tenth round, for clients seen before: those whose answers to the noise image are nearest."""
        options = experiments.options(self.experiment, "fedmatch")
        others = [other for other in self.embedding_of if other != client]
        if self.round % options.helper_every or client not in self.embedding_of or len(others) < options.helpers:
            return []
        own = self.embedding_of[client].tolist()
        return sorted(others, key=lambda other: math.dist(own, self.embedding_of[other].tolist()))[: options.helpers]

    def batches(self, client: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        experiment = self.experiment
        order = BatchPlan(
            client,
            self.partition.labelled[client],
            self.partition.unlabelled[client],
            int(experiment.local_steps),
            experiment.labelled_batch,
            int(experiment.unlabelled_batch),
            Needs(plain=True, strong=True),
        )
        made: Batch = self.feed.batches([order], experiment.seed, self.round)[0]
        steps = [made.step(index) for index in range(order.steps)]
        return [(batch.labelled, batch.labels, batch.plain, batch.strong) for batch in steps]


def embed(client: Client, noise: Tensor) -> Tensor:
    """A trained client's softmax on the noise image, in evaluation mode."""
    with torch.no_grad():
        return functional_call(copy.deepcopy(client.sigma).eval(), client.theta(), (noise,)).softmax(1)[0]
