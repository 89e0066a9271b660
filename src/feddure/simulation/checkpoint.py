"""A federation between two rounds, on disk.

One safetensors file holds every tensor and, in its header, the round, the experiment's fingerprint and a hash of all
of it. It is written aside and renamed, so that a kill at any moment leaves the previous checkpoint whole. A real
federation also keeps some earlier ones, to which it can go back.
"""

import hashlib
import json
from collections.abc import Collection
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
_KEPT = "round-{:06}.safetensors"


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
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    content = save(plain, pack_header(header | {"sha256": _hash(header, plain)}))
    path = folder / FILE
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as problem:
        raise RunError(f"{path.parent}: cannot be made ({problem.strerror})") from None
    for name in (records.METRICS, records.TIMING):  # a power cut must not take lines that the checkpoint counts on
        make_durable(folder / name)
    write_whole(path, content, RunError, durable=True)


def keep(folder: Path, round_number: int, rounds: Collection[int]) -> None:
    """Keep the checkpoint just written under its round, and of the earlier ones those of `rounds`."""
    kept = {folder / FILE.parent / _KEPT.format(number) for number in (round_number, *rounds)}
    path = folder / FILE.parent / _KEPT.format(round_number)
    path.unlink(missing_ok=True)
    try:
        path.hardlink_to(folder / FILE)  # the next checkpoint is another file
    except OSError:  # a file system without links
        write_whole(path, (folder / FILE).read_bytes(), RunError)
    for other in (folder / FILE.parent).glob("round-*.safetensors"):
        if other not in kept:
            other.unlink(missing_ok=True)


def kept_rounds(folder: Path) -> list[int]:
    """The rounds to which a run can go back."""
    return sorted(int(path.stem.partition("-")[2]) for path in (folder / FILE.parent).glob("round-*.safetensors"))


def read(server: Server, folder: Path, round_number: int | None = None) -> bool:
    """Bring a server to the folder's checkpoint, or to that of a round; False where there is none yet."""
    path = folder / FILE
    if round_number is not None:
        path = folder / FILE.parent / _KEPT.format(round_number)
        if not path.exists():
            there = ", ".join(map(str, kept_rounds(folder))) or "none"
            raise RunError(f"{folder}: no checkpoint of round {round_number} was kept; there are: {there}")
    if not path.exists():
        return False
    instead = f"go on from round {' or '.join(map(str, others))} (--round)" if (others := kept_rounds(folder)) else ""
    device = server.program.network.device
    try:
        with safe_open(path, framework="pt") as file:
            header = read_header(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise RunError(
            f"{path}: the checkpoint cannot be read ({problem}); {instead or 'delete it to start over'}"
        ) from None
    written = header.pop("sha256", None)  # an earlier version wrote none
    if written is not None and written != _hash(header, tensors):
        raise RunError(
            f"{path}: the checkpoint is damaged: its content is not what was written; "
            f"{instead or 'restore it from a copy, or delete it to start over'}"
        )
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


def _hash(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: a method may keep one tensor under two names, and safetensors refuses shared memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
