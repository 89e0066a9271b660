"""The loop: sample, train, aggregate, evaluate; for one federation or for many at once."""

import math
import time
import warnings
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from feddure import rng as draws
from feddure.config import Experiment
from feddure.data.batches import Order
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods.base import Method
from feddure.simulation.diagnostics import diagnose
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Result, Task
from feddure.simulation.server import Answer, Assignment, Holding, Server, make_order

STATISTICS_IMAGES = 2000
"""Training images of a round's clients from which `batch_norm: static` recomputes statistics."""


class Federation(Server):
    """One experiment between rounds, simulated: the server, and the clients' images and memories."""

    def __init__(self, experiment: Experiment, dataset: Dataset, partition: Partition, engine: Engine):
        holdings = [Holding(len(x), len(u)) for x, u in zip(partition.labelled, partition.unlabelled, strict=True)]
        super().__init__(experiment, dataset, holdings, engine, partition.sha256)
        self.partition = partition
        _expect_labels(self.method, dataset)
        self.feed = engine.feed(dataset)

    # --- one round -----------------------------------------------------------------------------------
    def tasks(self) -> list[Task]:
        """The next round's work."""
        assignments = self.assignments()
        orders = [self._order(assignment) for assignment in assignments]
        number = self.round + 1
        batches = self.feed.batches(orders, self.experiment.seed, number) if orders else []
        return [
            Task(
                self.program,
                assignment.client,
                assignment.steps,
                batch,
                self.broadcast(assignment),
                (assignment.seed, assignment.round, assignment.client),
                self.memories.get(assignment.client, {}),
            )
            for assignment, batch in zip(assignments, batches, strict=True)
        ]

    def absorb(self, tasks: Sequence[Task], results: Sequence[Result]) -> dict:
        """Aggregate a round's results; returns its record."""
        pairs = list(zip(tasks, results, strict=True))
        record, left_out = self.conclude(
            [Answer(task.client, task.steps, task.received, result.upload) for task, result in pairs]
        )
        if left_out:
            warnings.warn(
                f"round {self.round}: the updates of clients {sorted(left_out)} are not finite and were left out",
                FeddureWarning,
                stacklevel=2,
            )
        used = [(task, result) for task, result in pairs if task.client not in left_out]
        for task, result in used:
            if result.memory:
                self.memories[task.client] = result.memory
        records = [_on_host(result.records) for _, result in used]
        record["train"] = _means(records)
        truths = [task.batches.truth.cpu().numpy() for task, _ in used]
        diagnostics = diagnose(records, truths, len(self.dataset.classes))
        return record | ({"diagnostics": diagnostics} if diagnostics else {})

    def as_evaluated(self, theta: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """The model itself, or with statistics of its own where `batch_norm` is static."""
        if self.experiment.batch_norm != "static":
            return theta, statistics
        clients = self.sample(max(self.round, 1))
        owned = np.concatenate([x[c] for c in clients for x in (self.partition.labelled, self.partition.unlabelled)])
        order = draws.sample(len(owned), STATISTICS_IMAGES, self.experiment.seed, "statistics", self.round)
        images = self.feed.plain(owned[order])
        return theta, self.program.network.measure_statistics(theta, statistics, list(images.split(250)))

    def _order(self, assignment: Assignment) -> Order:
        labelled, unlabelled = (
            part[assignment.client] for part in (self.partition.labelled, self.partition.unlabelled)
        )
        return make_order(self.experiment, self.method, assignment, labelled, unlabelled)


class Observer:
    """Something that watches rounds: a progress bar, a log, a checkpoint."""

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        """A round of `federation` has been aggregated, and evaluated where due."""

    def close(self) -> None:
        """No further round comes."""


def prepare(federations: Sequence[Federation], engine: Engine) -> None:
    """Compile and capture what the rounds and evaluations of these federations need, before any clock runs."""
    engine.prepare([task for federation in federations for task in federation.tasks()])
    if engine.compiles:
        for federation in {id(f.program.network): f for f in federations}.values():
            federation.test()


def run(federations: Sequence[Federation], engine: Engine, observers: Sequence[Observer] = ()) -> None:
    """All rounds of all federations, sharing the lanes."""
    active = [f for f in federations if f.round < f.experiment.rounds]
    while active:
        began = time.perf_counter()
        work = [federation.tasks() for federation in active]
        results = iter(engine.run([task for tasks in work for task in tasks]))
        for federation, tasks in zip(active, work, strict=True):
            record = federation.absorb(tasks, [next(results) for _ in tasks])
            if federation.due():
                record |= federation.test()
            seconds = time.perf_counter() - began
            for observer in observers:
                observer.round_done(federation, record, seconds)
        active = [f for f in active if f.round < f.experiment.rounds]


def _expect_labels(method: Method, dataset: Dataset) -> None:
    unknown = int((dataset.labels == UNKNOWN).sum())
    if method.needs.every_label and unknown:
        raise ConfigError(
            f"method '{method.experiment.method}' learns from the labels of all images, but {unknown} of "
            f"{len(dataset.labels)} images in '{dataset.name}' have a class that is not known; use another method"
        )


def _on_host(records: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().cpu().numpy() for name, tensor in records.items()}


def _means(clients: Sequence[dict[str, np.ndarray]]) -> dict[str, float | None]:
    """Each 0-d quantity that steps recorded, averaged over all steps of the round."""
    found: dict[str, float | None] = {}
    for name in clients[0] if clients else ():
        if clients[0][name].ndim == 1:
            value = float(np.concatenate([records[name] for records in clients]).mean())
            found[name] = value if math.isfinite(value) else None
    return found
