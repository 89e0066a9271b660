"""What `reproduce` and `sweep` share: measuring a grid with progress, and saying how long it takes."""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from feddure.data import Dataset
    from feddure.studies.cells import Cell, Store

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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and about how long it takes.")]


def merge_all(folders: Sequence[Path] | None, store: "Store") -> None:
    """Take over the finished cells of other folders."""
    for folder in folders or ():
        new = store.merge(folder)
        print(f"{folder}: {new} new cells taken over", file=sys.stderr)


def measure(
    cells: "Sequence[Cell]", store: "Store", data_dir: Path | None, together: int | None, ray: str | None
) -> None:
    """Measure what is not measured yet; Ctrl-C keeps what is finished and says how to go on."""
    from feddure import data
    from feddure.studies import grid
    from feddure.studies.grid_progress import GridProgress

    left = grid.unmeasured(cells, store)
    if not left:
        return
    loaded: dict[str, Dataset] = {}

    def load(name: str) -> "Dataset":
        if name not in loaded:
            loaded.clear()  # one data set in memory at a time
            loaded[name] = data.load(name, data_dir, progress=True)
        return loaded[name]

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    progress = GridProgress(left)
    try:
        if ray is not None:
            from feddure.studies.spread import measure_on_ray

            measure_on_ray(cells, store, load, ray, together, progress)
        else:
            grid.measure(cells, store, load, together, progress)
    except (grid.GridStopped, KeyboardInterrupt) as asked:
        stopped = asked if isinstance(asked, grid.GridStopped) else grid.GridStopped(signal.SIGINT)
        progress.close()
        store.tabulate(cells)
        console.print(f"{stopped}\ngo on with: {' '.join(map(shlex.quote, ['feddure', *sys.argv[1:]]))}")
        raise typer.Exit(stopped.exit_code) from None
    finally:
        progress.close()
    others = grid.unmeasured(cells, store)
    if others:
        console.print(f"{len(others)} cells are being measured by another process; run this again when it has finished")


def show_estimate(cells: "Sequence[Cell]", store: "Store") -> None:
    """How much is left to measure, and about how long it takes."""
    from feddure.studies import grid, grid_cost
    from feddure.tracking.summary import duration

    left = grid.unmeasured(cells, store)
    estimate = grid_cost.estimate(left, store.measurements())
    here = "at the speed of the cells measured on this hardware"
    by = here if estimate.measured_here else f"on one {grid_cost.REFERENCE}"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(left)} of {len(cells)} cells to measure, about {duration(estimate.seconds)} {by}")
    if left and not estimate.measured_here:
        console.print("this hardware has not measured any cell yet: the first ones will tell how long it takes here")
