"""FedAvg and FedProx as textbooks write them: modules, a loss, `torch.optim.Adam`, one client after the other.

Slow and plain on purpose, and sharing no arithmetic with the engine: tests hold the two against each other and
benchmarks race them. Only the images come from the engine's own feed, so that both learn from the same pixels.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddure import nn as networks
from feddure import rng
from feddure.config import Experiment, OptimizerOptions
from feddure.data.batches import Batch, BatchPlan, DeviceImages, Needs
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition

State = dict[str, Tensor]

PROXIMAL = {"fedprox-sl": 0.01}
FULLY_SUPERVISED = ("fedavg-sl", "fedprox-sl")


def train_client(module: nn.Module, batches: Batch, options: OptimizerOptions, proximal: float = 0.0) -> list[float]:
    """One client's round on a module of its own, in place; returns the loss of each step."""
    received = [parameter.detach().clone() for parameter in module.parameters()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    betas = (options.beta1, options.beta2)
    optimiser = torch.optim.Adam(trained, lr=options.learning_rate, betas=betas, eps=options.epsilon)
    losses = []
    module.train()
    for images, labels in zip(batches.labelled, batches.labels, strict=True):
        loss = F.cross_entropy(module(images), labels)
        losses.append(loss.item())
        if proximal:
            pairs = zip(module.parameters(), received, strict=True)
            loss = loss + proximal / 2 * sum(((now - then) ** 2).sum() for now, then in pairs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return losses


def local_steps(experiment: Experiment, labelled: int, unlabelled: int) -> int:
    """How many steps a client with so many images takes in a round."""
    if experiment.method == "fedavg-matched" and experiment.local_steps != "epoch":
        return experiment.local_steps
    if experiment.method == "fedavg-matched":
        return max(1, round(unlabelled / int(experiment.unlabelled_batch)))
    if experiment.method in FULLY_SUPERVISED:
        return max(1, round((labelled + unlabelled) / experiment.labelled_batch))
    return max(1, round(labelled / experiment.labelled_batch))


class Twin:
    """A whole federation: `play` runs a round, `state` is the global model by name."""

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        partition: Partition,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ):
        self.experiment = experiment
        self.partition = partition
        self.feed = DeviceImages(dataset, torch.device(device), dtype)
        channels, classes = dataset.shape[2], len(dataset.classes)
        self.module = networks.make(experiment.model, channels, classes, experiment.norm, experiment.seed)
        self.module.to(device, dtype)
        self.proximal = PROXIMAL.get(experiment.method, 0.0) if experiment.proximal is None else experiment.proximal
        self.round = 0
        self.losses: list[float] = []

    @property
    def state(self) -> State:
        """Parameters and batch-norm statistics of the global model."""
        return _floats(self.module.state_dict())

    def clients(self, number: int) -> list[int]:
        """The clients of a round."""
        wanted = min(self.experiment.clients_per_round, self.partition.clients)
        return rng.sample(self.partition.clients, wanted, self.experiment.seed, "sample", number).tolist()

    def play(self) -> None:
        """One round: every client starts from the global model, which becomes the mean of what they made."""
        self.round += 1
        self.losses = []
        uploads, weights = [], []
        for client in self.clients(self.round):
            local = copy.deepcopy(self.module)
            self.losses += train_client(local, self.batches(client), self.experiment.optimizer, self.proximal)
            uploads.append(_floats(local.state_dict()))
            weights.append(self.weight(client))
        self.receive(mean_of(uploads, weights))

    def receive(self, mean: State) -> None:
        """The server's update: the mean itself."""
        self.module.load_state_dict(mean, strict=False)

    def batches(self, client: int) -> Batch:
        """What a client sees in the current round."""
        labelled, unlabelled = self.partition.labelled[client], self.partition.unlabelled[client]
        order = BatchPlan(
            client,
            labelled,
            unlabelled,
            local_steps(self.experiment, len(labelled), len(unlabelled)),
            self.experiment.labelled_batch,
            int(self.experiment.unlabelled_batch),
            Needs(every_label=self.experiment.method in FULLY_SUPERVISED),
            self.experiment.labelled_cutout,
        )
        return self.feed.batches([order], self.experiment.seed, self.round)[0]

    def weight(self, client: int) -> float:
        """A client's weight in the mean."""
        labelled, unlabelled = len(self.partition.labelled[client]), len(self.partition.unlabelled[client])
        return {"total": labelled + unlabelled, "labelled": labelled, "uniform": 1}[self.experiment.server.weight]


def mean_of(uploads: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """The weighted mean, name by name, added up one client after the other."""
    mean = {name: torch.zeros_like(tensor) for name, tensor in uploads[0].items()}
    for upload, weight in zip(uploads, weights, strict=True):
        for name, tensor in upload.items():
            mean[name] += weight / sum(weights) * tensor
    return mean


def _floats(state: Mapping[str, Tensor]) -> State:
    """Without batch norm's counters, which mean nothing in a federation."""
    return {name: tensor.clone() for name, tensor in state.items() if tensor.is_floating_point()}
