"""FixMatch (Sohn et al., 2020) on every client, aggregated by FedAvg or FedProx.

L = CE(y, f(T_w(x))) + λ mean_i 1[max p_i ≥ τ] CE(ŷ_i, f(T_s(u_i))), with p_i = softmax f(T_w(u_i)) and ŷ_i its argmax.
`fixmatch.pseudo` and `fixmatch.targets` give its relatives in the literature: FixMatch-LPL and -GPL (pseudo labels of
the local, of the global model), and the same with soft targets on all images.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from feddure.data.batches import Batch, Needs
from feddure.methods import base
from feddure.methods.base import Client, State, cross_entropy, mean, record
from feddure.methods.teacher import Source, WithTeacher, soft_cross_entropy


class Options(base.Options):
    """FixMatch's confidence threshold and weight."""

    threshold: float = Field(0.95, ge=0, le=1, description="Least confidence τ of a pseudo label that counts.")
    weight: float = Field(1.0, ge=0, description="Weight λ of the unlabelled loss.")
    pseudo: Source = Field(
        "local", description="Who makes pseudo labels: the client's model, the global one it received, or its average."
    )
    targets: Literal["hard", "soft"] = Field(
        "hard", description="The likeliest class where it is sure enough, or probabilities on every image."
    )


def confident(weak: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Pseudo labels, and 1 where the model is sure of them."""
    confidence, pseudo = weak.detach().softmax(1).max(1)
    return pseudo, (confidence >= threshold).to(weak.dtype)


class FedAvgFixMatch(WithTeacher):
    """FixMatch with FedAvg: the paper's baseline."""

    name = "fedavg-fixmatch"
    title = "FedAvg-FixMatch"
    section = "fixmatch"
    Options = Options
    needs = Needs(weak=True, strong=True)

    def step(self, client: Client, batch: Batch) -> State:
        labelled, weak, strong = self.views(client, batch)
        pseudo, mask = confident(weak, self.options.threshold)
        losses = cross_entropy(strong, pseudo)
        if self.options.targets == "soft":
            losses, mask = soft_cross_entropy(strong, weak.softmax(1)), torch.ones_like(mask)
        supervised = mean(cross_entropy(labelled, batch.labels))
        client.descend(supervised + self.options.weight * mean(mask * losses))
        return record(supervised, losses, mask, pseudo)


class FedProxFixMatch(FedAvgFixMatch):
    """FixMatch with FedProx."""

    name = "fedprox-fixmatch"
    title = "FedProx-FixMatch"
    proximal = 0.01
