"""A federation between two rounds, on disk.

One safetensors file holds every tensor and, in its header, the round and the experiment's fingerprint. It is
written aside and renamed, so that a kill at any moment leaves the previous checkpoint whole.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from feddure import experiments
from feddure.config import Experiment
from feddure.errors import RunError
from feddure.files import make_durable, write_whole
from feddure.simulation.federation import Federation
from feddure.simulation.server import Server
from feddure.tracking import records
from feddure.tracking.observer import Observer

FILE = Path("checkpoint") / "state.safetensors"


def write(server: Server, folder: Path) -> None:
    """Replace the folder's checkpoint by this server's state."""
    tensors = {f"server.{name}": tensor for name, tensor in server.state.items()}
    tensors |= {f"moments.{name}": tensor for name, tensor in server.moments.items()}
    if server.decay is not None:
        tensors |= {f"averaged.{i}": tensor for i, tensor in enumerate(server.averaged)}
    for client, memory in server.memories.items():
        tensors |= {f"memory.{client}.{name}": tensor for name, tensor in memory.items()}
    header = {
        "round": server.round,
        "schema": experiments.SCHEMA,
        "experiment": experiments.fingerprint(server.experiment),
        "own_code": server.experiment.own_code(),
        "partition": server.data_identity,
    }
    content = save({name: _plain(tensor) for name, tensor in tensors.items()}, pack_header(header))
    path = folder / FILE
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as problem:
        raise RunError(f"{path.parent}: cannot be made ({problem.strerror})") from None
    for name in (records.METRICS, records.TIMING):  # a power cut must not take lines that the checkpoint counts on
        make_durable(folder / name)
    write_whole(path, content, RunError, durable=True)


def read(server: Server, folder: Path) -> bool:
    """Bring a server to the folder's checkpoint; False where there is none yet."""
    path = folder / FILE
    if not path.exists():
        return False
    device = server.program.network.device
    try:
        with safe_open(path, framework="pt") as file:
            header = read_header(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{path}: the checkpoint cannot be read ({problem}); delete it to start over") from None
    if "schema" not in header:
        raise RunError(f"{path}: version 0.1 wrote this checkpoint and this version cannot go on from it; start anew")
    if header.get("experiment") != experiments.fingerprint(server.experiment):
        raise RunError(
            f"{path}: the checkpoint belongs to another configuration; resume with its own, or use another folder"
        )
    if header.get("partition") != server.data_identity:
        raise RunError(f"{path}: the checkpoint belongs to another partition of the data")
    server.round = header["round"]
    groups: dict[str, dict[str, torch.Tensor]] = {"server": {}, "moments": {}, "averaged": {}, "memory": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = tensor.to(device)
    server.state = groups["server"]
    server.moments = groups["moments"]
    if groups["averaged"]:
        server.averaged = [groups["averaged"][str(i)] for i in range(len(groups["averaged"]))]
    server.memories = {}
    for name, tensor in groups["memory"].items():
        client, _, rest = name.partition(".")
        server.memories.setdefault(int(client), {})[rest] = tensor
    return True


class Checkpoints(Observer):
    """Writes a checkpoint every few rounds and after the last one."""

    def __init__(self, folder: Path):
        self._folder = folder

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        if federation.round % federation.experiment.checkpoint_every == 0 or federation.finished:
            write(federation.server, self._folder)


def is_of_other_code(experiment: Experiment, folder: Path) -> bool:
    """Whether the folder has a checkpoint that another state of the user's own code has trained."""
    path, now = folder / FILE, experiment.own_code()
    if not now or not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return read_header(file.metadata()).get("own_code", now) != now
    except (SafetensorError, OSError):
        return False  # reading it says what is wrong


def pack_header(header: dict[str, Any]) -> dict[str, str]:
    """What a safetensors file says about its tensors, as one text: several come in random order on disk."""
    return {"feddure": json.dumps(header)}


def read_header(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The header that `pack_header` made, or nothing where another program wrote the file."""
    return json.loads((metadata or {}).get("feddure", "{}"))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: a method may keep one tensor under two names, and safetensors refuses shared memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
