"""`feddure compare`: several methods on the same partitions, clients and seeds."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from feddure.cli import options
from feddure.cli.tables import plain_console, table, tell_error

if TYPE_CHECKING:
    from feddure.api import Comparison


def compare(
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="A,B,C", help="Methods to compare; a preset may name them.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="0,1,2", help="Seeds of every method; default: one seed.")
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
    out: Annotated[Path | None, typer.Option("--out", help="Folder; default: a new one under runs/.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the folder's comparison, perhaps with more methods or seeds.")
    ] = False,
    track: options.Track = None,
    allow_modules: options.AllowModules = False,
    data_dir: options.DataDir = None,
) -> None:
    """Compare methods: same partition, same sampled clients, same seeds, and whether differences are more than chance.

    Writes comparison.csv, paired.csv, sites.csv and report.html, and for each method and seed an ordinary run folder. A
    method that fails is listed with the reason; the others are compared, and the exit code is 1.

    Examples:

    ```text
    feddure compare --preset demo                              # four methods, minutes on two CPU cores
    feddure compare --preset demo --seeds 0,1,2                # with intervals
    feddure compare --preset aaai24 --methods fedavg-matched,fedavg-fixmatch,feddure --seeds 0,1,2,3,4
    feddure compare --preset demo --methods local,fedavg-matched,fedtutor   # is joining worth it, site by site?
    feddure compare --dataset folder:my/images                 # the same of your own images
    feddure compare --out runs/compare-demo --resume           # after Ctrl-C, a kill or a power cut
    feddure compare --out runs/compare-demo --resume --methods fedprox-uda --seeds 1,2
    ```
    """
    from feddure import api, experiments
    from feddure.simulation.runs import Interrupted
    from feddure.studies import compare as study
    from feddure.studies.grid import failures as grid_failures

    began = time.monotonic()
    try:
        found = api.compare(
            preset,
            methods=options.names("--methods", methods),
            seeds=options.numbers("--seeds", seeds) if seeds is not None else (),
            against=against,
            config_file=file,
            dataset=dataset,
            setting=setting,
            model=model,
            init=init,
            rounds=rounds,
            clients=clients,
            out=out,
            resume=resume,
            data_dir=data_dir,
            track=options.names("--track", track),
            sets=experiments.parse_sets(sets or ()),
            allow_modules=allow_modules,
        )
    except Interrupted as stopped:
        plain_console(stderr=True).print(str(stopped))
        raise typer.Exit(stopped.exit_code) from None
    _show(found, time.monotonic() - began)
    if found.failed:
        ended = [(f"method {method}", problem) for method, problem in found.failed.items()]
        again = study.resume_command(found.folder, found.plan, found.runs[0].experiment)
        go_on = f"The others are compared; try again with: {again}"
        tell_error("\n".join([*grid_failures.told(ended), go_on]))
        raise typer.Exit(1)


def _show(found: "Comparison", seconds: float) -> None:
    from feddure.studies import compare as study
    from feddure.tracking.summary import duration

    folder, plan, experiment = found.folder, found.plan, found.runs[0].experiment
    title = f"{experiment.dataset}, {experiment.partition.setting}"
    view = found.view
    Console().print("", table(title, view.methods(), view.about_methods(), numbers_from=1))
    if len(view.pairs()):
        Console().print("", table(f"against {plan.against}", view.pairs(), view.about_pairs()))
    console = plain_console()
    for sentence in view.joining.sentences() if view.joining is not None else ():
        console.print(f"\n{sentence}")
    console.print(f"\nreport  {folder / study.REPORT_FILE}")
    console.print(f"tables  {folder / study.TABLE_FILE}\n        {folder / study.PAIRED_FILE}")
    console.print(f"time    {duration(seconds)}")
    if len(plan.seeds) == 1:
        further = ",".join(str(plan.seeds[0] + number) for number in (1, 2))
        console.print(f"seeds   add some: {study.resume_command(folder, plan, experiment)} --seeds {further}")
