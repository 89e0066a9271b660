"""A grid as commands and Python calls measure it: here, in several processes, or on a Ray cluster."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from functools import lru_cache
from pathlib import Path

from feddure import data
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureWarning
from feddure.studies.grid import runner
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.jobs import measure_in_jobs
from feddure.studies.grid.progress import GridProgress
from feddure.studies.grid.store import Cell, Store, unmeasured


def loader(data_dir: Path | None, progress: bool = True) -> Callable[[str], Dataset]:
    """Loads data sets, one in memory at a time."""
    return lru_cache(maxsize=1)(lambda name: data.load(name, data_dir, progress=progress))


def expect_data(cells: Iterable[Cell], store: Store, data_dir: Path | None) -> None:
    """Refuse a grid whose data are not all there, rather than after hours with those that are."""
    for name in dict.fromkeys(cell.experiment.dataset for cell in unmeasured(cells, store)):
        data.expect_present(name, data_dir)


def measure(
    cells: Sequence[Cell],
    store: Store,
    data_dir: Path | None,
    jobs: int = 1,
    ray: str | None = None,
    track: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, Problem]:
    """Measure what is not measured yet; returns what has ended some cells, by their hashes.

    A mistake that a check finds in all of them is an error.
    """
    left = unmeasured(cells, store)
    if not left:
        return {}
    expect_data(left, store, data_dir)
    if outdated := store.outdated(left):
        own = sorted({path for cell in outdated for path in cell.experiment.own_code().split(", ")})
        names = ", ".join(path.rpartition(" ")[0] for path in own)
        changed = f"the code has changed since {len(outdated)} of these cells were measured; they are measured anew"
        warnings.warn(f"{names}: {changed}", FeddureWarning, stacklevel=3)
    store.forget_failures(left)
    shown, load = GridProgress(left, store) if progress else None, loader(data_dir, progress)
    refresh: Callable[[], None] = shown.refresh if shown else lambda: None
    say: Callable[[str], None] = shown.say if shown else lambda line: None
    ended: list[int] = []
    with closing(shown) if shown else nullcontext():
        if ray is not None:
            from feddure.studies.grid.ray import measure_on_ray

            measure_on_ray(left, store, load, ray, refresh)
        elif jobs > 1:
            ended = measure_in_jobs(left, store, min(jobs, len(left)), refresh, say)
        else:
            runner.measure(left, store, load, refresh, track=track)
    noted = store.failures()
    failed = {cell.hash: noted[cell.hash] for cell in left if cell.hash in noted}
    others = [cell for cell in unmeasured(left, store) if cell.hash not in failed]
    if others and ended:
        failed |= {cell.hash: Problem("processes ended before it was tried, see above") for cell in others}
    elif others:
        busy = f"{len(others)} cells are being measured by another process; run this again when it has finished"
        warnings.warn(busy, FeddureWarning, stacklevel=3)
    problems = set(failed.values())
    if len(problems) == 1 and not any(store.has(cell) for cell in cells):  # there is nothing to report
        (problem,) = problems
        if not problem.traceback:  # a mistake that a check has found, in all of these cells
            store.forget_failures(left)
            raise ConfigError(problem.error)
    return failed
