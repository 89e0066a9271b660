"""What the benchmarks share: where they ran, how they time, how they report."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddure import environment, experiments
from feddure.config import Experiment
from feddure.data.batches import Batch
from feddure.data.dataset import Dataset
from feddure.errors import FeddureError
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Task
from feddure.simulation.program import new_heads, new_module


def _tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A mistake in what was asked for is told as feddure's commands tell it."""
    if isinstance(error, FeddureError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _tell


def noise_images(side: int = 32, channels: int = 3, classes: int = 10, number: int = 1000, tests: int = 100) -> Dataset:
    """A data set of noise: the time of a step does not depend on what the images show."""
    generator = np.random.RandomState(0)
    images = generator.randint(0, 256, (number, side, side, channels)).astype(np.uint8)
    labels = (np.arange(number) % classes).astype(np.int64)
    names = tuple(map(str, range(classes)))
    mean, std = (0.5,) * channels, (0.25,) * channels
    return Dataset("noise", images, labels, images[:tests], labels[:tests], names, mean, std)


def make_tasks(engine: Engine, experiment: Experiment, dataset: Dataset, clients: int, steps: int) -> list[Task]:
    """One task a client, its batches made beforehand: augmentation is not part of what is timed."""
    program = engine.program(experiment, dataset)
    needs, dtype = program.method.needs, program.network.compute
    module = new_module(experiment, dataset)
    theta, statistics_ = program.network.take(module, new_heads(experiment, module, program.network.classifier))
    program.method.prepare(program.network, dataset.shape)
    state = program.method.start(theta, statistics_, len(dataset.classes), experiment.seed)
    state |= {"averaged.theta": theta, "averaged.statistics": statistics_}
    generator = torch.Generator().manual_seed(0)

    def images(*rows: int) -> torch.Tensor:
        height, width, channels = dataset.shape
        made = torch.randn(steps, *rows, height, width, channels, generator=generator)
        return made.to(engine.device, dtype).movedim(-1, -3)

    def classes(rows: int) -> torch.Tensor:
        return torch.randint(0, len(dataset.classes), (steps, rows), generator=generator).to(engine.device)

    labelled = experiment.labelled_batch
    wanted = experiment.unlabelled_batch if needs.unlabelled else 0
    assert isinstance(wanted, int)
    tasks = []
    for client in range(clients):
        batch = Batch(
            labelled=images(labelled),
            labels=classes(labelled),
            plain=images(wanted if needs.plain else 0),
            weak=images(wanted if needs.weak else 0),
            strong=images(*((int(needs.strong), wanted) if needs.strong > 1 else (wanted if needs.strong else 0,))),
            truth=classes(wanted),
            index=classes(wanted),
        )
        received = program.method.broadcast(state, client, 1)
        tasks.append(Task(program, client, steps, batch, received, (0, 1, client), torch.ones(len(dataset.classes))))
    return tasks


def load(method: str, sets: Sequence[str] = (), **changes: Any) -> Experiment:
    """The aaai24 experiment with this method and these fields changed; `engine__lanes` means engine.lanes."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return experiments.load("aaai24", changes={"method": method, **dotted}, sets=list(sets))


def seconds(work: Callable[[], Any], repeats: int, warm_up: int = 1) -> list[float]:
    """Wall time of each repeat, the device idle before and after."""
    found = []
    for number in range(warm_up + repeats):
        _synchronise()
        began = time.perf_counter()
        work()
        _synchronise()
        if number >= warm_up:
            found.append(time.perf_counter() - began)
    return found


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Median, least and most."""
    scaled = [value * scale for value in values]
    return {"median": statistics.median(scaled), "least": min(scaled), "most": max(scaled), "repeats": len(scaled)}


def finish(report: dict[str, Any], file: Path | None) -> None:
    """Print the report with its environment, and write it where asked."""
    report = {**report, "environment": environment.describe()}
    text = json.dumps(report, indent=1)
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
