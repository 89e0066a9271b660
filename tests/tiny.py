"""Federations small enough to run in a test: images of a few pixels, a few clients, float64 on a CPU."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from feddure import experiments
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run
from feddure.simulation.lanes import Result, Task
from feddure.simulation.server import Answer

EXPERIMENT: dict[str, Any] = {
    "dataset": "tiny",
    "method": "fedavg",
    "model": "cnn",
    "rounds": 2,
    "clients_per_round": 3,
    "local_steps": 2,
    "labelled_batch": 5,
    "unlabelled_batch": 6,
    "evaluate_every": 1,
    "partition.setting": "dir-dir",
    "partition.clients": 4,
    "partition.labels_per_class": 3,
    "engine.device": "cpu",
    "engine.precision": "fp64",
}


def dataset(
    size: int = 160, tests: int = 60, classes: int = 4, side: int = 12, channels: int = 1, **fields: Any
) -> Dataset:
    """Noise with one bright band a class, so that there is something to learn."""
    random = np.random.RandomState(size + side)
    labels = np.arange(size + tests, dtype=np.int64) % classes
    pixels = random.randint(0, 120, size=(len(labels), side, side, channels))
    for number, label in enumerate(labels):
        start = label * side // classes
        pixels[number, start : start + side // classes] += 120
    pixels = pixels.astype(np.uint8)
    about: dict[str, Any] = {
        "name": "tiny",
        "images": pixels[:size],
        "labels": labels[:size],
        "test_images": pixels[size:],
        "test_labels": labels[size:],
        "classes": tuple("abcdefghij"[:classes]),
        "mean": (0.35,) * channels,
        "std": (0.25,) * channels,
    }
    return Dataset(**(about | fields))


def experiment(changes: Mapping[str, Any] | None = None, **fields: Any) -> Experiment:
    """The tiny experiment with changes by dotted key."""
    return experiments.load(changes={**EXPERIMENT, **(changes or {}), **fields})


def partition(wanted: Experiment, images: Dataset) -> Partition:
    """The partition that the experiment describes."""
    return partitions.make(images, wanted.partition, wanted.partition_seed, wanted.validation)


def federation(
    wanted: Experiment,
    images: Dataset,
    engine: Engine | None = None,
    owned: Partition | None = None,
) -> Federation:
    """A federation before its first round, on an engine of its own where none is given."""
    return Federation(wanted, images, owned or partition(wanted, images), engine or Engine(wanted.engine))


def play_round(made: Federation) -> dict[str, Any]:
    """The record of a federation's next round."""
    tasks = made.tasks()
    return made.finish_round(tasks, made.engine.run(tasks))


def finished(
    wanted: Experiment, images: Dataset, engine: Engine | None = None, owned: Partition | None = None
) -> Federation:
    """A federation after its last round."""
    made = federation(wanted, images, engine, owned)
    run(made)
    return made


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names and, bit for bit, the same values."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    """Every expected tensor is there, and no element is off by more than this share of the tensor's largest."""
    for name, tensor in expected.items():
        difference = (found[name].cpu().double() - tensor.cpu().double()).abs()
        scale = tensor.double().abs().max().item() if tensor.numel() else 0.0
        worst = difference.max().item() if tensor.numel() else 0.0
        assert worst <= tolerance * scale, f"{name}: off by {worst:.3g}, largest value {scale:.3g}"


def poison(monkeypatch: pytest.MonkeyPatch, bad: Collection[int]) -> None:
    """The second client of these rounds sends NaN."""
    answer = Federation._answer

    def poisoned(federation: Federation, task: Task, result: Result) -> Answer:
        found = answer(federation, task, result)
        number, client = task.key[1:]
        if number not in bad or client != federation.server.sample(number)[1]:
            return found
        return replace(found, upload=found.upload | {"theta": torch.full_like(found.upload["theta"], torch.nan)})

    monkeypatch.setattr(Federation, "_answer", poisoned)
