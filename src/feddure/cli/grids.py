"""What `reproduce` and `sweep` share: measuring a grid with progress, and saying how long it takes."""

import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddure.cli.tables import plain_console, tell_error
from feddure.errors import ConfigError

if TYPE_CHECKING:
    from feddure.config import Experiment
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


def work_if_job(cells: "Sequence[Cell]", store: "Store", data_dir: Path | None, track: Sequence[str] = ()) -> None:
    """One of the processes of `--jobs` measures cells until none is left for it, and ends here."""
    from feddure.studies.grid import jobs
    from feddure.studies.grid.measure import loader
    from feddure.studies.grid.runner import GridStopped

    if jobs.is_job():
        try:
            jobs.work(cells, store, loader(data_dir, progress=False), track)
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
    from feddure.studies.grid import measure as grid
    from feddure.studies.grid.runner import GridStopped

    try:
        return grid.measure(cells, store, data_dir, jobs, ray, track)
    except (GridStopped, KeyboardInterrupt) as asked:
        stopped = asked if isinstance(asked, GridStopped) else GridStopped(signal.SIGINT)
        again = shlex.join(["feddure", *sys.argv[1:]])
        plain_console(stderr=True).print(f"{stopped}\ngo on with: {again}")
        (report or (lambda: frame.write_results(store.folder, frame.of_cells(cells, store))))()
        raise typer.Exit(stopped.exit_code) from None


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
    from feddure.studies.grid.measure import loader
    from feddure.studies.grid.store import unmeasured

    load = loader(data_dir, progress=False)

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
