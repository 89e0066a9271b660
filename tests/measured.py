"""What grids have measured, to compare."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feddure.data.dataset import Dataset
from feddure.studies.grid import runner
from feddure.studies.grid.store import Cell, Store

_IGNORED = {"seconds", "build_seconds", "environment"}


def found(store: Store, wanted: Sequence[Cell]) -> list[dict[str, Any]]:
    """All that was measured but for the time and the place."""
    fields = [dataclasses.asdict(store.find(cell)) for cell in wanted]
    return [{name: value for name, value in one.items() if name not in _IGNORED} for one in fields]


def here(folder: Path, wanted: Sequence[Cell], images: Dataset) -> list[dict[str, Any]]:
    """What this process measures."""
    store = Store(folder)
    runner.measure(wanted, store, lambda name: images)
    return found(store, wanted)
