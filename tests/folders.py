"""Runs in folders, as small as they come, and ways to end them early."""

import errno
import os
from pathlib import Path
from typing import Any

import tiny
from feddure.data.dataset import Dataset
from feddure.simulation import checkpoint, runs
from feddure.tracking.records import Run

IMAGES = tiny.dataset(size=80, tests=20, side=8)
LONG: dict[str, Any] = {
    "rounds": 6,
    "checkpoint_every": 2,
    "evaluate_every": 3,
    "server.ema": 0.7,
    "server.optimizer": "momentum",
}
SAME = ("metrics.jsonl", "model.safetensors", "partition.npz", "config.yaml", str(checkpoint.FILE))
"""Files that equal runs leave equal to the byte."""


class Watcher:
    """An observer that looks away: TensorBoard, which it stands for, takes a second to import."""

    def __init__(self, *_: object):
        pass

    def round_done(self, federation: object, record: dict, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def execute(folder: Path, resume: bool = False, images: Dataset = IMAGES, **changes: Any) -> Run:
    """A tiny run into a folder."""
    return runs.execute(tiny.experiment(changes), images, folder, resume, progress=False)


def contents(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often the run was interrupted."""
    return {name: (folder / name).read_bytes() for name in SAME}


def visible(folder: Path) -> set[str]:
    """Names in a folder that `ls` shows."""
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}


def disk_is_full(*_: object, **__: object) -> None:
    """What a write does then."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
