"""What `reproduce` and `sweep` share: measuring a grid with progress, and saying how long it takes."""

import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddure.cli.tables import plain_console, tell_error
from feddure.errors import ConfigError

if TYPE_CHECKING:
    from feddure.config import Experiment
    from feddure.data import Dataset
    from feddure.studies.grid.failures import Problem
    from feddure.studies.grid.store import Cell, Store

_MOST_ERRORS = 5  # different ones that a message tells

Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", metavar="DIR", help="Take over what was measured into DIR; may be repeated."),
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, help="Processes that share the cells, and this machine's GPU or cores.")
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS|local", help="Spread the cells over a Ray cluster, or this machine's."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and about how long it takes.")]


def check_places(ray: str | None, jobs: int, track: Sequence[str] = ()) -> None:
    """Refuse two answers to where the work is done, and services that cannot be told of it."""
    from feddure.tracking import tracker

    tracker.expect(track)
    if ray is not None and track:
        raise ConfigError("--ray and --track were both given; cells on other machines are not tracked, leave one out")
    if ray is not None and jobs > 1:
        raise ConfigError("--ray and --jobs were both given; Ray starts processes of its own, leave one of them out")


def check_merge(folders: Sequence[Path] | None) -> None:
    """Refuse folders that cannot be taken over, before anything is written."""
    from feddure.studies.grid.store import finished_cells

    for folder in folders or ():
        finished_cells(folder)


def check_data(cells: "Sequence[Cell]", store: "Store", data_dir: Path | None) -> None:
    """Refuse a grid whose data are not all there, rather than after hours with those that are."""
    from feddure import data
    from feddure.studies.grid.store import unmeasured

    for name in dict.fromkeys(cell.experiment.dataset for cell in unmeasured(cells, store)):
        data.expect_present(name, data_dir)


def merge_all(folders: Sequence[Path] | None, store: "Store", only: "Sequence[Cell] | None" = None) -> None:
    """Take over the finished cells of other folders: all, or `only` these."""
    for folder in folders or ():
        new = store.merge(folder, only)
        print(f"{folder}: {new} new cells taken over", file=sys.stderr)


def work_if_job(cells: "Sequence[Cell]", store: "Store", data_dir: Path | None, track: Sequence[str] = ()) -> None:
    """One of the processes of `--jobs` measures cells until none is left for it, and ends here."""
    from feddure.studies.grid import jobs
    from feddure.studies.grid.runner import GridStopped

    if jobs.is_job():
        try:
            jobs.work(cells, store, _loader(data_dir, progress=False), track)
        except GridStopped as stopped:
            raise typer.Exit(stopped.exit_code) from None
        raise typer.Exit


