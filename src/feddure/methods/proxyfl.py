"""ProxyFL: the classifier's rows as proxies of the classes (Chen & Wang, CVPR 2026, arXiv:2602.21078).

A client learns with the received global model q (frozen) beside its own p (on T_w(u), in training). An image u_i counts
where max p_i ≥ τ or max q_i ≥ τ, an image x_i where max q_i ≥ τ:

    L = CE(y, f(x)) + mean_i 1[u_i counts] CE(argmax q_i, f(T_s(u_i))) + L_c

L_c works on z = normalised W_f h + b of the features h of x, T_w(u) and T_s(u), and on proxies w̃_c = normalised W_p ω_c
of the classifier's rows ω. An image is of the classes S_i = {argmax q_i} where it counts, else {c: q_i(c) > π_c}, and

    z_i⁺ = z_i · w̃_{argmax q_i}   where it counts,   else   z_i · Σ_{c ∈ S_i} q_i(c) w̃_c
    L_c = mean over T_w(u), T_s(u) of −log (exp z_i⁺ / (exp z_i⁺ + Σ_j exp z_i · z_j))

with j over all images that share no class with i and have z_i · z_j ≥ 1e-6. π, first uniform, is the server's average
over rounds of the classes that clients count, y and argmax q_i, in their last epoch. After averaging, the server tunes
the rows Ω by gradient descent on all uploaded ones (ω_m^c, c): cross entropy of −(‖ω_m^c − Ω_k‖ + m 1[k = c]),
m = max_c min_{k≠c} ‖Ω̄_c − Ω̄_k‖.
"""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddure.data.batches import Batch, Needs, cycle
from feddure.errors import FeddureWarning, first_line
from feddure.methods import base
from feddure.methods.base import Client, Method, State, cross_entropy, mean, record, weighted_mean
from feddure.methods.teacher import either_is_sure
from feddure.nn.network import Network

BATCH = 4
"""Rows in a step of the server's tuning."""
LEAST = 1e-6
"""The least similarity of two images that are pushed apart."""


class Options(base.Options):
    """ProxyFL's constants."""

    threshold: float = Field(0.95, ge=0, le=1, description="Least confidence τ of a model that is sure.")
    momentum: float = Field(0.99, ge=0, le=1, description="Of the average π of class counts over rounds.")
    local_epochs: int = Field(5, ge=1, description="Parts of a client's steps; classes are counted in the last one.")
    tuning_rate: float = Field(0.005, ge=0, description="Learning rate of the server's tuning of the rows.")
    tuning_epochs: int = Field(30_000, ge=0, description="Epochs of the tuning, spread evenly over all rounds.")
    most_margin: float = Field(100.0, ge=0, description="Bound of the margin m.")


