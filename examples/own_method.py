"""A method of your own in a few lines, beside the yardstick with the same number of local steps.

    python examples/own_method.py

Entropy minimisation (Grandvalet & Bengio, 2005): unlabelled images should be classified with confidence.
"""

import argparse

import torch
from pydantic import Field
from torch import Tensor

import feddure


class EntropyMinimisation(feddure.Method):
    """Cross entropy on labelled images plus the predictions' entropy on unlabelled ones."""

    class Options(feddure.Options):
        weight: float = Field(0.3, ge=0, description="Weight of the entropy.")

    needs = feddure.Needs(weak=True)

    def step(self, client: feddure.Client, batch: feddure.Batch) -> dict[str, Tensor]:
        labelled, weak = client.model(batch.labelled, batch.weak)
        supervised = feddure.mean(feddure.cross_entropy(labelled, batch.labels))
        entropy = -(weak.softmax(1) * weak.log_softmax(1)).sum(1)
        client.descend(supervised + self.options.weight * feddure.mean(entropy))
        return feddure.record(supervised, entropy, torch.ones_like(entropy), weak.argmax(1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    for method in (EntropyMinimisation, "fedavg-matched"):
        run = feddure.run("demo", method=method, rounds=rounds, progress=False, sets={"options.weight": 0.1})
        print(f"{run.experiment.method}: accuracy {run.summary.accuracy_last:.3f}, report in {run.folder}")
