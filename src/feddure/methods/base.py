"""What a method is: what one client does in one local step, what it sends, what the server answers.

A method is written once, for one client, in plain PyTorch. The engine runs many clients side by side, captures
the step as a CUDA graph where there is one, and the same code runs behind Flower. So a step is a pure tensor
program: no `.item()`, no Python that depends on data.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from feddure.config import Experiment, OptimizerOptions
from feddure.data.batches import Batch, Needs
from feddure.errors import ConfigError, did_you_mean
from feddure.nn import optimizers
from feddure.nn.flat import Pieces
from feddure.nn.network import Network, Weights
from feddure.nn.optimizers import Optimizer

State = dict[str, Tensor]


class Options(BaseModel):
    """The options of a method: a field for each, with its default and `Field(..., description=...)`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FreeOptions(Options):
    """Of a method that declares none: whatever stands in the section `options`."""

    model_config = ConfigDict(extra="allow")


OptionsClass = type[Options]


def mean(values: Tensor) -> Tensor:
    """Mean, and 0 for nothing: the loss of a client without such images."""
    return values.sum() / max(values.numel(), 1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each sample."""
    return F.cross_entropy(logits, labels, reduction="none")


def record(supervised: Tensor, losses: Tensor, weight: Tensor, pseudo: Tensor, d: Tensor | None = None) -> State:
    """What a step with pseudo labels leaves for the diagnostics.

    The labelled loss; each unlabelled image's loss, its weight in the step and its pseudo label; FedDure's reward d.
    """
    found = {"loss": supervised, "loss_unlabelled": mean(losses), "weight": weight, "pseudo": pseudo}
    return {name: tensor.detach() for name, tensor in (found if d is None else found | {"d": d}).items()}


class Client:
    """One client in training, as a method's step sees it."""

    def __init__(self, network: Network, experiment: Experiment, proximal: float, classes: int):
        self.network = network
        self.experiment = experiment
        self.classes = classes
        self.proximal = proximal
        size, statistics = network.parameters.size, network.statistics.size
        self.theta = torch.zeros(size, dtype=network.master, device=network.device)
        self.statistics = torch.zeros(statistics, dtype=network.master, device=network.device)
        self.anchor = torch.zeros_like(self.theta) if proximal else self.theta
        self.optimizer = self.new_optimizer(self.theta[: network.parameters.trained])
        self.state: State = {}
        self.class_counts = self.theta.new_zeros(classes)  # of its labelled images
        self.received: Mapping[str, Tensor] = {}
        self.optimizers: dict[str, Optimizer] = {}  # further ones, of what a method trains beside θ
        self.key: tuple[int, ...] = ()  # seed, round, client: for random decisions of this round
        self._weights: Weights | None = None

    def new_optimizer(self, like: Tensor, options: OptimizerOptions | None = None) -> Optimizer:
        """A fresh optimiser for a flat vector like this one, with the experiment's constants or others."""
        return optimizers.make(options or self.experiment.optimizer, like, self.network.fuse)

    def receive(self, received: Mapping[str, Tensor], key: tuple[int, ...]) -> None:
        """Start a round from the server's model with fresh optimisers.

        A method that sends its model in parts puts it together in `start_round` and calls `start_from` there.
        """
        self.key, self.received = key, received
        self.statistics.copy_(received["statistics"])
        self.network.probe_with(self.statistics)
        for optimizer in (self.optimizer, *self.optimizers.values()):
            optimizer.reset()
            optimizer.set_rate(optimizers.scheduled_rate(optimizer.options, key[1], self.experiment.rounds))
        if "theta" in received:
            self.start_from(received["theta"])

    def start_from(self, theta: Tensor) -> None:
        """Training starts here, and the proximal term pulls back to here."""
        self.theta.copy_(theta)
        if self.proximal:
            self.anchor.copy_(theta)

    def model(self, *images: Tensor) -> tuple[Tensor, ...]:
        """θ's logits on each group of images, in one pass with shared batch statistics."""
        self._weights = self.network.weights(self.theta)
        logits = self.network.forward(self.weights, self.statistics, torch.cat(images))
        return logits.split([len(group) for group in images])

    def features(self, *images: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """`model` with features: for each group its logits, and what the network's last linear layer made them of."""
        self._weights = self.network.weights(self.theta)
        sizes = [len(group) for group in images]
        logits, features = self.network.features(self.weights, self.statistics, torch.cat(images))
        return tuple(zip(logits.split(sizes), features.split(sizes), strict=True))

    @property
    def classifier(self) -> Tensor:
        """The rows [classes, features] of the network's last linear layer, as the last pass used them."""
        return self.network.rows(self.weights.named).to(self.network.master)

    def head(self, name: str, *inputs: Tensor) -> Tensor:
        """The output of one of the method's `heads`, with the weights of the last pass."""
        return self.network.head(name, self.weights, *inputs)

    def frozen(self, name: str, images: Tensor) -> Tensor:
        """Logits of a model that the server sent for this round: "global", or NAME of `NAME.theta`, `NAME.statistics`.

        Evaluation mode, no gradient; images may have any number of leading dimensions. For `before_steps`: what is
        frozen is computed once a round, in large batches.
        """
        prefix = "" if name == "global" else f"{name}."
        if f"{prefix}theta" not in self.received:
            raise ConfigError(
                f"method '{self.experiment.method}': client.frozen was asked for '{name}', but the server sent "
                f"{', '.join(self.received)}; send {name}.theta and {name}.statistics in broadcast, or use 'global'"
            )
        theta, statistics = self.received[f"{prefix}theta"], self.received[f"{prefix}statistics"]
        logits = self.network.evaluate_many(theta, statistics, images.flatten(0, -4))
        return logits.unflatten(0, images.shape[:-3])

    @property
    def weights(self) -> Weights:
        """The leaves that the last call of `model` or `features` used, until θ descends."""
        if self._weights is None:
            raise ConfigError(
                f"method '{self.experiment.method}': client.descend or client.weights was used without a pass of "
                "client.model since θ last moved; descend once on the sum of the losses, or call client.model again "
                "before each further client.descend"
            )
        return self._weights

    def descend(self, loss: Tensor) -> None:
        """One step of θ on `loss`, plus the proximal term, in place."""
        self.descend_along(self.network.gradient(loss, self.weights))

    def descend_along(self, gradient: Pieces) -> None:
        """One step of θ along a gradient, plus the proximal term, in place."""
        self.optimizer.step(self.theta, self.with_proximal(gradient))
        self._weights = None

    def with_proximal(self, gradient: Pieces) -> Pieces:
        """A gradient plus that of the proximal term."""
        if not self.proximal:
            return gradient
        pull = self.proximal * (self.theta - self.anchor)
        return [(place, values + pull[place]) for place, values in gradient]


class Method:
    """An algorithm. Subclasses override what differs; everything has a default."""

    name = ""
    title = ""  # as tables and figures write it; without one, the name
    section = "options"  # of the configuration, where its options stand: `--set SECTION.FIELD=VALUE`
    Options: OptionsClass = FreeOptions
    needs = Needs()
    proximal = 0.0
    memory: tuple[str, ...] = ()  # names in `client.state` that a client keeps between its rounds
    keeps: tuple[str, ...] = ()  # names of what the server's state has of each client, as `NAME.CLIENT`: on the host
    passes = 1.0  # what a step costs, relative to one forward and backward pass of its images
    exchanges = True  # whether clients and server send each other anything
    relays_uploads = False  # whether the server hands what one client sent to other clients
    uploads_class_counts = False  # whether clients tell the server how many images of each class they learnt from
    ema: float | None = None  # decay of the averaged model where `server.ema` is empty; none: no average

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.options: Any = self.read_options(self.section)

    @classmethod
    def sections(cls) -> dict[str, OptionsClass]:
        """The sections of the configuration that it reads, each with the model that checks it."""
        return {cls.section: cls.Options}

    def read_options(self, section: str) -> Any:
        """The options in a section, complete and checked."""
        given = getattr(self.experiment, section, None) or {}
        try:
            return self.sections()[section].model_validate(given)
        except ValidationError as error:
            known = list(self.sections()[section].model_fields)
            raise ConfigError("\n".join(_told(section, found, known) for found in error.errors())) from None

    @property
    def norm(self) -> str:
        """Normalisation layers of the network that this method trains: batch, group or none."""
        return self.experiment.norm

    @property
    def has_heads(self) -> bool:
        """Whether it has `heads`, and so asks for a network that ends with a linear layer."""
        return type(self).heads is not Method.heads

    def heads(self, features: int, classes: int) -> Mapping[str, nn.Module]:
        """Further modules that are trained and sent with the network; a step calls them by `client.head`.

        `features` is the length of what the network's last linear layer takes. What is exported has no heads.
        """
        return {}

    # --- on a client ---------------------------------------------------------------------------------
    def steps(self, labelled: int, unlabelled: int, unlabelled_batch: int) -> int:
        """Local steps of a client with so many images."""
        wanted = self.experiment.local_steps
        if wanted != "epoch":
            return wanted
        if unlabelled:
            return max(1, round(unlabelled / unlabelled_batch))
        return max(1, round(labelled / self.experiment.labelled_batch))

    def allocate(self, client: Client) -> None:
        """Make the tensors in `client.state` that this method needs; once for each lane."""

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        """Fill `client.state` in place; θ, its statistics and its optimiser are in place already."""

    def before_steps(self, client: Client, batches: Batch) -> State:
        """Tensors for all steps of a round, [steps, ...] each: a step finds its own in `batch.made`."""
        return {}

    def step(self, client: Client, batch: Batch) -> State:
        """One local step, in place; returns small tensors worth recording."""
        raise NotImplementedError("a method has a step of its own")

    def upload(self, client: Client) -> State:
        """What the client sends to the server."""
        return {"theta": client.theta, "statistics": client.statistics}

    # --- on the server -------------------------------------------------------------------------------
    def prepare(self, network: Network, shape: tuple[int, int, int]) -> None:
        """Called once before `start`, with the network and the images' height, width and channels."""

    def start(self, theta: Tensor, statistics: Tensor, classes: int, seed: int) -> State:
        """The server's state before the first round."""
        return {"theta": theta, "statistics": statistics}

    def broadcast(self, server: State, client: int, round_number: int) -> State:
        """What the server sends to a client at the start of its round.

        `server` is the server's state and, where it averages the global model, `averaged.theta` and
        `averaged.statistics`.
        """
        return {"theta": server["theta"], "statistics": server["statistics"]}

    def aggregate(
        self,
        server: State,
        uploads: Sequence[State],
        weights: Sequence[float],
        clients: Sequence[int],
        round_number: int,
    ) -> State:
        """The server's next state from what it received, in sampling order."""
        return {**server, **weighted_mean(uploads, weights)}

    def global_model(self, server: State) -> tuple[Tensor, Tensor]:
        """Parameters and statistics of the model that is evaluated and exported."""
        return server["theta"], server["statistics"]

    def client_models(self, memories: Mapping[int, State]) -> dict[int, tuple[Tensor, Tensor]]:
        """Models of single clients that are tested in place of the global one, by what clients remember."""
        return {}

    def sparse_bytes(self, server: State, client: int, received: Mapping[str, Tensor], upload: State) -> dict[str, int]:
        """Bytes `down` to a client and `up` from it, where a method could send less than all values."""
        return {}


def weighted_mean(uploads: Sequence[State], weights: Sequence[float]) -> State:
    """Name by name, the weighted mean of what clients sent: one reduction in the given order."""
    total = sum(weights)
    result = {}
    for name in uploads[0]:
        stacked = torch.stack([upload[name] for upload in uploads])
        shares = torch.tensor([w / total for w in weights], dtype=stacked.dtype, pin_memory=stacked.is_cuda)
        shares = shares.to(stacked.device, non_blocking=True)  # or it would wait for the clients' training
        result[name] = (shares.view(-1, *[1] * (stacked.dim() - 1)) * stacked).sum(0)
    return result


def _told(section: str, problem: Any, known: Sequence[str]) -> str:
    key = ".".join(map(str, (section, *problem["loc"])))
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['input']!r} was given, {problem['msg']}"
    hint = did_you_mean(str(problem["loc"][0]), known)
    return f"unknown field '{key}'{hint}" + ("" if hint else f"; there are: {', '.join(known) or 'none'}")
