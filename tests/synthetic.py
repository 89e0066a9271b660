"""Measurements that nobody made: cells and rows with accuracies a test chooses."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from feddure import experiments
from feddure.reports import frame
from feddure.studies.grid.store import Cell, Measurement, Store
from feddure.studies.paper.rows import Row

ENVIRONMENT = {"gpu": "synthetic", "commit": "0000000", "python": "3", "torch": "2", "numpy": "2"}


def measurement(
    accuracy: float, rounds: int = 200, steps: float = 5.0, experiment: Mapping[str, Any] = {}, name: str = ""
) -> Measurement:
    """What would have been found by an experiment that ends at this accuracy, in per cent."""
    every = range(5, rounds + 1, 5) if rounds >= 5 else [rounds]
    share = accuracy / 100
    return Measurement(
        experiment=dict(experiment),
        config_hash=name,
        rounds=rounds,
        local_steps=steps,
        accuracy_last=share + 0.01,
        accuracy_last10=share,
        accuracy_ema=share + 0.02,
        curve=[(number, share * (1 - math.exp(-6 * number / rounds)), share) for number in every],
        seconds=1.0,
        build_seconds=1.0,
        partition="0",
        environment=ENVIRONMENT,
    )


def measured(cell: Cell, accuracy: float, steps: float = 5.0) -> Measurement:
    """A cell that ends at this accuracy, in per cent."""
    return measurement(accuracy, cell.experiment.rounds, steps, experiments.changes(cell.experiment), cell.hash)


def filled(folder: Path, cells: Iterable[Cell], accuracy: Callable[[Cell], float | None]) -> Store:
    """A store that holds these cells with these accuracies in per cent; None leaves a cell unmeasured."""
    store = Store(folder)
    store.keep(*(measured(cell, value) for cell in cells if (value := accuracy(cell)) is not None))
    return store


def row(
    study: str,
    method: str,
    accuracies: Mapping[int, float],
    reference: Mapping[int, float] = {},
    missing: Iterable[int] = (),
    failed: Mapping[int, str] = {},
    steps: float = 5.0,
    rounds: int = 200,
    environment: Mapping[str, Any] = ENVIRONMENT,
    **fields: Any,
) -> Row:
    """A row with these accuracies in per cent by seed, beside those of labels-only training."""
    every = range(5, rounds + 1, 5) if rounds >= 5 else [rounds]
    runs: list[dict[str, Any]] = [
        {
            "seed": seed,
            "rounds": rounds,
            "local_steps": steps,
            "accuracy_last10": accuracy,
            "reference": reference.get(seed, math.nan),
            "curve": [(number, accuracy * (1 - math.exp(-6 * number / rounds)), None) for number in every],
            "environment": environment,
            "failed": "",
        }
        for seed, accuracy in accuracies.items()
    ]
    runs += [{"seed": seed, "failed": failed.get(seed, ""), "curve": []} for seed in (*missing, *failed)]
    place = {"preset": "aaai24", "dataset": "cifar10", "setting": "dir-dir"} | fields
    columns = [*frame.COLUMNS, "reference"]
    return Row(study=study, method=method, runs=pd.DataFrame(runs, columns=columns), **place)
