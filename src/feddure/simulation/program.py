"""A program: one method with its options on one network, ready to run on any client.

Federations on one engine that differ only in seed, partition or server share a program, and with it lanes, compiled
code and captured graphs.
"""

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.nn import Module

from feddure import methods, nn, rng
from feddure.config import Experiment
from feddure.data.batches import Batch
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureError, FeddureWarning, first_line
from feddure.methods.base import Client, State
from feddure.methods.validation import check_heads, check_records, watching_step
from feddure.nn.network import Network, expect_classifier

T = TypeVar("T")

_NOT_IN_A_STEP = {
    "dataset", "seed", "rounds", "clients_per_round", "partition", "server", "evaluate_every", "checkpoint_every",
    "probe_every", "validation", "batch_norm", "local_steps", "labelled_batch", "unlabelled_batch", "labelled_cutout",
    "engine", "attack", "init", "init_sha256", "metric",
}  # fmt: skip


def key(experiment: Experiment, dataset: Dataset) -> str:
    """Two experiments with the same key can share lanes."""
    return json.dumps([fields(experiment), dataset.shape, len(dataset.classes)])


def fields(experiment: Experiment) -> str:
    """All of an experiment that a step depends on, for images of a given shape."""
    scheduled = {"rounds"} if experiment.optimizer.schedule != "constant" else set()
    return json.dumps(experiment.model_dump(exclude=_NOT_IN_A_STEP - scheduled), sort_keys=True, default=str)


class Program:
    """What lanes execute."""

    def __init__(self, experiment: Experiment, network: Network, classes: int, captures: bool):
        self.experiment = experiment
        self.network = network
        self.classes = classes
        self.method = methods.make(experiment)
        self.proximal = self.method.proximal if experiment.proximal is None else experiment.proximal
        self.captures = captures
        self.threads = True  # until its step turns out to need one thread
        self._steps = 0  # that have begun, up to the one that is watched

    def cost(self, batch: Batch) -> float:
        """Relative cost of a step: the number of images in it."""
        return float(sum(tensor.shape[1:-3].numel() for tensor in batch.tensors() if tensor.dim() >= 5)) + 30.0

    def step(self, client: Client, batch: Batch) -> State:
        """One local step of the method, which sees the views that it needs; what it recorded."""
        name = self.experiment.method
        self._steps += 1
        # The first may compile, and compilers draw numbers to try what they have made.
        watched = watching_step(self.method, name, self.network.draws) if self._steps == 2 else nullcontext()
        with watched:
            return check_records(self.method.step(client, batch.for_method(name, self.method.needs)), name)

    def attempt(self, work: Callable[[], T]) -> T:
        """Do something with the network; one that does not compile is run as it is from then on."""
        try:
            return work()
        except (torch.cuda.OutOfMemoryError, FeddureError):
            raise  # no fault of the compiler's: whoever asked may try again with fewer lanes, or mend the method
        except Exception as error:
            if not self.network.compiled:
                raise
            self.network.stop_compiling()
            warnings.warn(f"the network does not compile and runs uncompiled ({first_line(error)})", FeddureWarning, 2)
            return work()

    def give_up_capturing(self, error: Exception) -> None:
        """A step that cannot be captured is run eagerly from then on."""
        self.captures = False
        warnings.warn(
            f"method '{self.experiment.method}' with model '{self.experiment.model}' cannot be captured as a CUDA "
            f"graph and runs eagerly ({first_line(error)})",
            FeddureWarning,
            stacklevel=2,
        )


def make_network(experiment: Experiment, dataset: Dataset, device, precision: str, compiled: bool) -> Network:
    """The experiment's network without its weights."""
    module = new_module(experiment, dataset)
    classifier = _expect_logits(module, experiment.model, dataset)
    network = Network(module, device, precision, compiled, classifier, new_heads(experiment, module, classifier))
    network.draws = experiment.model not in nn.NETWORKS and _draws(module, experiment.model, dataset)
    return network


def _expect_logits(module: Module, name: str, dataset: Dataset) -> str:
    """Try two black images: what a network cannot do is better said now than from inside a round.

    Returns the path of the linear layer whose output the logits are, or nothing.
    """
    if not isinstance(module, Module):
        raise ConfigError(f"model '{name}' made a {type(module).__name__}, expected a torch.nn.Module")
    (height, width, channels), classes = dataset.shape, len(dataset.classes)
    made: dict[Module, torch.Tensor] = {}
    linear: dict[Module, str] = {
        layer: path for path, layer in module.named_modules() if type(layer) is torch.nn.Linear
    }
    hooks = [layer.register_forward_hook(lambda layer, _, output: made.update({layer: output})) for layer in linear]
    try:
        with torch.no_grad():
            dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
            logits = module.eval()(torch.zeros(2, channels, height, width, dtype=dtype))
    except Exception as error:
        raise ConfigError(
            f"model '{name}' cannot take images of {height} × {width} pixels with {channels} channels "
            f"({first_line(error)}); use another network, or other images: those of a "
            "folder may be read as folder:PATH?size=64&channels=3"
        ) from error
    finally:
        module.train()
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, classes):
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigError(f"model '{name}' gave {found} for two images, expected logits [2, {classes}]")
    return next((linear[layer] for layer, output in made.items() if output is logits), "")


def _draws(module: Module, name: str, dataset: Dataset) -> bool:
    """Whether a pass in training draws random numbers, as dropout does: from PyTorch's stream, not by the seed."""
    height, width, channels = dataset.shape
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    trial = copy.deepcopy(module).train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        images = torch.zeros(4, channels, height, width, dtype=dtype).normal_()
        logits = [trial(images) for _ in range(2)]
    if not isinstance(logits[0], torch.Tensor):
        raise ConfigError(f"model '{name}' gave {type(logits[0]).__name__} in training, expected logits alone")
    if torch.equal(*logits):
        return False
    warnings.warn(
        f"model '{name}' draws random numbers in training (dropout, perhaps), which the seed does not decide: a "
        "run cannot be repeated or resumed to the same numbers",
        FeddureWarning,
        stacklevel=2,
    )
    return True


def new_module(experiment: Experiment, dataset: Dataset):
    """The experiment's network, initialised by its seed."""
    norm = methods.make(experiment).norm
    return nn.make(experiment.model, dataset.shape[2], len(dataset.classes), norm, experiment.seed)


def new_heads(experiment: Experiment, module: Module, classifier: str) -> dict[str, Module]:
    """The heads of the experiment's method for a network with this classifier, initialised by its seed."""
    method = methods.make(experiment)
    if not method.has_heads:
        return {}
    layer: Any = module.get_submodule(expect_classifier(classifier))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(1 << 31, 1, experiment.seed, "heads")[0]))
        heads = method.heads(layer.in_features, layer.out_features)
    return check_heads(heads, experiment.method)
