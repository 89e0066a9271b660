"""SAGE: semi-supervised aggregation for globally-enhanced ensemble (Liu et al., CVPR 2025).

The local model p (on T_w(u), in training) and the received global model q (frozen) both label. Where the local model is
sure, the target mixes both classes, the more of the local one the closer their confidences c = max are; elsewhere it is
the global model's class:

    a_i = exp(−(ln 2 / κ) |c_p − c_q|)
    t_i = a_i e(argmax p_i) + (1 − a_i) e(argmax q_i)   where c_p ≥ τ,   else e(argmax q_i)
    L = CE(y, f(x)) + λ mean_i 1[c_p ≥ τ or c_q ≥ τ] CE(t_i, f(T_s(u_i)))
"""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddure.data.batches import Batch, Needs
from feddure.methods import base
from feddure.methods.base import Client, Method, State, cross_entropy, mean, record
from feddure.methods.teacher import either_is_sure, soft_cross_entropy


class Options(base.Options):
    """SAGE's threshold and how fast it turns to the global model."""

    threshold: float = Field(0.95, ge=0, le=1, description="Least confidence τ of a model that is sure.")
    half_life: float = Field(
        0.05, gt=0, description="Difference κ of the two confidences at which the local class counts half."
    )
    weight: float = Field(1.0, ge=0, description="Weight λ of the unlabelled loss.")


class SAGE(Method):
    """Targets between the local and the global model's classes."""

    name = "sage"
    title = "SAGE"
    section = "sage"
    Options = Options
    needs = Needs(weak=True, strong=True)
    passes = 1.2

    def before_steps(self, client: Client, batches: Batch) -> State:
        return {"global": client.frozen("global", batches.weak)}

    def step(self, client: Client, batch: Batch) -> State:
        labelled, weak, strong = client.model(batch.labelled, batch.weak, batch.strong)
        targets, counted = self.targets(weak.detach().softmax(1), batch.made["global"].softmax(1))
        losses = soft_cross_entropy(strong, targets)
        supervised = mean(cross_entropy(labelled, batch.labels))
        client.descend(supervised + self.options.weight * mean(counted * losses))
        return record(supervised, losses, counted, targets.argmax(1))

    def targets(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The target of each image, and 1 where it counts."""
        (sure_p, own), (sure_q, theirs) = p.max(1), q.max(1)
        closeness = torch.exp(-(math.log(2) / self.options.half_life) * (sure_p - sure_q).abs())
        share = torch.where(sure_p >= self.options.threshold, closeness, torch.zeros_like(closeness)).unsqueeze(1)
        own, theirs = (F.one_hot(label, p.shape[1]).to(p.dtype) for label in (own, theirs))
        return share * own + (1 - share) * theirs, either_is_sure(p, q, self.options.threshold)
