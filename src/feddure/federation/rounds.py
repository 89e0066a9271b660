"""The loop: sample, train, aggregate, evaluate; for one federation or for many at once."""

import math
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from feddure import draws, methods
from feddure.config import Experiment
from feddure.data.batches import Order
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.geometry import PADDING
from feddure.data.partition import Partition
from feddure.errors import ConfigError, DataError, FeddureWarning
from feddure.federation import server
from feddure.federation.diagnostics import diagnose
from feddure.federation.engine import Engine
from feddure.federation.evaluate import evaluate
from feddure.federation.lanes import Result, Task
from feddure.federation.program import new_module
from feddure.methods.base import Method

STATISTICS_IMAGES = 2000
"""Training images of a round's clients from which `batch_norm: static` recomputes statistics."""


class Federation:
    """One experiment between rounds: the server's state and what clients remember."""

    def __init__(self, experiment: Experiment, dataset: Dataset, partition: Partition, engine: Engine):
        self.experiment = experiment
        self.dataset = dataset
        self.partition = partition
        self.engine = engine
        _expect_squares(dataset)
        self.program = engine.program(experiment, dataset)
        self.method = methods.make(experiment)  # the program's own is of the first experiment that shares it
        _expect_labels(self.method, dataset)
        self.feed = engine.feed(dataset)
        self.round = 0
        self.method.prepare(self.program.network, dataset.shape)
        theta, statistics = self.program.network.take(new_module(experiment, dataset))
        self.state = self.method.start(theta, statistics, len(dataset.classes), experiment.seed)
        self.moments: dict[str, Tensor] = {}
        self.averaged = [tensor.clone() for tensor in self.method.global_model(self.state)]
        self.memories: dict[int, dict[str, Tensor]] = {}
        self.clients = partition.clients
        unlabelled = sum(len(indices) for indices in partition.unlabelled)
        wanted = experiment.unlabelled_batch
        self.unlabelled_batch = max(1, round(unlabelled / self.clients / 5)) if wanted == "auto" else wanted

    # --- one round -----------------------------------------------------------------------------------
    def sample(self, round_number: int) -> list[int]:
        """The clients of a round, in drawing order; clients without any image are never drawn."""
        able = [c for c in range(self.clients) if len(self.partition.labelled[c]) + len(self.partition.unlabelled[c])]
        size = min(self.experiment.clients_per_round, len(able))
        return [able[i] for i in draws.sample(len(able), size, self.experiment.seed, "sample", round_number)]

    def order(self, client: int) -> Order:
        """What a client trains on in a round."""
        labelled, unlabelled = self.partition.labelled[client], self.partition.unlabelled[client]
        steps = self.method.steps(len(labelled), len(unlabelled), self.unlabelled_batch)
        if steps < 1:
            raise ConfigError(f"method '{self.experiment.method}': {steps} local steps, expected 1 or more")
        return Order(
            client=client,
            labelled=labelled,
            unlabelled=unlabelled,
            steps=steps,
            labelled_batch=self.experiment.labelled_batch,
            unlabelled_batch=self.unlabelled_batch,
            needs=self.method.needs,
            cutout=self.experiment.labelled_cutout,
        )

    def tasks(self) -> list[Task]:
        """The next round's work."""
        number = self.round + 1
        orders = [self.order(client) for client in self.sample(number)]
        # A client without anything this method learns from would only return the model it received.
        orders = [order for order in orders if any(len(pool) for pool in order.pools())]
        batches = self.feed.batches(orders, self.experiment.seed, number) if orders else []
        return [
            Task(
                self.program,
                order.client,
                order.steps,
                batch,
                self.method.broadcast(self.state, order.client, number),
                (self.experiment.seed, number, order.client),
                self.memories.get(order.client, {}),
            )
            for order, batch in zip(orders, batches, strict=True)
        ]

    def absorb(self, tasks: Sequence[Task], results: Sequence[Result]) -> dict:
        """Aggregate a round's results; returns its record."""
        self.round += 1
        finite = [task_result for task_result in zip(tasks, results, strict=True) if _is_finite(task_result[1])]
        left_out = sorted({task.client for task in tasks} - {task.client for task, _ in finite})
        if left_out:
            warnings.warn(
                f"round {self.round}: the updates of clients {left_out} are not finite and were left out",
                FeddureWarning,
                stacklevel=2,
            )
        communication = self._communication(tasks, results)
        if finite:
            before = self.state["theta"]
            weights = [self._weight(task.client) for task, _ in finite]
            clients = [task.client for task, _ in finite]
            uploads = [result.upload for _, result in finite]
            state = self.method.aggregate(self.state, uploads, weights, clients, self.round)
            state["theta"], self.moments = server.optimise(self.experiment.server, before, state["theta"], self.moments)
            self.state = state
            for task, result in finite:
                if result.memory:
                    self.memories[task.client] = result.memory
        if self.experiment.server.ema is not None:
            model = self.method.global_model(self.state)
            decay = self.experiment.server.ema
            self.averaged = [server.average(decay, a, c) for a, c in zip(self.averaged, model, strict=True)]
        records = [_on_host(result.records) for _, result in finite]
        record = {
            "round": self.round,
            "clients": [task.client for task in tasks],
            "steps": [task.steps for task in tasks],
            "left_out": left_out,
            "communication": communication,
            "train": _means(records),
        }
        truths = [task.batches.truth.cpu().numpy() for task, _ in finite]
        diagnostics = diagnose(records, truths, len(self.dataset.classes))
        return record | ({"diagnostics": diagnostics} if diagnostics else {})

    def test(self) -> dict:
        """The global model on the test set, and its average where there is one."""
        found = {"test": self._evaluate(*self.method.global_model(self.state))}
        if self.experiment.server.ema is not None:
            found["test_ema"] = self._evaluate(*self.averaged)
        return found

    def due(self) -> bool:
        """Whether this round ends with an evaluation."""
        return self.round % self.experiment.evaluate_every == 0 or self.round == self.experiment.rounds

    def model_state(self) -> dict[str, Tensor]:
        """The global model's state by name."""
        return self.program.network.state_dict(*self._with_static(*self.method.global_model(self.state)))

    # --- details -------------------------------------------------------------------------------------
    def _evaluate(self, theta: Tensor, statistics: Tensor) -> dict:
        theta, statistics = self._with_static(theta, statistics)
        return evaluate(self.program.network, theta, statistics, self.feed, len(self.dataset.classes))

    def _with_static(self, theta: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        if self.experiment.batch_norm != "static":
            return theta, statistics
        clients = self.sample(max(self.round, 1))
        owned = np.concatenate([x[c] for c in clients for x in (self.partition.labelled, self.partition.unlabelled)])
        order = draws.sample(len(owned), STATISTICS_IMAGES, self.experiment.seed, "statistics", self.round)
        images = self.feed.plain(owned[order])
        return theta, self.program.network.measure_statistics(theta, statistics, list(images.split(250)))

    def _communication(self, tasks: Sequence[Task], results: Sequence[Result]) -> dict[str, int]:
        """Bytes that a round's clients received and sent: four a value, and less where a method can do with less."""
        found = {"down": 0, "up": 0}
        for task, result in zip(tasks, results, strict=True):
            sparse = self.method.sparse_bytes(self.state, task.client, task.received, result.upload)
            bytes_of = {"down": _bytes(task.received), "up": _bytes(result.upload)}
            for name, size in (bytes_of | {f"{way}_sparse": size for way, size in sparse.items()}).items():
                found[name] = found.get(name, 0) + size
        return found

    def _weight(self, client: int) -> float:
        labelled, unlabelled = len(self.partition.labelled[client]), len(self.partition.unlabelled[client])
        if self.experiment.server.weight == "uniform":
            return 1.0
        if self.experiment.server.weight == "labelled":
            return float(max(labelled, 1))
        return float(labelled + unlabelled)


class Observer:
    """Something that watches rounds: a progress bar, a log, a checkpoint."""

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        """A round of `federation` has been aggregated, and evaluated where due."""

    def close(self) -> None:
        """No further round comes."""


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


def _expect_squares(dataset: Dataset) -> None:
    height, width, _ = dataset.shape
    if height != width or height <= PADDING:
        raise DataError(
            f"data set '{dataset.name}': images are {height} × {width} pixels, expected squares of "
            f"{PADDING + 1} × {PADDING + 1} or more"
        )


def _expect_labels(method: Method, dataset: Dataset) -> None:
    unknown = int((dataset.labels == UNKNOWN).sum())
    if method.needs.every_label and unknown:
        raise ConfigError(
            f"method '{method.experiment.method}' learns from the labels of all images, but {unknown} of "
            f"{len(dataset.labels)} images in '{dataset.name}' have a class that is not known; use another method"
        )


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return 4 * sum(tensor.numel() for tensor in tensors.values())


def _is_finite(result: Result) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in result.upload.values())


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
