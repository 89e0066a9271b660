"""What `reproduce` and `sweep` share: measuring a grid with progress, and saying how long it takes."""

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from feddure.errors import ConfigError

if TYPE_CHECKING:
    from feddure.data import Dataset
    from feddure.studies.grid.failures import CellsFailed
    from feddure.studies.grid.store import Cell, Store

Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", metavar="DIR", help="Take over what was measured into DIR; may be repeated."),
]
Together = Annotated[
    int | None, typer.Option("--together", min=1, help="Cells that share the lanes; default: 9 on a GPU, else 1.")
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS|local", help="Spread the cells over a Ray cluster, or this machine's."),
]
Processes = Annotated[
    int | None,
    typer.Option("--processes", min=1, help="Processes that share this machine's GPU or cores; default: 1."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and about how long it takes.")]


def check_places(ray: str | None, processes: int | None) -> None:
    """Refuse two answers to where the work is done."""
    if ray is not None and processes is not None:
        raise ConfigError(
            "--ray and --processes were both given; Ray starts processes of its own, leave one of them out"
        )


def check_merge(folders: Sequence[Path] | None) -> None:
    """Refuse folders that cannot be taken over, before anything is written."""
    from feddure.studies.grid.store import RESULTS, finished_cells, read_rows

    for folder in folders or ():
        finished_cells(folder)
        read_rows(folder / RESULTS)


def check_data(cells: "Sequence[Cell]", store: "Store", data_dir: Path | None) -> None:
    """Refuse a grid whose data are not all there, rather than after hours with those that are."""
    from feddure import data
    from feddure.studies.grid import runner as grid

    for name in dict.fromkeys(cell.experiment.dataset for cell in grid.unmeasured(cells, store)):
        data.expect_present(name, data_dir)


def merge_all(folders: Sequence[Path] | None, store: "Store", only: "Sequence[Cell] | None" = None) -> None:
    """Take over the finished cells of other folders: all, or `only` these."""
    for folder in folders or ():
        new = store.merge(folder, only)
        print(f"{folder}: {new} new cells taken over", file=sys.stderr)


def measure(
    cells: "Sequence[Cell]",
    store: "Store",
    data_dir: Path | None,
    together: int | None,
    ray: str | None,
    processes: int | None,
    report: Callable[[], None] | None = None,
) -> "CellsFailed | None":
    """Measure what is not measured yet; Ctrl-C keeps what is finished and says how to go on.

    `report` tells what is finished before Ctrl-C ends the command; by default results.csv is written. Returns what has
    ended some cells: the command writes its files without them, and ends with `end_if_failed`.
    """
    from feddure import data
    from feddure.studies.grid import failures as grid_failures
    from feddure.studies.grid import runner as grid
    from feddure.studies.grid.progress import GridProgress

    left = grid.unmeasured(cells, store)
    if not left:
        return None
    check_data(left, store, data_dir)
    if outdated := store.outdated(left):
        own = sorted({path for cell in outdated for path in cell.experiment.own_code().split(", ")})
        names = ", ".join(path.rpartition(" ")[0] for path in own)
        print(
            f"{names}: the code has changed since {len(outdated)} of these cells were measured; they are measured anew",
            file=sys.stderr,
        )
    loaded: dict[str, Dataset] = {}

    def load(name: str) -> "Dataset":
        if name not in loaded:
            loaded.clear()  # one data set in memory at a time
            with grid_failures.loading():
                loaded[name] = data.load(name, data_dir, progress=True)
        return loaded[name]

    console = _console()
    progress = GridProgress(left)
    report = report or (lambda: store.tabulate(cells))
    try:
        if ray is not None:
            from feddure.studies.grid.ray import measure_on_ray

            measure_on_ray(cells, store, load, ray, together, progress)
        elif processes is not None and processes > 1:
            from feddure.studies.grid.processes import measure_in_processes

            measure_in_processes(cells, store, load, processes, together, progress)
        else:
            grid.measure(cells, store, load, together, progress)
    except (grid.GridStopped, KeyboardInterrupt) as asked:
        stopped = asked if isinstance(asked, grid.GridStopped) else grid.GridStopped(signal.SIGINT)
        progress.close()
        console.print(f"{stopped}\ngo on with: {' '.join(map(shlex.quote, ['feddure', *sys.argv[1:]]))}")
        report()
        raise typer.Exit(stopped.exit_code) from None
    except grid_failures.CellsFailed as failed:
        if failed.mistake and not any(store.has(cell) for cell in cells):
            raise ConfigError(failed.mistake) from None  # there is nothing to report
        return failed
    finally:
        progress.close()
    others = grid.unmeasured(cells, store)
    if others:
        console.print(f"{len(others)} cells are being measured by another process; run this again when it has finished")
    return None


def reasons(failed: "CellsFailed | None") -> dict[str, str]:
    """Why cells have failed, by their hashes."""
    return {cell.hash: problem.reason for cell, problem in failed.failures} if failed is not None else {}


def end_if_failed(failed: "CellsFailed | None") -> None:
    """End the command with what has ended some of its cells; the last thing that it says."""
    if failed is not None:
        console = _console()
        console.print("error:", style="bold red", end=" ")
        console.print(str(failed))
        raise typer.Exit(1)


def show_estimate(
    cells: "Sequence[Cell]", store: "Store", together: int | None, ray: str | None, processes: int | None
) -> None:
    """How much is left to measure, and about how long it takes; what that does not count in is said."""
    from feddure.studies.grid import cost as grid_cost
    from feddure.studies.grid import runner as grid

    left = grid.unmeasured(cells, store)
    console = Console(highlight=False, soft_wrap=True)
    if not left:
        console.print(f"0 of {len(cells)} cells to measure")
        return
    estimate = grid_cost.estimate(left, store.measurements())
    console.print(f"{len(left)} of {len(cells)} cells to measure, {estimate.text}")
    if estimate.warning:
        console.print(estimate.warning)
    given = [
        name
        for name, divides in (
            ("--processes", processes is not None and processes > 1),
            ("--together", together is not None),
            ("--ray", ray is not None),
        )
        if divides
    ]
    if given:
        console.print(
            "The time is that of one whole GPU, or of all cores without one, however many cells share it: "
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} not counted in"
        )


def _console() -> Console:
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
