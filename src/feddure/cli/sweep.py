"""`feddure sweep`: a grid of the user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feddure.cli import grids
from feddure.cli.options import DataDir

if TYPE_CHECKING:
    from feddure.studies.grid.store import Store
    from feddure.studies.sweep import Sweep

_MOST_LINES = 30  # combinations that a plan lists


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="What to sweep over; see below.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder; default: runs/sweep-FILE.")] = None,
    merge: grids.Merge = None,
    jobs: grids.Jobs = 1,
    ray: grids.Ray = None,
    dry_run: grids.DryRun = False,
    data_dir: DataDir = None,
) -> None:
    """Measure every combination of any fields and methods on several seeds, and rank them.

    Combinations on different data (data set or partition) have a leaderboard each, as their accuracies do not compare.
    Finished cells are kept: run the same command again after a kill and it goes on; add values, cases or seeds to the
    file and only the new cells are measured. Writes results.csv, leaderboard.csv, leaderboard.md, leaderboard.png and
    report.html.

    The file:

    ```yaml
    preset: demo                        # or config: FILE, such as a run's config.yaml
    set: {rounds: 20}                   # changes of every experiment
    grid:                               # every combination of these values
      method: [feddure, fedavg-fixmatch]
      optimizer.learning_rate: [1e-3, 5e-4]
    cases:                              # and of these named changes, for what is no product
      - name: few labels
        partition.labels_per_class: 1
      - name: more labels
        partition.labels_per_class: 5
    seeds: [0, 1, 2]
    ```

    Examples:

    ```text
    feddure sweep rates.yaml --dry-run                  # what would be measured, and how long it takes
    feddure sweep rates.yaml                            # into runs/sweep-rates
    feddure sweep rates.yaml --jobs 2                   # two cells at a time on this machine
    feddure sweep rates.yaml --ray ray://head:10001     # on a Ray cluster
    feddure sweep rates.yaml --merge from-machine-b     # with the cells that another machine has measured
    ```
    """
    from feddure.studies import sweep as study
    from feddure.studies.grid.store import Merged, Store

    wanted = study.read(file)
    folder = out if out is not None else Path("runs") / f"sweep-{wanted.name}"
    grids.work_if_job(wanted.cells(), Store(folder), data_dir)
    study.check_folder(wanted, folder)
    grids.check_merge(merge)
    grids.check_places(ray, jobs)
    if dry_run:
        merged = Merged(folder, merge or ())
        _show_plan(wanted, merged)
        grids.show_estimate(wanted.cells(), merged, jobs, ray)
        return
    if not merge:  # what others have measured needs no data
        grids.check_data(wanted.cells(), Store(folder), data_dir)
    store = study.open_folder(wanted, folder)
    grids.merge_all(merge, store, wanted.cells())
    failed = grids.measure(wanted.cells(), store, data_dir, jobs, ray, lambda: _report(wanted, store))
    _report(wanted, store, grids.reasons(failed))
    grids.end_if_failed(failed, wanted.cells())


def _report(wanted: "Sweep", store: "Store", failed: Mapping[str, str] | None = None) -> None:
    from feddure.studies import sweep_report

    files = sweep_report.write(wanted, store, failed)
    _show(wanted, store)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for path in files:
        console.print(f"{path}")


def _show(wanted: "Sweep", store: "Store") -> None:
    from feddure.studies import sweep_report

    ranked = sweep_report.rankings(wanted, store)
    every = sweep_report.every_row(ranked)
    explanation = sweep_report.explanation(wanted, every)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if len(ranked) == 1:
        Console().print("", _table(wanted.name, *sweep_report.brief(wanted, every), caption=explanation))
        console.print(f"\n{sweep_report.verdict(every)}")
    else:
        for board, rows in ranked:
            Console().print("", _table(f"{wanted.name}: {board.title}", *sweep_report.brief(board.sweep, rows)))
            console.print(sweep_report.verdict(rows))
        Console(highlight=False, markup=False).print(f"\n{explanation}", style="dim italic")
    absent = sum(len(row.absent) for row in every)
    if absent:
        console.print(f"{absent} cells are not measured; the order may change when they are")
    console.print()


def _table(title: str, columns: list[str], lines: list[list[str]], caption: str | None = None) -> Table:
    table = Table(
        title=escape(title),
        title_justify="left",
        caption=caption and escape(caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for place, name in enumerate(columns):
        words = name == "combination"
        table.add_column(escape(name), justify="left" if words or not place else "right", no_wrap=not words)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def _show_plan(wanted: "Sweep", store: "Store") -> None:
    table = Table("combination", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("seeds", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in wanted.points[:_MOST_LINES]:
        measured = sum(store.has(cell) for cell in point.cells)
        table.add_row(escape(point.name), str(len(point.cells)), str(measured))
    console = Console(highlight=False)
    console.print(table)
    if len(wanted.points) > _MOST_LINES:
        console.print(f"and {len(wanted.points) - _MOST_LINES} combinations more")