class ProxyFL(Method):
    """Images beside proxies of their likely classes, which the server tunes."""

    name = "proxyfl"
    title = "ProxyFL"
    section = "proxyfl"
    Options = Options
    needs = Needs(weak=True, strong=True)
    passes = 1.3
    uploads_class_counts = True
    _network: Network

    def heads(self, features: int, classes: int) -> Mapping[str, nn.Module]:
        return heads(features)

    # --- a client's round ----------------------------------------------------------------------------
    def allocate(self, client: Client) -> None:
        client.state |= {name: client.theta.new_zeros(client.classes) for name in ("prior", "counts")}

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        client.state["prior"].copy_(received["prior"])

    def before_steps(self, client: Client, batches: Batch) -> State:
        """The global model's probabilities; and which steps are of the last local epoch."""
        views = {"labelled": batches.labelled, "unlabelled": batches.weak}
        found = {name: client.frozen("global", images).softmax(-1) for name, images in views.items()}
        last = client.theta.new_zeros(len(batches.labels))
        last[-max(1, len(last) // self.options.local_epochs) :] = 1
        return found | {"last": last}

    def step(self, client: Client, batch: Batch) -> State:
        (on_x, of_x), (on_weak, of_weak), (on_strong, of_strong) = client.features(
            batch.labelled, batch.weak, batch.strong
        )
        q_x, q = batch.made["labelled"], batch.made["unlabelled"]
        counted = either_is_sure(on_weak.detach().softmax(1), q, self.options.threshold)
        self.count_classes(client, batch, counted)
        losses = cross_entropy(on_strong, q.argmax(1))
        z = F.normalize(client.head("feature", torch.cat([of_weak, of_strong, of_x])))
        proxies = F.normalize(client.head("proxy", client.classifier))
        each = torch.cat([counted, counted, (q_x.amax(1) >= self.options.threshold).to(counted)])
        apart = contrast(z, proxies, torch.cat([q, q, q_x]), each, client.state["prior"], 2 * len(q))
        supervised = mean(cross_entropy(on_x, batch.labels))
        client.descend(supervised + mean(counted * losses) + mean(apart))
        return record(supervised, losses, counted, q.argmax(1)) | {"loss_proxy": mean(apart).detach()}

    def count_classes(self, client: Client, batch: Batch, counted: Tensor) -> None:
        """Labels, and the global model's classes of images that count, in a step of the last epoch."""
        counts, last = client.state["counts"], batch.made["last"]
        counts.index_add_(0, batch.labels, last.expand(len(batch.labels)))
        counts.index_add_(0, batch.made["unlabelled"].argmax(1), last * counted)

    def upload(self, client: Client) -> State:
        return super().upload(client) | {"counts": client.state["counts"]}

    # --- on the server -------------------------------------------------------------------------------
    def prepare(self, network: Network, shape: tuple[int, int, int]) -> None:
        self._network = network

    def start(self, theta: Tensor, statistics: Tensor, classes: int, seed: int) -> State:
        uniform = torch.full_like(theta[:1], 1 / classes).expand(classes).clone()
        return super().start(theta, statistics, classes, seed) | {"prior": uniform}

    def broadcast(self, server: State, client: int, round_number: int) -> State:
        return super().broadcast(server, client, round_number) | {"prior": server["prior"]}

    def aggregate(
        self,
        server: State,
        uploads: Sequence[State],
        weights: Sequence[float],
        clients: Sequence[int],
        round_number: int,
    ) -> State:
        made = weighted_mean([{name: upload[name] for name in ("theta", "statistics")} for upload in uploads], weights)
        counts = torch.stack([upload["counts"] for upload in uploads]).clamp(min=0).sum(0)
        share = torch.where(counts.sum() > 0, counts / counts.sum().clamp_min(1), server["prior"])
        prior = self.options.momentum * server["prior"] + (1 - self.options.momentum) * share
        rows, *uploaded = (self._rows(tensors["theta"]) for tensors in (made, *uploads))
        rows.copy_(self.tune(rows, torch.cat(uploaded), round_number))
        return {**server, **made, "prior": prior}

    def tune(self, rows: Tensor, uploaded: Tensor, round_number: int) -> Tensor:
        """The rows Ω after a round's share of the tuning; their order is a function of seed and round."""
        epochs = max(1, round(self.options.tuning_epochs / self.experiment.rounds)) if self.options.tuning_epochs else 0
        key = (self.experiment.seed, "proxyfl", round_number)
        orders = torch.from_numpy(cycle(np.arange(len(uploaded)), epochs * len(uploaded), *key)).to(rows.device)
        apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = apart.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), torch.inf).amin(1)
        margin = nearest.max().clamp(max=self.options.most_margin)
        return tune(rows, uploaded, margin, orders.view(epochs, len(uploaded)), self.options.tuning_rate)

    def _rows(self, theta: Tensor) -> Tensor:
        return self._network.rows(self._network.parameters.views(theta))


def contrast(z: Tensor, proxies: Tensor, q: Tensor, counted: Tensor, prior: Tensor, own: int) -> Tensor:
    """L_c of the first `own` images; all may be pushed away."""
    sure = counted.bool().unsqueeze(1)
    best = F.one_hot(q.argmax(1), q.shape[1]).to(q.dtype)
    classes = torch.where(sure, best, (q > prior).to(q.dtype))
    positive = (z[:own] * (torch.where(sure, best, q * classes)[:own] @ proxies)).sum(1, keepdim=True)
    similarity = z[:own] @ z.T
    pushed = (classes[:own] @ classes.T == 0) & (similarity >= LEAST)
    every = torch.cat([positive, similarity.masked_fill(~pushed, -torch.inf)], 1)
    return every.logsumexp(1) - positive.squeeze(1)


def heads(features: int) -> dict[str, nn.Module]:
    """W_f, b and W_p."""
    return {"feature": nn.Linear(features, features), "proxy": nn.Linear(features, features, bias=False)}


def tune(rows: Tensor, uploaded: Tensor, margin: Tensor, orders: Tensor, rate: float) -> Tensor:
    """The rows after an epoch of gradient descent on the uploaded ones in each of these orders."""
    if rows.is_cuda:
        try:
            from feddure.methods import proxyfl_kernel

            if proxyfl_kernel.fits(rows):
                return proxyfl_kernel.tune(rows, uploaded, margin, orders, rate, BATCH)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # no Triton, or no C compiler for what launches its kernels
            warnings.warn(f"ProxyFL tunes on the CPU, slowly: {first_line(error)}", FeddureWarning, stacklevel=2)
        return tune(rows.cpu(), uploaded.cpu(), margin.cpu(), orders.cpu(), rate).to(rows.device)
    rows, classes = rows.clone(), torch.eye(len(rows), dtype=rows.dtype).repeat(len(uploaded) // len(rows), 1)
    for chosen in (part for order in orders for part in order.split(BATCH)):
        target, apart = classes[chosen], uploaded[chosen].unsqueeze(1) - rows
        distance = torch.linalg.vector_norm(apart, dim=2)
        p = (-(distance + margin * target)).softmax(1)
        # The gradient of cross entropy, written out; where a distance is 0, so is what it pulls along.
        pull = (p - target) / distance.clamp_min(1e-30) / len(chosen)
        rows -= rate * (pull.unsqueeze(2) * apart).sum(0)
    return rows
