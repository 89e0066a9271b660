"""FedMatch: inter-client consistency and disjoint learning (Jeong et al., ICLR 2021), labels at the clients.

Every parameter is a sum θ = σ + ψ. One local step on labelled (x, y) and unlabelled u moves first σ, then ψ:

    σ:  λ_s CE(y, f(T_w(x); θ))
    ψ:  (λ_i / H) Σ_h mean_C KL(p_{σ + ψ_h}(u) ‖ p_θ(u)) + λ_a mean_C CE(ŷ, f(T_s(u); θ)) + λ_1 ‖ψ‖₁ + λ_2 ‖σ − ψ‖²

with u unaugmented and C = {u: max p_θ(u) ≥ τ} its confident images. ŷ is the class that most of θ and H helpers vote
for, the lowest one in a tie. A helper is another client's last ψ on top of the client's own, current σ. After each
round the server embeds every participant as its softmax on one noise image; in every tenth round it sends each client
that it has seen before the H others nearest to it. They count in that round alone, as in the authors' code: without
them, or where fewer than H others were seen, there is no first term, and θ votes alone.

Readings. σ and ψ have the same kind of optimiser: plain gradient descent, or Adam, one for each, fresh each round. The
passes on x and on [u; T_s(u)] both move θ's running statistics, in this order; helpers use those of the batch alone,
and embeddings the uploaded ones. Normalisation layers and frozen tensors belong to σ: ψ is 0 there. A client without
labelled (unlabelled) images takes no step of σ (ψ). A proximal term pulls in both steps. The server's mean is uniform,
whatever `server.weight` says.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddure import rng
from feddure.config import Experiment, OptimizerOptions
from feddure.data.batches import Batch, Needs
from feddure.errors import ConfigError
from feddure.methods import base
from feddure.methods.base import Client, Method, State, cross_entropy, mean, record, weighted_mean
from feddure.nn.flat import Pieces
from feddure.nn.network import Network

CHANGED = 5e-5
"""A value of σ or ψ that differs by less from the copy at the other end need not be sent (the authors' threshold)."""


class Options(base.Options):
    """FedMatch's weights and the readings of its set-up."""

    optimizer: Literal["original", "common"] = Field(
        "original", description="SGD 1e-3 as released, or the Adam every other method here uses."
    )
    net: Literal["common", "original"] = Field(
        "common", description="The experiment's network, or one without normalisation and biases."
    )
    learning_rate: float = Field(1e-3, gt=0, description="SGD's learning rate under optimizer: original.")
    threshold: float = Field(0.75, ge=0, le=1, description="Least confidence of an unlabelled image that counts.")
    helpers: int = Field(2, ge=1, description="Number H of helper models a client receives.")
    helper_every: int = Field(
        10, ge=1, description="Helpers are sent, and count, in rounds whose number is a multiple of this."
    )
    lambda_s: float = Field(10.0, ge=0, description="Weight of the supervised loss.")
    lambda_i: float = Field(1e-2, ge=0, description="Weight of the inter-client consistency.")
    lambda_a: float = Field(1e-2, ge=0, description="Weight of the agreement pseudo labels.")
    lambda_1: float = Field(1e-4, ge=0, description="Weight of the L1 norm of ψ.")
    lambda_2: float = Field(10.0, ge=0, description="Weight of the distance between σ and ψ.")
    psi_factor: float = Field(0.2, description="ψ starts as this multiple of σ.")


class FedMatch(Method):
    """σ learns from labels, ψ from the agreement with other clients' models."""

    name = "fedmatch"
    title = "FedMatch"
    section = "fedmatch"
    Options = Options
    passes = 1.6
    relays_uploads = True
    keeps = ("psi", "embedding")
    needs = Needs(plain=True, strong=True)
    network: Network
    noise: Tensor

    def __init__(self, experiment: Experiment):
        super().__init__(experiment)
        if experiment.server.optimizer != "mean":
            raise ConfigError(
                f"server.optimizer: '{experiment.server.optimizer}' was given, but method 'fedmatch' averages σ and ψ "
                "apart and knows only 'mean'"
            )

    @property
    def norm(self) -> str:
        return "none" if self.options.net == "original" else super().norm

    # --- a client's round ----------------------------------------------------------------------------
    def allocate(self, client: Client) -> None:
        for name in ("sigma", "psi"):
            client.state[name] = torch.zeros_like(client.theta)
        client.state["helpers"] = client.theta.new_zeros(self.options.helpers, len(client.theta))
        client.state["present"] = client.theta.new_zeros(())  # 1 in rounds with helpers
        original = OptimizerOptions(name="sgd", learning_rate=self.options.learning_rate)
        optimizer = original if self.options.optimizer == "original" else self.experiment.optimizer
        trained = client.theta[: client.network.parameters.trained]
        client.optimizers |= {name: client.new_optimizer(trained, optimizer) for name in ("sigma", "psi")}

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        client.state["sigma"].copy_(received["sigma"])
        client.state["psi"].copy_(received["psi"])
        client.start_from(received["sigma"] + received["psi"])
        client.state["present"].fill_("helper.0" in received)
        for slot, psi in enumerate(client.state["helpers"]):
            psi.copy_(received.get(f"helper.{slot}", torch.zeros_like(psi)))

    def step(self, client: Client, batch: Batch) -> State:
        supervised = client.theta.new_zeros(())
        if len(batch.labelled):
            (logits,) = client.model(batch.labelled)
            supervised = mean(cross_entropy(logits, batch.labels))
            gradient = client.network.gradient(self.options.lambda_s * supervised, client.weights)
            self.descend(client, "sigma", client.with_proximal(gradient))
        if len(batch.plain):
            losses, inter, mask, pseudo = self.learn_psi(client, batch)
        else:
            losses = mask = client.theta.new_zeros(0)
            inter, pseudo = client.theta.new_zeros(()), batch.labels[:0]
        return {**record(supervised, losses, mask, pseudo), "loss_inter_client": inter.detach()}

    def learn_psi(self, client: Client, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The step on unlabelled images; returns its losses, the confident images and the pseudo labels."""
        network, state, options = client.network, client.state, self.options
        plain, strong = client.model(batch.plain, batch.strong)
        with torch.no_grad():
            weights = [network.weights(state["sigma"] + psi) for psi in state["helpers"]]
            helpers = torch.stack([network.probe(one, batch.plain) for one in weights])
            mask, pseudo = network.fuse(_vote)(plain.detach(), helpers, state["present"], options.threshold)
        inter, losses = network.fuse(_losses)(plain, strong, helpers, state["present"], mask, pseudo)
        agreement = _mean_of_confident(losses, mask)
        gradient = network.gradient(options.lambda_i * inter + options.lambda_a * agreement, client.weights)
        self.descend(client, "psi", self.regularised(client, client.with_proximal(gradient)))
        return losses, inter, mask, pseudo

    def regularised(self, client: Client, gradient: Pieces) -> Pieces:
        """The gradient with respect to ψ, plus that of its two norms, and 0 where there is no ψ."""
        parts = (client.state["sigma"], client.state["psi"], client.network.ordinary)
        constants = (self.options.lambda_1, self.options.lambda_2)
        add = client.network.fuse(_regularised)
        return [(place, add(values, *(part[place] for part in parts), *constants)) for place, values in gradient]

    def descend(self, client: Client, name: str, gradient: Pieces) -> None:
        """One step of σ or ψ, in place; θ follows."""
        client.optimizers[name].step(client.state[name], gradient)
        torch.add(client.state["sigma"], client.state["psi"], out=client.theta)

    def upload(self, client: Client) -> State:
        return {"sigma": client.state["sigma"], "psi": client.state["psi"], "statistics": client.statistics}

    # --- on the server -------------------------------------------------------------------------------
    def prepare(self, network: Network, shape: tuple[int, int, int]) -> None:
        self.network = network
        self.noise = torch.from_numpy(noise_image(shape)).to(network.device, network.compute)

    def start(self, theta: Tensor, statistics: Tensor, classes: int, seed: int) -> State:
        psi = self.options.psi_factor * theta * self.network.ordinary
        return {"theta": theta + psi, "sigma": theta, "psi": psi, "statistics": statistics}

    def broadcast(self, server: State, client: int, round_number: int) -> State:
        sent = {name: server[name] for name in ("sigma", "psi", "statistics")}
        if round_number % self.options.helper_every == 0:
            for slot, helper in enumerate(self.helpers(server, client)):
                sent[f"helper.{slot}"] = server[f"psi.{helper}"].to(self.network.device)
        return sent

    def helpers(self, server: State, client: int) -> list[int]:
        """The H other clients whose embeddings lie nearest; none for a new client or among too few."""
        embeddings = {
            int(name.partition(".")[2]): tensor
            for name, tensor in server.items()
            if name.startswith("embedding.") and bool(torch.isfinite(tensor).all())
        }
        seen = sorted(embeddings)
        others = [other for other in seen if other != client]
        if client not in seen or len(others) < self.options.helpers:
            return []
        from scipy.spatial import KDTree  # slow to import, and only servers need it

        tree = KDTree([embeddings[other].tolist() for other in others])
        _, nearest = tree.query(embeddings[client].tolist(), k=self.options.helpers)
        return [others[place] for place in np.atleast_1d(nearest)]

    def aggregate(
        self,
        server: State,
        uploads: Sequence[State],
        weights: Sequence[float],
        clients: Sequence[int],
        round_number: int,
    ) -> State:
        average = weighted_mean(uploads, [1.0] * len(uploads))
        state = {**server, **average, "theta": average["sigma"] + average["psi"]}
        for client, upload in zip(clients, uploads, strict=True):
            state[f"psi.{client}"] = upload["psi"]
            state[f"embedding.{client}"] = self.embed(upload)
        return state

    def embed(self, upload: State) -> Tensor:
        """A client's model as its answer to the noise image."""
        theta = upload["sigma"] + upload["psi"]
        return self.network.evaluate(theta, upload["statistics"], self.noise).softmax(1).squeeze(0)

    def sparse_bytes(self, server: State, client: int, received: Mapping[str, Tensor], upload: State) -> dict[str, int]:
        """Bytes if ψ (and, on its way up, σ) is sent as differences, where these count, with a bit for each position.

        Up, the server has what it sent. Down, it keeps each client's last ψ, but not its σ, which is sent whole.
        """
        kept = server.get(f"psi.{client}")
        held = torch.zeros_like(server["psi"]) if kept is None else kept.to(server["psi"].device)
        whole = 4 * upload["statistics"].numel()
        down = [_difference(psi, held) for name, psi in received.items() if name == "psi" or name.startswith("helper.")]
        up = [_difference(upload[name], received[name]) for name in ("sigma", "psi")]
        return {"down": whole + 4 * received["sigma"].numel() + sum(down), "up": whole + sum(up)}


def noise_image(shape: tuple[int, int, int]) -> np.ndarray:
    """A batch of one image of Gaussian noise, as bright and as strong as a normalised image is on average."""
    from scipy.special import ndtri  # a tenth of a second: only when it is needed

    height, width, channels = shape
    bits = rng.bits(height * width * channels, "noise-image") >> np.uint64(11)
    return ndtri((bits + 0.5) / 2.0**53).reshape(1, channels, height, width)


def _vote(plain: Tensor, helpers: Tensor, present: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """1 for images that θ is sure of, and the class that θ and the helpers agree on (argmax takes the lowest)."""
    mask = (plain.softmax(1).max(1).values >= threshold).to(plain.dtype)
    ballots = F.one_hot(helpers.argmax(2), plain.shape[1]).sum(0)
    votes = F.one_hot(plain.argmax(1), plain.shape[1]) + present * ballots
    return mask, votes.argmax(1)


def _losses(
    plain: Tensor, strong: Tensor, helpers: Tensor, present: Tensor, mask: Tensor, pseudo: Tensor
) -> tuple[Tensor, Tensor]:
    """The inter-client consistency, and the cross entropy of each image's strong view with its pseudo label."""
    target = helpers.log_softmax(2)
    divergence = (target.exp() * (target - plain.log_softmax(1))).sum(2).mean(0)
    return present * _mean_of_confident(divergence, mask), cross_entropy(strong, pseudo)


def _mean_of_confident(values: Tensor, mask: Tensor) -> Tensor:
    return (mask * values).sum() / mask.sum().clamp(min=1)


def _regularised(
    gradient: Tensor, sigma: Tensor, psi: Tensor, ordinary: Tensor, lambda_1: float, lambda_2: float
) -> Tensor:
    return ordinary * (gradient + lambda_1 * psi.sign() + 2 * lambda_2 * (psi - sigma))


def _difference(new: Tensor, old: Tensor) -> int:
    """Bytes of the values that changed and of the bits that say which."""
    return 4 * int(((new - old).abs() > CHANGED).sum()) + -(-new.numel() // 8)
