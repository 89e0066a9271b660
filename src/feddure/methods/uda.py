"""UDA (Xie et al., 2020) on every client, aggregated by FedAvg or FedProx.

L = CE(y, f(T_w(x))) + λ mean_i 1[max p_i ≥ τ] CE(q_i, f(T_s(u_i))), with p_i = softmax f(T_w(u_i)) and the soft target
q_i = softmax(f(T_w(u_i)) / temperature), both without gradient.
"""

from pydantic import Field

from feddure.data.batches import Batch, Needs
from feddure.methods import base
from feddure.methods.base import Client, Method, State, cross_entropy, mean, record
from feddure.methods.fixmatch import confident
from feddure.methods.teacher import soft_cross_entropy


class Options(base.Options):
    """UDA's confidence threshold, sharpening and weight."""

    threshold: float = Field(0.8, ge=0, le=1, description="Least confidence τ of a target that counts.")
    temperature: float = Field(0.4, gt=0, description="Temperature that sharpens the soft targets.")
    weight: float = Field(1.0, ge=0, description="Weight λ of the unlabelled loss.")


class FedAvgUDA(Method):
    """UDA with FedAvg."""

    name = "fedavg-uda"
    title = "FedAvg-UDA"
    section = "uda"
    Options = Options
    needs = Needs(weak=True, strong=True)

    def step(self, client: Client, batch: Batch) -> State:
        labelled, weak, strong = client.model(batch.labelled, batch.weak, batch.strong)
        pseudo, mask = confident(weak, self.options.threshold)
        targets = (weak.detach() / self.options.temperature).softmax(1)
        losses = soft_cross_entropy(strong, targets)
        supervised = mean(cross_entropy(labelled, batch.labels))
        client.descend(supervised + self.options.weight * mean(mask * losses))
        return record(supervised, losses, mask, pseudo)


class FedProxUDA(FedAvgUDA):
    """UDA with FedProx."""

    name = "fedprox-uda"
    title = "FedProx-UDA"
    proximal = 0.01