def measure(
    cells: "Sequence[Cell]",
    store: "Store",
    data_dir: Path | None,
    jobs: int = 1,
    ray: str | None = None,
    report: Callable[[], None] | None = None,
    track: Sequence[str] = (),
) -> "dict[str, Problem]":
    """Measure what is not measured yet; Ctrl-C keeps what is finished and says how to go on.

    `report` tells what is finished before Ctrl-C ends the command; by default results.csv is written. Returns what has
    ended some cells, by their hashes: the command writes its files without them, and ends with `end_if_failed`.
    """
    from feddure.reports import frame
    from feddure.studies.grid import runner
    from feddure.studies.grid.failures import Problem
    from feddure.studies.grid.jobs import measure_in_jobs
    from feddure.studies.grid.progress import GridProgress
    from feddure.studies.grid.store import unmeasured

    left = unmeasured(cells, store)
    if not left:
        return {}
    check_data(left, store, data_dir)
    if outdated := store.outdated(left):
        own = sorted({path for cell in outdated for path in cell.experiment.own_code().split(", ")})
        names = ", ".join(path.rpartition(" ")[0] for path in own)
        changed = f"the code has changed since {len(outdated)} of these cells were measured; they are measured anew"
        print(f"{names}: {changed}", file=sys.stderr)
    store.forget_failures(left)
    console = plain_console(stderr=True)
    progress = GridProgress(left, store)
    ended: list[int] = []
    try:
        if ray is not None:
            from feddure.studies.grid.ray import measure_on_ray

            measure_on_ray(left, store, _loader(data_dir), ray, progress.look)
        elif jobs > 1:
            ended = measure_in_jobs(left, store, min(jobs, len(left)), progress.look, progress.say)
        else:
            runner.measure(left, store, _loader(data_dir), progress.look, track=track)
    except (runner.GridStopped, KeyboardInterrupt) as asked:
        stopped = asked if isinstance(asked, runner.GridStopped) else runner.GridStopped(signal.SIGINT)
        progress.close()
        console.print(f"{stopped}\ngo on with: {' '.join(map(shlex.quote, ['feddure', *sys.argv[1:]]))}")
        (report or (lambda: frame.write_results(store.folder, frame.of_cells(cells, store))))()
        raise typer.Exit(stopped.exit_code) from None
    finally:
        progress.close()
    all_failures = store.failures()
    failed = {cell.hash: all_failures[cell.hash] for cell in left if cell.hash in all_failures}
    others = [cell for cell in unmeasured(left, store) if cell.hash not in failed]
    if others and ended:
        failed |= {cell.hash: Problem("processes ended before it was tried, see above") for cell in others}
    elif others:
        console.print(f"{len(others)} cells are being measured by another process; run this again when it has finished")
    problems = set(failed.values())
    if len(problems) == 1 and not any(store.has(cell) for cell in cells):  # there is nothing to report
        (problem,) = problems
        if not problem.traceback:  # a mistake that a check has found, in all of these cells
            store.forget_failures(left)
            raise ConfigError(problem.error)
    return failed


def reasons(failed: "Mapping[str, Problem]") -> dict[str, str]:
    """Why cells have failed, by their hashes."""
    return {name: problem.reason for name, problem in failed.items()}


def end_if_failed(failed: "Mapping[str, Problem]", cells: "Sequence[Cell]") -> None:
    """End the command with what has ended some of its cells; the last thing that it says."""
    from feddure.studies.grid.failures import told
    from feddure.studies.grid.store import named

    if not failed:
        return
    groups: dict[str, list[Cell]] = {}
    for cell in {cell.hash: cell for cell in cells}.values():
        if cell.hash in failed:
            groups.setdefault(failed[cell.hash].error, []).append(cell)
    each = [(named(group), failed[group[0].hash]) for group in groups.values()]
    more = [cell for group in list(groups.values())[_MOST_ERRORS:] for cell in group]
    lines = told(each[:_MOST_ERRORS]) + ([f"other errors ended {named(more)}"] if more else [])
    them = "it" if len(failed) == 1 else "them"
    tell_error("\n".join([*lines, f"What is finished is kept, and the same command tries {them} again"]))
    raise typer.Exit(1)


def show_estimate(cells: "Sequence[Cell]", store: "Store", jobs: int, ray: str | None, data_dir: Path | None) -> None:
    """How much is left to measure, and about how long it takes; what that does not count in is said."""
    from feddure.data import partition
    from feddure.simulation import estimate
    from feddure.studies.grid import cost
    from feddure.studies.grid.store import unmeasured

    load = _loader(data_dir, progress=False)

    def trial(experiment: "Experiment") -> float | None:
        try:
            images = load(experiment.dataset)
            made = partition.make(images, experiment.partition, experiment.partition_seed, experiment.validation)
            return estimate.seconds(experiment, images, made)
        except Exception:  # data that are not there, a method that fails: measuring says it
            return None

    left = unmeasured(cells, store)
    with plain_console(stderr=True).status("trying a few steps"):
        time = f", {cost.estimate(left, store.measurements(), trial).text}" if left else ""
    plain_console().print(f"{len(left)} of {len(cells)} cells to measure{time}")
    if left and (ray is not None or jobs > 1):
        option = "--ray" if ray is not None else "--jobs"
        print(f"The time is that of one whole GPU, or of all cores without one: {option} is not counted in")


def _loader(data_dir: Path | None, progress: bool = True) -> "Callable[[str], Dataset]":
    """Loads data sets, one in memory at a time."""
    from feddure import data

    return lru_cache(maxsize=1)(lambda name: data.load(name, data_dir, progress=progress))
