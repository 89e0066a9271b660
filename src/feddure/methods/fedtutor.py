"""FedTutor (this project): pseudo labels from the federation's own average, frozen for the round.

What holds federated semi-supervised learning back is who makes the pseudo labels: a local model labels its images
*while it drifts*. Here the server's average over rounds θ̄ (or the global model it sent) labels them, softly and all of
them, sure or not; that also keeps the client from drifting. With q_i = softmax f(T_w(u_i); θ̄), running statistics and
no gradient, one local step is

    L = CE(y, f(x)) + λ mean_i ℓ_i,    ℓ_i = −Σ_c q_i(c) log p_i(c)                       (soft)
                                       ℓ_i = 1[max q_i ≥ τ] CE(argmax q_i, p_i)           (hard)
                                       hard where max q_i ≥ τ, soft elsewhere             (mixed)

with p_i = softmax f(T_s(u_i)); the student's pass is [x; T_s(u)]. `view: weak` puts T_w(u) in place of T_s(u), for
images that strong views distort too much. `calibrate` tells a client its own class mixes: the losses see the logits
+ a log π, with π_l = (n_c + 1) / (n + C) of its labelled images and π_u the mean of q over the round. `contrast` adds
ProxyFL's L_c on the student's features of u, with q as the images' classes, the labels as those of x, and a uniform π,
so that nothing but the model is sent. The tutor is frozen, so q of all steps is made in large batches before them.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddure.config import Experiment
from feddure.data.batches import Batch, Needs
from feddure.errors import ConfigError
from feddure.methods import base, proxyfl
from feddure.methods.base import Client, State, mean, record
from feddure.methods.teacher import DECAY, Source, WithTeacher, soft_cross_entropy


class Options(base.Options):
    """FedTutor's tutor, targets and calibration; the other values are controls."""

    tutor: Literal["average", "global"] = Field(
        "average", description="Who labels: the average of the global model over rounds, or the model of this round."
    )
    targets: Literal["mixed", "soft", "hard"] = Field(
        "soft", description="The tutor's probabilities, its class where it is sure, or the one and else the other."
    )
    threshold: float = Field(0.95, ge=0, le=1, description="Least confidence τ of a hard target.")
    weight: float = Field(1.0, ge=0, description="Weight λ of the tutor's loss.")
    view: Literal["strong", "weak"] = Field(
        "strong", description="The student's view of unlabelled images; weak is the one that the tutor labelled."
    )
    on: Literal["unlabelled", "labelled", "both"] = Field(
        "unlabelled", description="Images that the tutor labels; labelled ones alone are distillation as in FedGKD."
    )
    calibrate: Literal["none", "labelled", "both"] = Field(
        "none", description="Losses that are told the client's own class mix."
    )
    strength: float = Field(1.0, ge=0, description="How much of the class mix a calibrated loss is told.")
    contrast: float = Field(
        0.0, ge=0, description="Weight of ProxyFL's contrast of features with proxies of the tutor's classes."
    )
    shuffle: bool = Field(False, description="A control: the tutor's predictions go to the wrong images.")


