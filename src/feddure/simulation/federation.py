"""A federation simulated on this machine, and its rounds: sample, train, aggregate, evaluate."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from feddure import rng
from feddure.config import Experiment
from feddure.data import augment
from feddure.data.batches import Batch, BatchPlan, Needs
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods.base import Method
from feddure.simulation import attacks
from feddure.simulation.diagnostics import Model, diagnose, probe_drift, probe_labels
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Result, Task
from feddure.simulation.server import Answer, Assignment, ImageCounts, Moment, Server, plan_batches
from feddure.tracking.observer import Observer

STATISTICS_IMAGES = 2000
"""Training images of a round's clients from which `batch_norm: static` recomputes statistics."""

PROBED_TEST_IMAGES = 2000
"""Test images at most on which every client's model is looked at."""

_MOST_WAITING = 4
"""Rounds that nobody is told of yet, as their evaluation goes on beside later ones."""

_Work = tuple[Assignment, Batch, Tensor]
"""What a client is to do in a round, its images, and how many of each class are labelled."""


class Federation:
    """One experiment between rounds: its server, who owns which images, and the engine that trains clients."""

    def __init__(
        self, experiment: Experiment, dataset: Dataset, partition: Partition, engine: Engine, resumes: bool = False
    ):
        """Where it `resumes`, a checkpoint is read next, and the experiment's `init` is not needed."""
        owned = zip(partition.labelled, partition.unlabelled, strict=True)
        counts = [ImageCounts(len(x), len(u), int(np.isin(x, u).sum())) for x, u in owned]
        self._hostile = attacks.attackers(experiment, partition.clients)
        self.server = Server(
            experiment,
            dataset,
            counts,
            engine,
            partition.sha256,
            self._statistics_of if experiment.batch_norm == "static" else None,
            partition.validation,
            attacks.claimed_counts(experiment.attack, self._hostile, counts),
            resumes,
        )
        _expect_labels(self.server.method, dataset)
        _expect_tests(dataset, partition)
        self.partition = partition
        self.engine = engine
        self.images = engine.images(dataset)
        self._ahead: tuple[int, list[_Work]] | None = None  # a round that was prepared while another trained
        self._last: TrainedRound | None = None
        self._speculates = True  # until an update cannot be used: others may follow
        self._bytes = self._expect_memory([self._plan(assignment) for assignment in self.server.assignments()])

    @property
    def experiment(self) -> Experiment:
        return self.server.experiment

    @property
    def dataset(self) -> Dataset:
        return self.server.dataset

    @property
    def round(self) -> int:
        """The last round that was aggregated."""
        return self.server.round

    @property
    def finished(self) -> bool:
        return self.round >= self.experiment.rounds

    def prepare(self) -> None:
        """Compile and capture what rounds and evaluations need, before any clock runs."""
        self.engine.prepare(self.tasks())
        if self.engine.compiles:
            self.engine.aside(self.server.start_test)
            self.engine.finish()

    def train_round(self) -> dict:
        """One round: train its clients, aggregate what they send, evaluate where due; returns its record."""
        return self.start_round().record()

    def start_round(self, meanwhile: Callable[[], None] = lambda: None, speculative: bool = False) -> "TrainedRound":
        """One round up to its aggregation.

        On a GPU the next round's images are made and `meanwhile` is called while this one's clients train, and the
        evaluation goes on beside whatever comes next. A `speculative` round does not wait for its clients either:
        only during the next one, or by `verify`, it is seen whether their updates could be used.
        """

        def beside() -> None:
            if not self.verify():
                raise _OtherModel
            self._prepare_ahead()
            meanwhile()

        if self._ahead is None:
            self.verify()  # memory has no room for the images of two rounds
        while True:
            tasks = self.tasks()
            with suppress(_OtherModel):
                results = self.engine.run(tasks, beside)
                break
        every = self.experiment.probe_every
        due = every and (self.round + 1) % every == 0
        probe = self.server.program.attempt(lambda: self._probe(tasks, results)) if due else {}
        speculative = speculative and self._speculates and self._ahead is not None and self.server.can_speculate
        self._last = TrainedRound(self, tasks, results, probe, speculative)
        return self._last

    def verify(self) -> bool:
        """Look at the answers that the last round took unseen; False where it had to be aggregated anew."""
        if self._last is None or self._last.verify():
            return True
        self._speculates = False
        return False

    def tasks(self) -> list[Task]:
        """The next round's work."""
        number = self.round + 1
        prepared, self._ahead = self._ahead, None
        works = prepared[1] if prepared is not None and prepared[0] == number else self._prepare(number)
        return [
            Task(
                self.server.program,
                assignment.client,
                assignment.steps,
                batch,
                self.server.broadcast(assignment),
                (assignment.seed, assignment.round, assignment.client),
                counts,
                self.server.recall(assignment.client),
            )
            for assignment, batch, counts in works
        ]

    def _prepare(self, number: int) -> list[_Work]:
        """What the clients of a round are to do, and their images: all that does not depend on earlier rounds."""
        assignments = self.server.assignments(number)
        plans = [self._plan(assignment) for assignment in assignments]
        batches = self.images.batches(plans, self.experiment.seed, number) if plans else []
        for place, assignment in enumerate(assignments):
            if assignment.client in self._hostile:
                batches[place] = attacks.poison_labels(
                    self.experiment.attack, batches[place], len(self.dataset.classes)
                )
        return list(zip(assignments, batches, self.images.class_counts(plans), strict=True))

    def _prepare_ahead(self) -> None:
        """The round after the one under way, where its images fit beside those of this one."""
        number = self.round + 2
        if number <= self.experiment.rounds and self._bytes < self.engine.free_memory() / 4:
            with suppress(torch.cuda.OutOfMemoryError):
                self._ahead = number, self._prepare(number)

    def finish_round(self, tasks: Sequence[Task], results: Sequence[Result]) -> dict:
        """Aggregate a round's results; returns its record."""
        return self.aggregate(tasks, results)[0]()

    def aggregate(
        self, tasks: Sequence[Task], results: Sequence[Result], speculative: bool = False
    ) -> tuple[Callable[[], dict], Callable[[], bool] | None]:
        """Aggregate a round's results; what is returned makes its record, and says whether all could be used."""
        pairs = list(zip(tasks, results, strict=True))
        answers = [self._answer(task, result) for task, result in pairs]
        left_out: dict[int, str] = {}
        right = None
        if speculative:
            record, right = self.server.speculate(answers)
        else:
            record, left_out = self.server.finish_round(answers)
        if left_out:
            who = {why: sorted(c for c in left_out if left_out[c] == why) for why in sorted(set(left_out.values()))}
            told = "; ".join(f"{why}, of clients {clients}" for why, clients in who.items())
            warnings.warn(f"round {self.round}: left out were updates ({told})", FeddureWarning, stacklevel=2)
        used = [(task, result) for task, result in pairs if task.client not in left_out]
        if self.round == 1:
            self._note_standstill(used)
        for task, result in used:
            if result.memory:
                self.server.remember(task.client, result.memory)
        recorded = [(result.records, task.batches.truth) for task, result in used]

        def finished() -> dict:
            records = [_on_host(found) for found, _ in recorded]
            diagnostics = diagnose(records, [truth.cpu().numpy() for _, truth in recorded], len(self.dataset.classes))
            return record | {"train": _means(records)} | ({"diagnostics": diagnostics} if diagnostics else {})

        return finished, right

    def _expect_memory(self, plans: Sequence[BatchPlan]) -> int:
        """Refuse a round whose images, which are made together, cannot fit; returns about how many bytes they take."""
        views = sum(plan.steps * (plan.labelled_batch + plan.unlabelled_batch * plan.needs.views) for plan in plans)
        needed = (
            2 * views * math.prod(self.dataset.shape) * self.images.dtype.itemsize
        )  # augmenting takes as much again
        if needed > 2**30 and needed > (free := self.engine.free_memory()):
            raise ConfigError(
                f"a round's images would take about {needed / 2**30:,.0f} GiB, and {free / 2**30:,.1f} GiB are free: "
                "lower labelled_batch, unlabelled_batch, local_steps or clients_per_round"
            )
        return needed

    def _note_standstill(self, used: Sequence[tuple[Task, Result]]) -> None:
        moved = [
            not torch.equal(result.upload["theta"], task.received["theta"])
            for task, result in used
            if "theta" in result.upload and "theta" in task.received
        ]
        if moved and not any(moved):
            warnings.warn(
                f"method '{self.experiment.method}': no client's parameters have moved in the first round; does its "
                "step call client.descend(loss)?",
                FeddureWarning,
                stacklevel=2,
            )

    def _answer(self, task: Task, result: Result) -> Answer:
        upload = result.upload
        if task.client in self._hostile:
            upload = attacks.poison_upload(self.experiment.attack, task.received, upload, task.key)
        return Answer(task.client, task.steps, task.received, upload)

    def _probe(self, tasks: Sequence[Task], results: Sequence[Result]) -> dict[str, float | None]:
        """The received model, its average and the clients' own: how they label the clients' images, and who drifts.

        Nothing where clients send no models. The images are weak views of the round's batches, each once.
        """
        uploads = {task.client: result.upload for task, result in zip(tasks, results, strict=True)}
        own: dict[int, Model] = {
            client: (upload["theta"], upload["statistics"])
            for client, upload in uploads.items()
            if "theta" in upload and "statistics" in upload and bool(upload["theta"].isfinite().all())
        }
        if not own:
            return {}
        size, plans = self.server.unlabelled_batch, []
        for task in tasks:
            if task.client in own:
                pool = self.partition.unlabelled[task.client]
                steps = max(1, min(task.steps, len(pool) // size))
                plans.append(BatchPlan(task.client, pool[:0], pool, steps, 1, size, Needs(weak=True)))
        batches = self.images.batches(plans, self.experiment.seed, self.round + 1)
        server, network = self.server, self.server.program.network
        received = server.method.global_model(server.state)
        labellers: dict[str, Sequence[Model]] = {"global": [received] * len(own), "own": list(own.values())}
        if server.decay is not None:
            labellers["averaged"] = [(server.averaged[0], server.averaged[1])] * len(own)
        views, truths = ([getattr(b, name).flatten(0, 1) for b in batches] for name in ("weak", "truth"))
        labels = probe_labels(network, labellers, views, truths)
        tests = {"test_received": self.test_accuracy(received)}
        tests["test_clients"] = float(np.mean([self.test_accuracy(model) for model in own.values()]))
        return labels | probe_drift(received[0], [theta for theta, _ in own.values()]) | tests

    def test_accuracy(self, model: Model | None = None) -> float:
        """Of a model, or the global one, on some of the test images, evenly taken."""
        model = model or self.server.method.global_model(self.server.state)
        every = max(1, -(-len(self.images.test_labels) // PROBED_TEST_IMAGES))
        pixels, labels = augment.plain(self.images.test_images[::every], self.images.normalise), self.images.test_labels
        logits = self.server.program.network.evaluate_many(*model, pixels)
        return (logits.argmax(1) == labels[::every]).double().mean().item()

    def _plan(self, assignment: Assignment) -> BatchPlan:
        owned = (part[assignment.client] for part in (self.partition.labelled, self.partition.unlabelled))
        return plan_batches(self.experiment, self.server.method, assignment, *owned)

    def _statistics_of(self, theta: Tensor, statistics: Tensor) -> Tensor:
        """Batch-norm statistics of a model, measured on images of the last round's clients."""
        clients = self.server.sample(max(self.round, 1))
        owned = np.concatenate([x[c] for c in clients for x in (self.partition.labelled, self.partition.unlabelled)])
        chosen = rng.sample(len(owned), STATISTICS_IMAGES, self.experiment.seed, "statistics", self.round)
        images = self.images.plain(owned[chosen])
        return self.server.program.network.measure_statistics(theta, statistics, list(images.split(250)))


class TrainedRound:
    """A round whose clients have trained: aggregated, and evaluated where due."""

    seconds: float | None = None
    """What it took, once that is known."""

    def __init__(
        self, federation: Federation, tasks: Sequence[Task], results: Sequence[Result], probe: dict, speculative: bool
    ):
        self._federation = federation
        self._work: tuple[Sequence[Task], Sequence[Result]] | None = (tasks, results)
        self._probe = probe
        self._before: Moment | None = federation.server.moment
        self._aggregate(speculative)

    def _aggregate(self, speculative: bool) -> None:
        assert self._work is not None
        server = self._federation.server
        record, right = self._federation.aggregate(*self._work, speculative)
        if self._probe:
            self._probe["test_aggregated"] = self._federation.test_accuracy()
        self._tested, self._done = self._federation.engine.aside(lambda: server.start_test() if server.due() else {})
        self.moment = server.moment
        """The server after this round."""
        self._record, self._right = record, right  # last: what runs out of memory before is tried again
        if right is None:
            self._work = self._before = None

    def verify(self) -> bool:
        """Look at the answers that were taken unseen; where one cannot be used, do without it and return False."""
        if self._right is None:
            return True
        right = self._right()
        if right:
            self._right = self._work = self._before = None
        else:
            assert self._before is not None
            self._federation.engine.finish()
            self._federation.server.moment = self._before
            self._aggregate(speculative=False)
        return right

    def ready(self) -> bool:
        """Whether its evaluation is done."""
        return self._done is None or self._done.query()

    def record(self) -> dict:
        """Its record; waits for its evaluation."""
        found = self._record() | ({"probe": self._probe} if self._probe else {})
        if self._done is not None:
            self._done.synchronize()
        return found | self._federation.server.read_test(self._tested)


class _OtherModel(Exception):
    """A round has begun from a model that is another one now."""


def run(federation: Federation, observers: Sequence[Observer] = (), stop: Callable[[], bool] = lambda: False) -> None:
    """All rounds that are left; where `stop` says so the round under way is dropped and `Stopped` raised."""
    lanes, server = federation.engine.lanes, federation.server
    before, lanes.stop = lanes.stop, stop
    waiting: deque[TrainedRound] = deque()  # until they have been told
    began = time.perf_counter()

    def over() -> None:
        """The last round is over."""
        nonlocal began
        if waiting and waiting[-1].seconds is None:
            now = time.perf_counter()
            waiting[-1].seconds, began = now - began, now

    def tell(waits: int = 0) -> None:
        """Tell of rounds in their order; so many may wait for their evaluation."""
        while waiting and (len(waiting) > waits or waiting[0].ready()):
            record = waiting[0].record()  # where memory runs out here, the lanes' work is tried again and this with it
            trained = waiting.popleft()
            try:
                with server.at(trained.moment):
                    for observer in observers:
                        observer.round_done(federation, record, trained.seconds or 0.0)
            except BaseException:
                waiting.clear()  # no later round is told without this one
                raise

    def meanwhile() -> None:
        over()
        tell(_MOST_WAITING if server.can_speculate else 0)

    try:
        while not federation.finished:
            waiting.append(federation.start_round(meanwhile, speculative=lanes.overlaps))
            if not lanes.overlaps:
                over()
                tell()
                began = time.perf_counter()
    finally:
        lanes.stop = before
        federation.verify()
        over()
        tell()


def _expect_labels(method: Method, dataset: Dataset) -> None:
    unknown = int((dataset.labels == UNKNOWN).sum())
    if method.needs.every_label and unknown:
        raise ConfigError(
            f"method '{method.experiment.method}' learns from the labels of all images, but {unknown} of "
            f"{len(dataset.labels)} images in '{dataset.name}' have a class that is not known; use another method"
        )


def _expect_tests(dataset: Dataset, partition: Partition) -> None:
    if not len(dataset.test_images) and not len(partition.validation):
        raise ConfigError(
            f"data set '{dataset.name}' has no test images: add some (a folder's test/<class>/), or set labelled "
            "images aside with validation, such as --set validation=0.2"
        )


def _on_host(records: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().cpu().numpy() for name, tensor in records.items()}


def _means(clients: Sequence[dict[str, np.ndarray]]) -> dict[str, float | None]:
    """Each 0-d quantity that steps recorded, averaged over all steps of the round."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(name for records in clients for name, value in records.items() if value.ndim == 1):
        value = float(np.concatenate([records[name] for records in clients if name in records]).mean())
        found[name] = value if math.isfinite(value) else None
    return found
