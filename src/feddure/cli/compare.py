"""`feddure compare`: several methods on the same partitions, clients and seeds."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddure.cli import options, own_images
from feddure.cli.tables import plain_console, table, tell_error, tell_folder
from feddure.terminal import Console

if TYPE_CHECKING:
    from feddure.studies.compare_report import View
    from feddure.studies.plan import Plan

_MANY_SEEDS = 5


def compare(
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="A,B,C", help="Methods to compare; a preset may name them.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0,1,2", help="Seeds of every method; default: the preset's, or one."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="METHOD", help="The reference; default: fedavg-matched, or the first."),
    ] = None,
    preset: options.Preset = None,
    file: options.ConfigFile = None,
    dataset: options.DatasetName = None,
    setting: options.Setting = None,
    model: options.Model = None,
    init: options.Init = None,
    rounds: options.Rounds = None,
    clients: options.Clients = None,
    sets: options.Sets = None,
    out: options.Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the folder's comparison, perhaps with more methods or seeds.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Processes that share the runs; default: one a core, at most four; GPU: one."
        ),
    ] = None,
    track: options.Track = None,
    skip_damaged: options.SkipDamaged = False,
    allow_modules: options.AllowModules = False,
    data_dir: options.DataDir = None,
) -> None:
    """Compare methods: same partition, same sampled clients, same seeds, and whether differences are more than chance.

    Writes comparison.csv, paired.csv, sites.csv and report.html, and for each method and seed an ordinary run folder. A
    method that fails is listed with the reason; the others are compared, and the exit code is 1.

    Examples:

    ```text
    feddure compare --preset demo                              # four methods, two minutes on 2 CPU cores
    feddure compare --preset demo --seeds 0,1                  # two seeds instead of four
    feddure compare --preset aaai24 --methods fedavg-matched,fedavg-fixmatch,feddure --seeds 0,1,2,3,4
    feddure compare --preset demo --methods local,fedavg-matched,fedtutor   # is joining worth it, site by site?
    feddure compare --dataset my/images                        # the same of your own images
    feddure compare --out runs/compare-demo --resume           # after Ctrl-C, a kill or a power cut
    feddure compare --out runs/compare-demo --resume --methods fedprox-uda --seeds 1,2
    ```
    """
    console = plain_console(stderr=True)
    with console.status("starting"):  # torch takes seconds to import
        from feddure import api, experiments
        from feddure.data.partition import expect_clients
        from feddure.simulation.runs import Interrupted
        from feddure.studies import compare as study
        from feddure.studies.grid import failures as grid_failures
        from feddure.studies.grid.jobs import is_job

    console.quiet = is_job()
    changes = experiments.by_key(
        dataset=api.data_name(dataset), setting=setting, clients=clients, model=model, init=init, rounds=rounds
    )
    read = own_images.reader(data_dir, console.print, skip_damaged)
    named = options.names("--methods", methods)
    numbers = [] if seeds is None else options.numbers("--seeds", seeds)
    plan, experiment, looked_at, folder = study.prepare(
        preset, file, changes, sets or (), named, numbers, against, out, resume, read, console.print, allow_modules
    )
    experiment = own_images.recorded(experiment, skip_damaged)
    services = options.names("--track", track)
    if is_job():
        study.work(plan, experiment, looked_at or read(experiment.dataset), folder, services)
        return
    study.check(plan, experiment, folder, resume)  # before a data set is downloaded
    images = looked_at or read(experiment.dataset)
    expect_clients(clients, experiment.partition.setting, images)
    processes = jobs or study.usual_jobs(plan, experiment)

    def started() -> None:
        tell_folder(console, "comparison", folder)
        if not resume:
            wanted = [experiment.model_copy(update={"method": method}) for method in plan.methods]
            own_images.say_plan(wanted, images, console.print, len(plan.seeds), processes)

    began = time.monotonic()
    try:
        arguments = [*sys.argv[1:], *(() if out is not None else ("--out", str(folder)))]
        found = study.compare(plan, experiment, images, folder, resume, True, services, processes, arguments, started)
    except Interrupted as stopped:
        console.print(str(stopped))
        raise typer.Exit(stopped.exit_code) from None
    _show(found, plan, folder, time.monotonic() - began)
    if found.failed:
        ended = [(f"method {method}", problem) for method, problem in found.failed.items()]
        go_on = (
            f"The others are compared; try again with: {study.resume_command(folder, plan, found.runs[0].experiment)}"
        )
        tell_error("\n".join([*grid_failures.told(ended), go_on]))
        raise typer.Exit(1)


def _show(view: "View", plan: "Plan", folder: Path, seconds: float) -> None:
    from feddure.methods import title as method_name
    from feddure.studies import plan as files
    from feddure.studies.compare import resume_command
    from feddure.tracking.summary import duration

    experiment = view.runs[0].experiment
    title = f"{experiment.dataset}, {experiment.partition.setting}"
    rows = view.methods()
    same = [name for name in ("seeds", "rounds") if rows[name].nunique() == 1]  # a terminal is narrow
    title += "".join(f", {rows[name][0]} {name if str(rows[name][0]) != '1' else name[:-1]}" for name in same)
    Console().print("", table(title, rows.drop(columns=same), view.about_methods(), numbers_from=1))
    if len(view.pairs()):
        found = table(f"against {method_name(plan.against)}", view.pairs(), view.about_pairs(), wrapped="verdict")
        Console().print("", found)
    console = plain_console()
    for sentence in view.joining.sentences() if view.joining is not None else ():
        console.print(f"\n{sentence}")
    console.print(f"\nreport  {folder / files.REPORT_FILE}")
    console.print(f"tables  {folder / files.TABLE_FILE}\n        {folder / files.PAIRED_FILE}")
    console.print(f"time    {duration(seconds)}")
    means = [found for (_, which), found in view.differences.items() if which == "last10"]
    undecided = not all(found.above or found.below for found in means)
    if undecided and len(plan.seeds) < _MANY_SEEDS:
        further = ",".join(str(max(plan.seeds) + number) for number in (1, 2))
        console.print(f"seeds   add some: {resume_command(folder, plan, experiment)} --seeds {further}")
