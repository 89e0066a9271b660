"""Sites with folders of images, the simulator on the same images, and a Flower grid within one process."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

import tiny
from feddure import data, experiments
from feddure.config import Experiment
from feddure.flower.app import client as client_app
from feddure.flower.app import run_config
from feddure.flower.app import server as server_app
from feddure.flower.app.description import Description
from feddure.simulation.federation import Federation
from feddure.simulation.server import Server

SIDE = 12
SITES = ("north", "south", "west")
CLASSES = ("a", "b", "c", "d")
DESCRIPTION = Description(
    name="tiny", classes=CLASSES, size=SIDE, channels=1, mean=(0.35,), std=(0.25,), sites=SITES, timeout_seconds=60
)
SETTINGS = (
    "model=cnn clients_per_round=2 local_steps=2 labelled_batch=5 unlabelled_batch=6 evaluate_every=1 "
    "engine.device=cpu engine.precision=fp64"
)
Change = Callable[[Message, Message], Message]


def write_images(root: Path, sites: Iterable[str] = SITES) -> Path:
    """`root/images/clients/<site>/` with images of each site, unequal in number, and `root/images/test/`."""
    images = tiny.dataset(side=SIDE, tests=24)
    owners = list(sites)
    for number, (pixels, label) in enumerate(zip(images.images, images.labels, strict=True)):
        home = root / "images" / "clients" / owners[(number // 7) % len(owners)]
        labelled = number % 3 == 0 or number < 40
        write(home / ("labelled/" + CLASSES[label] if labelled else "unlabelled") / f"{number:03}.png", pixels)
    for number, (pixels, label) in enumerate(zip(images.test_images, images.test_labels, strict=True)):
        write(root / "images" / "test" / CLASSES[label] / f"{number:03}.png", pixels)
    return root


def write(path: Path, pixels: np.ndarray) -> None:
    """A grey image file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[:, :, 0]).save(path)


def simulator(root: Path, wanted: Experiment) -> Federation:
    """The simulator's federation on the same images, normalised as the description says."""
    images = data.load(f"folder:{root / 'images'}?size={SIDE}&channels=1")
    assert images.sites == tuple(sorted(SITES))
    assert images.classes == CLASSES
    images = dataclasses.replace(images, mean=DESCRIPTION.mean, std=DESCRIPTION.std)
    return tiny.federation(wanted, images)


def experiment(
    changes: dict[str, Any] | None = None, settings: str = SETTINGS, preset: str | None = None
) -> Experiment:
    """The experiment that a run with these settings carries out."""
    fixed = {"dataset": "tiny", "partition.setting": "sites", "partition.clients": len(SITES), "rounds": 2}
    return experiments.load(preset, None, fixed | (changes or {}), settings.split())


def options(root: Path, **given: Any) -> run_config.RunOptions:
    """The options of a run of two rounds into `root/run`; keys with `_` for `-`."""
    defaults = {
        "rounds": 2,
        "method": "feddure",
        "settings": SETTINGS,
        "run-folder": str(root / "run"),
        "test-folder": str(root / "images" / "test"),
        "description": DESCRIPTION.to_yaml(),
        "wait-seconds": 5.0,
        "timeout-seconds": 5.0,
    }
    return run_config.read(defaults | {key.replace("_", "-"): value for key, value in given.items()})


class OneProcess(Grid):
    """Nodes that answer at once, in this process, each with its own configuration and state."""

    def __init__(self, nodes: dict[int, dict[str, Any]], run_configuration: dict[str, Any] | None = None):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # Flower's own processes have them
        self.contexts = {
            node: Context(1, node, configuration, RecordDict(), run_configuration or {})
            for node, configuration in nodes.items()
        }
        self.names: dict[int, str] = {}  # under which nodes were registered
        self.started: dict[int, str] = {}  # when nodes were last started
        self.changes: dict[int, Change] = {}  # what a node's answer becomes on its way
        self.silent_once: set[int] = set()  # nodes that do not answer the next training message
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    @property
    def run_id(self) -> int:
        """Flower's number of the run; each start of one has another."""
        return next(context.run_id for context in self.contexts.values())

    def begin_another_run(self) -> None:
        """As Flower does for the next start of a run."""
        for context in self.contexts.values():
            context.run_id += 1

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, name=self.names.get(node), last_activated_at=self.started.get(node, "first"))
            for node in self.contexts
        ]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = message.object_id
        number, node = message.metadata.message_id, message.metadata.dst_node_id
        self.sent.append(message)
        if message.metadata.message_type == "train" and node in self.silent_once:
            self.silent_once.discard(node)
        else:
            try:
                reply = client_app.app(message, self.contexts[node])
            except Exception as problem:
                reply = Message(Error(code=1, reason=str(problem)), reply_to=message)
            if node in self.changes:
                reply = self.changes[node](message, reply)
            self._replies[number] = reply
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise NotImplementedError


def grid(root: Path, **more: Any) -> OneProcess:
    """One node a site, numbered from 11, on the folders that `write_images` wrote."""
    description = root / "federation.yaml"
    description.write_text(DESCRIPTION.to_yaml())
    return OneProcess(
        {
            11 + number: {
                "site": site,
                "data": str(root / "images" / "clients" / site),
                "state": str(root / "state" / site),
                "description": str(description),
                "approve": "always",
            }
            | more
            for number, site in enumerate(SITES)
        },
        {"description": DESCRIPTION.to_yaml()},
    )


def federate(root: Path, nodes: OneProcess | None = None, **given: Any) -> Server:
    """A whole run in this process; returns the server after it."""
    nodes = nodes or grid(root)
    return server_app.run(nodes, options(root, **given), nodes.run_id)
