"""What a site does: says who it is, and trains its client for a round, by the simulator's own code."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from feddure import config, data, methods
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition
from feddure.data.sources.images import FULL_DEPTH
from feddure.errors import ConfigError, DataError
from feddure.flower.app import description as descriptions
from feddure.flower.app import site_data
from feddure.flower.app.memory import Memory
from feddure.flower.app.messages import Task
from feddure.flower.app.policy import check_size
from feddure.flower.app.sanitize import sayable
from feddure.methods.base import State
from feddure.simulation.engine import Engine
from feddure.simulation.evaluate import evaluate
from feddure.simulation.lanes import Result
from feddure.simulation.lanes import Task as LaneTask
from feddure.simulation.server import plan_batches
from feddure.version import VERSION


@dataclass(frozen=True, eq=False)
class Site:
    """A site with its images, under the description it goes by."""

    name: str
    client: int
    clients: int
    fingerprint: str  # of its description
    dataset: Dataset
    labelled: np.ndarray
    unlabelled: np.ndarray
    unreadable: tuple[site_data.Unreadable, ...] = ()
    state: Path | None = None  # where to keep what must survive a restart

    def introduce(self) -> dict[str, Any]:
        """Who the site is and how many images it has: all that the server learns before the first round."""
        return {
            "site": self.name,
            "client": self.client,
            "clients": self.clients,
            "fingerprint": self.fingerprint,
            "labelled": len(self.labelled),
            "unlabelled": len(self.unlabelled),
            "unreadable": len(self.unreadable),
            "tests": len(self.dataset.test_images),
            "version": VERSION,
            "pid": os.getpid(),
        }


def open_site(node: Mapping[str, Any], run_description: str) -> Site:
    """The site that a node's configuration names: `site`, `data`, and perhaps `state` and `description`.

    Without a description of its own it goes by the run's.
    """
    for key in ("site", "data"):
        if not node.get(key):
            raise sayable(ConfigError(f"the node's configuration has no '{key}': start the node with site and data"))
    if node.get("description"):
        description = descriptions.read(Path(str(node["description"])))
    else:
        description = descriptions.parse(run_description, "the run's description")
    name, folder = str(node["site"]), Path(str(node["data"]))
    try:
        client = description.client(name)
    except ConfigError as error:
        raise sayable(error, "its description of the federation has no site of its name") from None
    if node.get("description"):
        _expect_agreed(description, run_description, str(node["description"]))
    state = Path(str(node["state"])) if node.get("state") else folder / ".feddure"
    found = site_data.load(folder, description, state / "cache", depth=int(node.get("depth", FULL_DEPTH)))
    return Site(
        name=name,
        client=client,
        clients=len(description.sites),
        fingerprint=description.fingerprint(),
        dataset=found.dataset,
        labelled=found.labelled,
        unlabelled=found.unlabelled,
        unreadable=found.unreadable,
        state=state,
    )


def _expect_agreed(own: descriptions.Description, run_description: str, where: str) -> None:
    """Refuse a run whose server means other classes or images than this site does; the server would refuse too."""
    if not run_description.strip():
        return
    servers = descriptions.parse(run_description, "the run's description")
    differing = own.differences(servers)
    if not differing:
        return
    # Who else takes part is for the server's operator to say.
    told = [
        name
        if name == "sites"
        else f"{name} is {_shown(getattr(own, name))} here, {_shown(getattr(servers, name))} there"
        for name in differing
    ]
    raise sayable(
        ConfigError(
            f"refused: {where} differs from the server's description of the federation ({'; '.join(told)}). This site "
            f"cannot take part before both are equal: ask the server's operator for the current bundle, unpack it, and "
            f"start the site again"
        ),
        f"it goes by another description of the federation (in {', '.join(differing)}); "
        "give it the server's federation.yaml",
    )


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def open_share(client: int, clients: int, experiment: Experiment, data_dir: str) -> Site:
    """A client of Flower's simulation: its share of the experiment's own partition of a named data set."""
    experiment = with_clients(experiment, clients)
    dataset, partition = _share_out(experiment.dataset, data_dir, experiment.partition, experiment.partition_seed)
    if client >= partition.clients:
        raise DataError(f"client {client}: data set '{dataset.name}' was shared out over {partition.clients} clients")
    return Site(
        name=f"client-{client}",
        client=client,
        clients=clients,
        fingerprint=share_identity(experiment),
        dataset=dataset,
        labelled=partition.labelled[client],
        unlabelled=partition.unlabelled[client],
    )


def with_clients(experiment: Experiment, clients: int) -> Experiment:
    """The experiment, its partition spread over so many clients, and no more of them drawn than there are."""
    tree = experiment.model_dump()
    tree["partition"]["clients"] = clients
    tree["clients_per_round"] = min(experiment.clients_per_round, clients)
    return config.build(tree)


def share_identity(experiment: Experiment) -> str:
    """What clients of a simulation must agree on."""
    return f"{experiment.dataset} {experiment.partition.model_dump_json()} {experiment.partition_seed}"


def data_folder(given: str) -> Path | None:
    """Where downloaded data sets lie, where that was said."""
    return Path(given).expanduser() if given else None


@lru_cache(maxsize=2)
def _share_out(name: str, data_dir: str, options: config.Partition, seed: int) -> tuple[Dataset, Partition]:
    dataset = data.load(name, data_folder(data_dir))
    return dataset, partitions.make(dataset, options, seed)


def read_experiment(text: str, device: str = "") -> Experiment:
    """The run's experiment as a site carries it out: one lane, and nothing compiled unless that was asked for.

    Flower starts a process for each message; compiling would take longer there than it saves.
    """
    experiment = config.build(yaml.safe_load(text))
    engine: dict[str, Any] = {"lanes": 1}
    if experiment.engine.compile == "auto":
        engine["compile"] = False
    if device:
        engine["device"] = device
    return config.build(experiment.model_dump() | {"engine": experiment.engine.model_dump() | engine})


class Worker:
    """Trains a site's client; keeps its engine where the process lives longer than one message."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.engine = Engine(experiment.engine)
        self.method = methods.make(experiment)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def train(self, site: Site, task: Task, received: State, memory: Memory) -> tuple[State, dict[str, Any]]:
        """One round of the site's client: what it uploads, and its answer."""
        began = time.perf_counter()
        check_size(self.experiment, task.assignment.steps, task.assignment.unlabelled_batch)
        before, note = self._recall(task, memory)
        tests = self._test(site, received) if task.evaluate and len(site.dataset.test_images) else {}
        result = self.work(site, task, received, before)
        if self.method.memory:
            memory.keep(task.assignment.round, result.memory, (task.remembered_round, task.checkpointed_round))
        answer = {
            "site": site.name,
            "client": site.client,
            "round": task.assignment.round,
            "pid": os.getpid(),
            "seconds": time.perf_counter() - began,
            "memory": note,
            **_means(result),
            **tests,
        }
        return result.upload, answer

    def work(self, site: Site, task: Task, received: State, memory: State) -> Result:
        """The client's local training, exactly as the simulator's lanes do it."""
        assignment = task.assignment
        order = plan_batches(self.experiment, self.method, assignment, site.labelled, site.unlabelled)
        (batches,) = self.engine.images(site.dataset).batches([order], assignment.seed, assignment.round)
        key = (assignment.seed, assignment.round, assignment.client)
        program = self.engine.program(self.experiment, site.dataset)
        return self.engine.run(
            [LaneTask(program, assignment.client, assignment.steps, batches, received, key, memory)]
        )[0]

    def _recall(self, task: Task, memory: Memory) -> tuple[State, str | None]:
        if not self.method.memory or not task.remembered_round:
            return {}, None
        found = memory.recall(task.remembered_round)
        if found is None or found.keys() != set(self.method.memory):
            return {}, f"the memory of round {task.remembered_round} is lost; the client started afresh"
        return {name: tensor.to(self.device) for name, tensor in found.items()}, None

    def _test(self, site: Site, received: State) -> dict[str, float | int]:
        """The received model on the site's own test images; nothing where a method sends its model in parts."""
        if not {"theta", "statistics"} <= received.keys():
            return {}
        network = self.engine.program(self.experiment, site.dataset).network
        feed, classes = self.engine.images(site.dataset), len(site.dataset.classes)
        found = evaluate(network, received["theta"], received["statistics"], feed, classes)
        images = len(site.dataset.test_images)
        return {"test.accuracy": found["accuracy"], "test.loss": found["loss"], "test.images": images}


def _means(result: Result) -> dict[str, float]:
    """Means over all images and steps of the round; nothing of a single one is told, and true classes never count."""
    arrays = {name: tensor.double().cpu().numpy() for name, tensor in result.records.items()}
    found = {name: float(values.mean()) for name, values in arrays.items() if values.ndim == 1}
    if "weight" in arrays and arrays["weight"].ndim == 2 and arrays["weight"].size:
        found["weight"] = float(arrays["weight"].mean())
    return {f"train.{name}": value for name, value in found.items() if np.isfinite(value)}
