"""`feddure reproduce`: the paper's tables, figures and claims, one command each."""

import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddure.cli import grids, tables
from feddure.cli.grids import DryRun, Jobs, Merge, Ray
from feddure.cli.options import DataDir, Sets, make_folder_of, names, numbers
from feddure.cli.theory import theory_progress
from feddure.errors import ConfigError, RunError, did_you_mean
from feddure.terminal import Console

if TYPE_CHECKING:
    from feddure.studies.grid.store import Cell, Store


What = StrEnum("What", "figure1 table1 table2 gamma labels clients theory claims tables all")

# What trains nothing has few options; a dry run says what it does.
_TRAINS_NOTHING = {
    "theory": "it measures the theorems on a small network, which takes minutes",
    "claims": "it judges what the other studies have measured into --out and --merge",
    "tables": "it makes tables, charts and claims of what is measured in --out and --merge",
}


def reproduce(
    context: typer.Context,
    what: Annotated[What, typer.Argument(help="A table, figure or chart of the paper, its claims, or all of it.")],
    datasets: Annotated[
        str | None, typer.Option("--datasets", metavar="A,B", help="Data sets; default: CIFAR-10 and Fashion-MNIST.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option("--settings", metavar="A,B", help="Settings: iid-iid, iid-dir, dir-dir.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", metavar="A,B", help="Methods; default: all.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="0,1,2", help="Seeds of every cell.")] = "0,1,2",
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Communication rounds, where not the preset's.")
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="aaai24, or aaai24-fine with about 45 steps a round.")
    ] = "aaai24",
    sets: Sets = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the measurements.")] = Path(
        "reproduction"
    ),
    merge: Merge = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    dry_run: DryRun = False,
    data_dir: DataDir = None,
) -> None:
    """Reproduce the paper: measure what is not measured yet, and write tables and figures with its numbers beside ours.

    Every cell (a method on a data set, setting and seed) is kept in the folder as soon as it is finished. Run the same
    command again after a kill and it goes on; run it several times at once (`--jobs`, or by hand, also on several
    machines with a shared folder) and the runs divide the cells. Cells that fail are listed as missing, with the
    reason, and the exit code is 1.

    Examples:

    ```text
    feddure reproduce table1 --dry-run                        # what would be measured, and how long it takes
    feddure reproduce table1 --datasets cifar10 --seeds 0     # 30 runs; minutes on one large GPU
    feddure reproduce table1 --jobs 2                         # one evaluates while the other keeps the GPU busy
    feddure reproduce all --out reproduction                  # everything; interrupt and repeat as you like
    feddure reproduce table1 --preset aaai24-fine --methods fedavg-matched,fedavg-fixmatch,fedmatch,feddure
    feddure reproduce table1 --methods fedmatch --set fedmatch.optimizer=common    # a table of its own
    feddure reproduce gamma --ray auto                        # on a Ray cluster
    feddure reproduce claims --merge from-machine-a --merge from-machine-b
    feddure reproduce tables --out results/reproduction       # all files anew from the measured cells alone
    ```
    """
    from feddure import experiments
    from feddure import methods as known_methods
    from feddure.studies import sweep
    from feddure.studies.grid.store import Store, finished_cells
    from feddure.studies.paper import plan

    _check_options(what, context)
    request = plan.Request(
        preset=preset,
        datasets=names("--datasets", datasets),
        settings=names("--settings", settings),
        methods=names("--methods", methods),
        seeds=numbers("--seeds", seeds),
        rounds=rounds,
        changes=experiments.parse_sets(sets or ()),
    )
    _check_names("--settings", request.settings, plan.SETTINGS)
    _check_names("--methods", [name for name in request.methods if ":" not in name], known_methods.METHODS)
    for option in ("datasets", "settings", "methods", "seeds"):
        given = getattr(request, option)
        if twice := [value for value in given if given.count(value) > 1]:
            raise ConfigError(f"--{option}: {twice[0]} was given twice; name each once")
    studies = [name for name in plan.STUDIES if what in (name, "all")]
    cells = [cell for name in studies for cell in plan.cells(name, request)]
    store = Store(out)
    grids.work_if_job(cells, store, data_dir)
    sweep.expect_no_sweep(out)
    for other in merge or ():
        finished_cells(other)
    grids.check_places(ray, jobs)
    if dry_run:
        if what in _TRAINS_NOTHING:
            print(f"{what} trains no federation: {_TRAINS_NOTHING[what]}")
        else:
            merged = Store(out, merge or ())
            _show_plan(cells, merged)
            grids.show_estimate(cells, merged, jobs, ray, data_dir)
        return
    for other in merge or ():
        print(f"{other}: {store.merge(other)} new cells taken over", file=sys.stderr)
    if what == "tables":
        cells, failed = plan.begun(store), {}
        if not cells:
            raise RunError(f"{out}: nothing of the paper is measured there; start with: feddure reproduce table1")
    else:
        failed = grids.measure(cells, store, data_dir, jobs, ray)
    _report(what, cells, store)
    grids.end_if_failed(failed, cells)


def _check_options(what: What, context: typer.Context) -> None:
    """Refuse options that would change nothing."""
    for parameter in context.command.params if what in _TRAINS_NOTHING else ():
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"  # the environment may say it for all commands
        if given and parameter.name not in ("merge", "out", "what", "dry_run"):
            about = f"{what} trains no federation: {_TRAINS_NOTHING[what]}"
            raise ConfigError(f"{parameter.opts[0]} does not apply: {about}; expected only --merge, --out")


def _check_names(option: str, given: Sequence[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{option} {name}: expected one of {', '.join(known)}{did_you_mean(name, known)}")


def _report(what: What, cells: "list[Cell]", store: "Store") -> None:
    """Write and print what is measured."""
    from feddure.reports import frame
    from feddure.studies.paper import plan, report

    make_folder_of(store.folder / "index.html", "--out")
    console = Console(highlight=False)
    written: list[Path] = []
    if cells:
        frame.write_results(store.folder, frame.of_cells(cells, store))
    for _, group in groupby(cells, lambda cell: (cell.study, cell.preset)):
        own = list(group)
        found = report.results(own, store)
        written.append(report.write(found, plan.stem(own), store.folder))
    if what in ("theory", "all"):
        with theory_progress() as progress:
            written.append(report.write_theory(store.folder, progress))
    if what in ("claims", "tables", "all"):
        written.append(report.write_claims(report.all_claims(store), store.folder))
    for path in written:
        tables.show_page(path)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _show_plan(cells: "list[Cell]", store: "Store") -> None:
    from feddure.studies.grid import cost
    from feddure.studies.grid.store import unmeasured
    from feddure.tracking.summary import duration

    measured = list(store.measurements())
    counted = tables.numbers("methods", "seeds", "cells", "measured", "time")
    table = tables.listing("study", "data set", "settings", *counted)
    for (study, dataset), group in groupby(cells, lambda cell: (cell.study, cell.experiment.dataset)):
        own = list(group)
        left = unmeasured(own, store)
        methods = {cell.experiment.method for cell in own}
        settings = dict.fromkeys(cell.experiment.partition.setting for cell in own)
        seeds = {cell.experiment.seed for cell in own}
        seconds = cost.estimate(left, measured).seconds
        measured_here = sum(store.has(cell) for cell in own)
        counts = (len(methods), len(seeds), len(own), measured_here)
        table.add_row(study, dataset, ", ".join(settings), *map(str, counts), duration(seconds))
    Console(highlight=False).print(table)
