"""What a client remembers between its rounds, such as FedDure's F-reg under `f_reg_memory: client`.

It never leaves the site. A memory belongs to a run and to the round that made it; the server says which round's update
it used last, and the client goes on from that one. So an update that was lost or refused leaves no trace, and a server
that goes back to its last checkpoint finds the memory of that time: it is kept until a later checkpoint is written.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from feddure.errors import RunError
from feddure.flower.app import private_files as private
from feddure.flower.app.sanitize import sayable
from feddure.methods.base import State


class Memory(Protocol):
    """The memories of one run, by the round that made them."""

    def recall(self, round_number: int) -> State | None:
        """The memory of a round; None where it is lost."""

    def keep(self, round_number: int, memory: State, also: Iterable[int]) -> None:
        """Keep a round's memory, and of the earlier ones those of the rounds in `also`."""


class OnDisk:
    """Memories in a folder of the node; they survive its restart."""

    def __init__(self, state: Path, run_name: str):
        if not (run_name.isascii() and run_name.isalnum()):  # it comes from the server, and becomes a path here
            raise sayable(RunError(f"the server calls its run {run_name!r}, expected letters and digits; update it"))
        self._folder = state / "memory" / run_name

    def recall(self, round_number: int) -> State | None:
        try:
            return load_file(self._file(round_number))
        except (OSError, SafetensorError):
            return None

    def keep(self, round_number: int, memory: State, also: Iterable[int]) -> None:
        for folder in (self._folder.parent, self._folder):
            private.make_folder(folder, RunError)
        content = save({name: tensor.cpu().contiguous() for name, tensor in memory.items()})
        private.write_file(self._file(round_number), content, RunError, durable=True)
        kept = {self._file(number) for number in (round_number, *also)}
        for file in self._folder.glob("round-*.safetensors"):
            if file not in kept:
                file.unlink(missing_ok=True)

    def _file(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number}.safetensors"


class InContext:
    """Memories in the state that Flower's simulation keeps for a node."""

    def __init__(self, state: RecordDict, run_name: str):
        self._state = state
        self._prefix = f"memory-{run_name}-"

    def recall(self, round_number: int) -> State | None:
        record = self._state.array_records.get(f"{self._prefix}{round_number}")
        if record is None:
            return None
        return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}

    def keep(self, round_number: int, memory: State, also: Iterable[int]) -> None:
        kept = {f"{self._prefix}{number}" for number in also}
        for name in [name for name in self._state.array_records if name.startswith(self._prefix)]:
            if name not in kept:
                del self._state[name]
        self._state[f"{self._prefix}{round_number}"] = ArrayRecord(
            {name: Array(tensor.cpu().contiguous().numpy()) for name, tensor in memory.items()}
        )