class FedTutor(WithTeacher):
    """Soft pseudo labels from the averaged global model."""

    name = "fedtutor"
    title = "FedTutor"
    section = "fedtutor"
    Options = Options
    needs = Needs(weak=True, strong=True)
    passes = 1.2
    ema = DECAY

    def __init__(self, experiment: Experiment):
        super().__init__(experiment)
        if self.options.contrast and self.options.on == "labelled":
            raise ConfigError(
                "fedtutor.contrast: it is about unlabelled images; set fedtutor.on=unlabelled or both, or contrast=0"
            )
        if self.options.view == "weak":
            self.needs = Needs(weak=True)

    @property
    def source(self) -> Source:
        return self.options.tutor

    @property
    def has_heads(self) -> bool:
        return self.options.contrast > 0 or type(self).heads is not FedTutor.heads

    def heads(self, features: int, classes: int) -> Mapping[str, nn.Module]:
        return proxyfl.heads(features)

    # --- a client's round ----------------------------------------------------------------------------
    def allocate(self, client: Client) -> None:
        client.state["log_prior"] = client.theta.new_zeros(2, client.classes)  # of labelled and unlabelled images

    def before_steps(self, client: Client, batches: Batch) -> State:
        """The tutor's probabilities for the images of all steps, and the client's class mixes."""
        views = {"labelled": batches.labelled, "unlabelled": batches.weak}
        wanted = views if self.options.on == "both" else {self.options.on: views[self.options.on]}
        found = {name: client.frozen(self.teacher, images).softmax(-1) for name, images in wanted.items()}
        self._calibrate(client, found)
        if self.options.shuffle:
            flat = {name: q.flatten(0, 1) for name, q in found.items()}
            found = {name: q.roll(len(q) // 2, 0).view_as(found[name]) for name, q in flat.items()}
        return found

    def _calibrate(self, client: Client, found: Mapping[str, Tensor]) -> None:
        prior, strength = client.state["log_prior"], self.options.strength
        if self.options.calibrate != "none":
            counts = client.class_counts
            prior[0].copy_(strength * ((counts + 1) / (counts.sum() + client.classes)).log())
        q = found.get("unlabelled")
        if self.options.calibrate == "both" and q is not None and q.numel():
            prior[1].copy_(strength * (q.flatten(0, 1).mean(0) + 1e-3).log())

    def step(self, client: Client, batch: Batch) -> State:
        unlabelled = getattr(batch, self.options.view)
        if self.options.contrast:
            (on_x, of_x), (on_u, of_u) = client.features(batch.labelled, unlabelled)
            contrast = mean(self.contrast(client, batch, torch.cat([of_u, of_x])))
        else:
            (on_x, on_u), contrast = client.model(batch.labelled, unlabelled), client.theta.new_zeros(())
        prior_x, prior_u = client.state["log_prior"]
        supervised = mean(base.cross_entropy(on_x + prior_x, batch.labels))
        losses = {}
        if "labelled" in batch.made:
            losses["labelled"] = self.loss(batch.made["labelled"], on_x + prior_x)
        if "unlabelled" in batch.made:
            losses["unlabelled"] = self.loss(batch.made["unlabelled"], on_u + prior_u)
        taught = self.options.weight * sum(mean(values) for values in losses.values())
        client.descend(supervised + taught + self.options.contrast * contrast)
        q = batch.made.get("unlabelled", on_u.detach().softmax(1))
        found = losses.get("unlabelled", on_u.new_zeros(len(on_u)))
        least = self.options.threshold if self.options.targets == "hard" else 0.0
        return record(supervised, found, (q.amax(1) >= least).to(found), q.argmax(1))

    def contrast(self, client: Client, batch: Batch, features: Tensor) -> Tensor:
        """L_c of the unlabelled images, whose features come first; the labelled ones are pushed away alone."""
        z = F.normalize(client.head("feature", features))
        proxies = F.normalize(client.head("proxy", client.classifier))
        labels = F.one_hot(batch.labels, client.classes).to(z.dtype)
        q = torch.cat([batch.made["unlabelled"], labels])
        uniform = torch.full_like(q[0], 1 / client.classes)
        return proxyfl.contrast(z, proxies, q, q.amax(1) >= self.options.threshold, uniform, len(batch.index))

    def loss(self, q: Tensor, logits: Tensor) -> Tensor:
        """ℓ of each image."""
        soft = soft_cross_entropy(logits, q)
        if self.options.targets == "soft":
            return soft
        confidence, label = q.max(1)
        hard = base.cross_entropy(logits, label)
        sure = confidence >= self.options.threshold
        return torch.where(sure, hard, soft if self.options.targets == "mixed" else torch.zeros_like(soft))
