"""A program: one method with its options on one network, ready to run on any client.

Federations that differ only in seed, partition or server share a program, and with it lanes, compiled code and
captured graphs.
"""

import json
import warnings
from collections.abc import Callable

from feddure import methods, nn
from feddure.config import Experiment
from feddure.data.batches import Batch
from feddure.data.dataset import Dataset
from feddure.errors import FeddureWarning
from feddure.nn.network import Network

_NOT_IN_A_STEP = {
    "dataset", "seed", "rounds", "clients_per_round", "partition", "server", "evaluate_every", "checkpoint_every",
    "batch_norm", "local_steps", "labelled_batch", "unlabelled_batch", "labelled_cutout", "engine",
}  # fmt: skip


def key(experiment: Experiment, dataset: Dataset) -> str:
    """Two experiments with the same key can share lanes."""
    fields = experiment.model_dump(exclude=_NOT_IN_A_STEP)
    return json.dumps([fields, dataset.shape, len(dataset.classes)], sort_keys=True, default=str)


class Program:
    """What lanes execute."""

    def __init__(self, experiment: Experiment, network: Network, classes: int, captures: bool):
        self.experiment = experiment
        self.network = network
        self.classes = classes
        self.method = methods.make(experiment)
        self.proximal = self.method.proximal if experiment.proximal is None else experiment.proximal
        self.captures = captures

    def cost(self, batch: Batch) -> float:
        """Relative cost of a step: the number of images in it."""
        return float(sum(tensor.shape[1] for tensor in batch.tensors() if tensor.dim() == 5)) + 30.0

    def warm_up(self, step: Callable[[], object]) -> None:
        """Run a step; a network that does not compile is run as it is from then on."""
        try:
            step()
        except Exception as error:
            if not self.network.compiled:
                raise
            self.network.stop_compiling()
            warnings.warn(f"the network does not compile and runs uncompiled ({_first_line(error)})", FeddureWarning, 2)
            step()

    def give_up_capturing(self, error: Exception) -> None:
        """A step that cannot be captured is run eagerly from then on."""
        self.captures = False
        warnings.warn(
            f"method '{self.experiment.method}' with model '{self.experiment.model}' cannot be captured as a CUDA "
            f"graph and runs eagerly ({_first_line(error)})",
            FeddureWarning,
            stacklevel=2,
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def make_network(experiment: Experiment, dataset: Dataset, device, precision: str, compiled: bool) -> Network:
    """The experiment's network without its weights."""
    return Network(new_module(experiment, dataset), device, precision, compiled)


def new_module(experiment: Experiment, dataset: Dataset):
    """The experiment's network, initialised by its seed."""
    norm = methods.make(experiment).norm
    return nn.make(experiment.model, dataset.shape[2], len(dataset.classes), norm, experiment.seed)
