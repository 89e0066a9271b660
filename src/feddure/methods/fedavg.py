"""FedAvg (McMahan et al., 2017) and FedProx (Li et al., 2020) on labelled images.

`fedavg` is the paper's FedAvg*: one pass over a client's labelled images a round. `fedavg-matched`, called "labels
only" here, takes as many steps as the methods that also use unlabelled images: the fair yardstick for them.
`fedavg-sl` and `fedprox-sl` see the true label of every image a client has: the fully supervised upper bound.
"""

from feddure.data.batches import Batch, Needs
from feddure.methods.base import Client, Method, State, cross_entropy, mean


class FedAvg(Method):
    """Cross entropy on labelled images."""

    name = "fedavg"
    title = "FedAvg*"

    def steps(self, labelled: int, unlabelled: int, unlabelled_batch: int) -> int:
        return max(1, round(labelled / self.experiment.labelled_batch))

    def step(self, client: Client, batch: Batch) -> State:
        (logits,) = client.model(batch.labelled)
        loss = mean(cross_entropy(logits, batch.labels))
        client.descend(loss)
        return {"loss": loss.detach()}


class FedAvgMatched(FedAvg):
    """Labels only, with the number of local steps of the methods that use unlabelled images."""

    name = "fedavg-matched"
    title = "Labels only"
    steps = Method.steps


class FedAvgSL(FedAvg):
    """Every training label used: one pass over all of the client's images."""

    name = "fedavg-sl"
    title = "FedAvg-SL"
    needs = Needs(every_label=True)

    def steps(self, labelled: int, unlabelled: int, unlabelled_batch: int) -> int:
        return max(1, round((labelled + unlabelled) / self.experiment.labelled_batch))


class FedProxSL(FedAvgSL):
    """The same with FedProx's pull towards the global model."""

    name = "fedprox-sl"
    title = "FedProx-SL"
    proximal = 0.01
