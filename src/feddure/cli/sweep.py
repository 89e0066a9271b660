"""`feddure sweep`: a grid of the user's own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from feddure.cli import grids, options
from feddure.cli.options import AllowModules, DataDir, Init, Track, names
from feddure.cli.tables import listing, numbers, plain_console, table
from feddure.terminal import Console

if TYPE_CHECKING:
    from feddure.studies.grid.store import Store
    from feddure.studies.sweep import Sweep

_MOST_LINES = 30  # combinations that a plan lists


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="What to sweep over; see below.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder; default: runs/sweep-FILE.")] = None,
    init: Init = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Measure this combination alone; * is any text. May be repeated."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="0,1", help="Measure these of the file's seeds alone.")
    ] = None,
    merge: grids.Merge = None,
    jobs: grids.Jobs = 1,
    ray: grids.Ray = None,
    dry_run: grids.DryRun = False,
    track: Track = None,
    allow_modules: AllowModules = False,
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

    A case may say what it is there for (about: a sentence) and which earlier case it is compared with (against: its
    name); both are in a table of cases then. Modules beside the file are found.

    Examples:

    ```text
    feddure sweep rates.yaml --dry-run                  # what would be measured, and how long it takes
    feddure sweep rates.yaml                            # into runs/sweep-rates
    feddure sweep rates.yaml --jobs 2                   # two cells at a time on this machine
    feddure sweep rates.yaml --seeds 0 --only "few*"    # a part of it first
    feddure sweep rates.yaml --ray ray://head:10001     # on a Ray cluster
    feddure sweep rates.yaml --merge from-machine-b     # with the cells that another machine has measured
    ```
    """
    from feddure.studies import sweep as study
    from feddure.studies.grid.store import Store

    wanted = study.read(file, init, allow_modules)
    folder = out if out is not None else Path("runs") / f"sweep-{wanted.name}"
    services = names("--track", track)
    part = wanted.part(only or (), options.numbers("--seeds", seeds) if seeds is not None else ())
    grids.work_if_job(part.cells(), Store(folder), data_dir, services)
    study.check_folder(wanted, folder, merge or ())
    grids.check_places(ray, jobs, services)
    if dry_run:
        merged = Store(folder, merge or ())
        _show_plan(part, merged)
        grids.show_estimate(part.cells(), merged, jobs, ray, data_dir)
        return
    store = study.open_folder(wanted, folder, merge or (), data_dir, plain_console(stderr=True).print, part)
    failed = grids.measure(part.cells(), store, data_dir, jobs, ray, lambda: _report(wanted, store), services)
    _report(wanted, store)
    grids.end_if_failed(failed, part.cells())


def _report(wanted: "Sweep", store: "Store") -> None:
    """Write the files, and print the leaderboards."""
    from feddure.studies import sweep_report

    files = sweep_report.write(wanted, store)
    leaderboards = sweep_report.leaderboards(wanted, store)
    explanation = sweep_report.explanation(wanted, leaderboards)
    console = plain_console()
    several = len(leaderboards) > 1
    for leaderboard in leaderboards:
        title = f"{wanted.name}: {leaderboard.title}" if several else wanted.name
        caption = "" if several else explanation
        Console().print("", table(title, leaderboard.table(brief=True), caption, numbers_from=2, wrapped="combination"))
        console.print(leaderboard.verdict() if several else f"\n{leaderboard.verdict()}")
    if several:
        Console(highlight=False, markup=False).print(f"\n{explanation}", style="dim italic")
    absent = sum(len(row.runs) - len(row.measured) for leaderboard in leaderboards for row in leaderboard.rows)
    if absent:
        console.print(f"{absent} cells are not measured; the order may change when they are")
    console.print("", *files, sep="\n")


def _show_plan(wanted: "Sweep", store: "Store") -> None:
    listed = listing("combination", *numbers("seeds", "measured"))
    for point in wanted.points[:_MOST_LINES]:
        measured = sum(store.has(cell) for cell in point.cells)
        listed.add_row(escape(point.name), str(len(point.cells)), str(measured))
    console = Console(highlight=False)
    console.print(listed)
    if len(wanted.points) > _MOST_LINES:
        console.print(f"and {len(wanted.points) - _MOST_LINES} combinations more")
