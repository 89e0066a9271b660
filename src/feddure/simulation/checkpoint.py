"""A federation between two rounds, on disk.

One safetensors file holds every tensor and, in its header, the round, the experiment's fingerprint and a hash of all
of it. It is written aside and renamed, so that a kill at any moment leaves the previous checkpoint whole. A real
federation also keeps some earlier ones, to which it can go back.

What is kept of each client (its memory, FedMatch's ψ) would make that file grow with the number of clients. Where it is
large it lies in a file of its own, named by client and content, to which the header points: a checkpoint writes the
files of clients that have trained since the last one, and the server then has their tensors mapped from there.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from feddure import experiments
from feddure.config import Experiment
from feddure.errors import RunError
from feddure.files import make_durable, write_whole
from feddure.simulation.federation import Federation
from feddure.simulation.server import Server
from feddure.tracking import records
from feddure.tracking.observer import Observer

FILE = Path("checkpoint") / "state.safetensors"
CLIENTS = FILE.parent / "clients"
"""Where files of single clients lie."""

LARGE = 2**16
"""Bytes of a client's tensors from which on they have a file of their own."""

_KEPT = "round-{:06}.safetensors"
_OF_CLIENT = re.compile(r"\d+-[0-9a-f]{64}\.safetensors")


def write(server: Server, folder: Path) -> None:
    """Replace the folder's checkpoint by this server's state."""
    path = folder / FILE
    _make(path.parent)
    tensors = {f"server.{name}": tensor for name, tensor in server.state.items()}
    tensors |= {f"moments.{name}": tensor for name, tensor in server.moments.items()}
    if server.decay is not None:
        tensors |= {f"averaged.{i}": tensor for i, tensor in enumerate(server.averaged)}
    for client, memory in server.memories.items():
        tensors |= {f"memory.{client}.{name}": tensor for name, tensor in memory.items()}
    files = _write_clients(server, folder, tensors)
    header: dict[str, Any] = {
        "round": server.round,
        "schema": experiments.SCHEMA,
        "experiment": experiments.fingerprint(server.experiment),
        "own_code": server.experiment.own_code(),
        "partition": server.data_identity,
    }
    if files:
        header["clients"] = files
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    content = save(plain, pack_header(header | {"sha256": _hash(header, plain)}))
    for name in (records.METRICS, records.TIMING):  # a power cut must not take lines that the checkpoint counts on
        make_durable(folder / name)
    write_whole(path, content, RunError, durable=True)
    _remove_old_clients(folder)


def _write_clients(server: Server, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Take what is large of single clients out of `tensors` and put it into files; returns their names by client.

    Only clients that have changed since their file was written get a new one.
    """
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name in list(tensors):
        if (client := server.owner(name)) is not None:
            found.setdefault(client, {})[name] = tensors[name]
    files = {}
    for client, own in sorted(found.items()):
        if sum(tensor.nbytes for tensor in own.values()) < LARGE:
            continue
        path = server.files.get(client)
        if path is None or path.parent != folder / CLIENTS:
            _make(folder / CLIENTS)
            content = save({name: _plain(tensor) for name, tensor in own.items()})
            path = folder / CLIENTS / f"{client}-{hashlib.sha256(content).hexdigest()}.safetensors"
            if not path.exists():
                write_whole(path, content, RunError, durable=True)
            server.take(client, path, load_file(path))
        files[str(client)] = path.name
        for name in own:
            del tensors[name]
    return files


def _read_clients(folder: Path, files: Mapping[str, str], instead: str) -> dict[int, tuple[Path, dict]]:
    """What lies in clients' own files, mapped from there."""
    found = {}
    for client, name in files.items():
        path = folder / CLIENTS / Path(name).name
        try:
            with path.open("rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == path.stem.partition("-")[2]
            if whole:
                found[int(client)] = path, load_file(path)
                continue
            problem = "its content is not what was written"
        except (SafetensorError, OSError) as error:
            problem = str(error)
        raise RunError(
            f"{path}: a part of the checkpoint cannot be read ({problem}); "
            f"{instead or 'restore it from a copy, or delete the folder checkpoint to start over'}"
        )
    return found


def _remove_old_clients(folder: Path) -> None:
    """Remove clients' files that no checkpoint points to, and no other: the folder may be a link to somebody's own."""
    present = [path for path in (folder / CLIENTS).glob("*.safetensors") if _OF_CLIENT.fullmatch(path.name)]
    needed: set[str] = set()
    for path in (folder / FILE.parent).glob("*.safetensors") if present else ():
        try:
            with safe_open(path, framework="pt") as file:
                needed |= set(read_header(file.metadata()).get("clients", {}).values())
        except (SafetensorError, OSError):
            return  # a kept one that is damaged: who knows what it needs
    for path in present:
        if path.name not in needed:
            with suppress(OSError):  # some systems keep a file that is still mapped; the next time, then
                path.unlink()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be made ({problem.strerror})") from None


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
    clients = _read_clients(folder, header.get("clients", {}), instead)
    server.round = header["round"]
    groups: dict[str, dict[str, torch.Tensor]] = {"server": {}, "moments": {}, "averaged": {}, "memory": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = tensor if server.owner(name) is not None else tensor.to(device)
    server.state = groups["server"]
    server.moments = groups["moments"]
    if groups["averaged"]:
        server.averaged = [groups["averaged"][str(i)] for i in range(len(groups["averaged"]))]
    server.memories, server.files = {}, {}
    for name, tensor in groups["memory"].items():
        client, _, rest = name.partition(".")
        server.memories.setdefault(int(client), {})[rest] = tensor
    for number, (file_path, own) in clients.items():
        server.take(number, file_path, own)
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
