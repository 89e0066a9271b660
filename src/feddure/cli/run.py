"""`feddure run`: one experiment, from the first round to the report."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from feddure import experiments
from feddure.cli.options import ConfigFile, DataDir, Preset, Sets, expect_clients


def run(
    preset: Preset = None,
    file: ConfigFile = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Data set (`feddure data list`).")] = None,
    setting: Annotated[
        str | None, typer.Option("--setting", help="iid-iid, iid-dir, dir-dir, fedmatch or sites.")
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help="Method name or package.module:Class.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Network name or package.module:Class.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Communication rounds.")] = None,
    clients: Annotated[int | None, typer.Option("--clients", help="Number of clients.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of every random decision.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; default: a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Train one method on one data set and report what came of it.

    Examples:

    ```text
    feddure run --preset demo                                  # minutes on two CPU cores
    feddure run --preset aaai24 --setting iid-iid --seed 1     # the paper's set-up, one GPU
    feddure run --preset demo --method fedavg-sl --set rounds=50
    feddure run --preset aaai24 --set server.ema=0.9           # also test a model averaged over rounds
    feddure run --dataset folder:my/images --setting sites --model cnn --rounds 50
    feddure run --out runs/mine --resume                       # after Ctrl-C, a kill or a power cut
    ```
    """
    from feddure import api, data
    from feddure.simulation import runs
    from feddure.tracking.console import summary_table

    changes: dict[str, Any] = {
        "dataset": dataset,
        "partition.setting": setting,
        "partition.clients": clients,
        "method": method,
        "model": model,
        "rounds": rounds,
        "seed": seed,
    }
    if resume and preset is None and file is None:
        file = runs.config_to_resume(out)
    experiment = experiments.load(preset, file, changes, sets or ())
    folder = out if out is not None else api.default_folder(experiment)
    images = data.load(experiment.dataset, data_dir, progress=True)
    expect_clients(clients, experiment.partition.setting, images)
    # Paths are printed as they are: on one line, and without a meaning for [brackets].
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    console.print(f"run folder: {folder}")
    finished_before = runs.is_finished(folder)
    try:
        finished = runs.execute(experiment, images, folder, resume)
    except runs.Interrupted as stopped:
        console.print(str(stopped))
        raise typer.Exit(stopped.exit_code) from None
    if finished_before:
        console.print("the run is finished already; nothing was trained")
    Console().print(summary_table(finished))
    Console(soft_wrap=True, markup=False, highlight=False).print(f"report: {folder / runs.REPORT_FILE}")
