"""`feddure run`: one experiment, from the first round to the report."""

from typing import Annotated

import typer

from feddure.cli import options, own_images
from feddure.cli.tables import plain_console, tell_folder
from feddure.terminal import Console


def run(
    preset: options.Preset = None,
    file: options.ConfigFile = None,
    dataset: options.DatasetName = None,
    setting: options.Setting = None,
    method: Annotated[str | None, typer.Option("--method", help="Method name or package.module:Class.")] = None,
    model: options.Model = None,
    init: options.Init = None,
    rounds: options.Rounds = None,
    clients: options.Clients = None,
    seed: options.Seed = None,
    sets: options.Sets = None,
    out: options.Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    track: options.Track = None,
    skip_damaged: options.SkipDamaged = False,
    allow_modules: options.AllowModules = False,
    data_dir: options.DataDir = None,
) -> None:
    """Train one method on one data set and report what came of it.

    Examples:

    ```text
    feddure run --preset demo                                  # half a minute on 2 CPU cores
    feddure run --preset aaai24 --setting iid-iid --seed 1     # the paper's set-up, one GPU
    feddure run --preset demo --method fedavg-sl --set rounds=50
    feddure run --preset aaai24 --set server.ema=0.9           # also test a model averaged over rounds
    feddure run --dataset my/images                            # your own: the preset recommended, fitted to them
    feddure run --dataset 'folder:my/images?size=64' --skip-damaged
    feddure run --dataset my/images --init runs/pretrained
    feddure run --preset demo --track mlflow                   # with pip install 'feddure[mlflow]'; or wandb
    feddure run --out runs/mine --resume                       # after Ctrl-C, a kill or a power cut
    ```
    """
    console = plain_console(stderr=True)
    with console.status("starting"):  # torch takes seconds to import
        from feddure import api, experiments, methods, plugins, recommended
        from feddure.data import partition
        from feddure.simulation import runs
        from feddure.tracking import tracker
        from feddure.tracking.console import summary_table

    named = api.data_name(dataset)
    changes = experiments.by_key(
        dataset=named, setting=setting, clients=clients, method=method, model=model, init=init, rounds=rounds, seed=seed
    )
    if resume and (out is None or (preset is None and file is None)):
        file = runs.config_to_resume(out)
    experiments.expect_given(preset, file, changes, sets or ())
    read = own_images.reader(data_dir, console.print, skip_damaged)
    experiment, looked_at = recommended.load(preset, file, changes, sets or (), read, console.print, allow_modules)
    experiment = own_images.recorded(experiment, skip_damaged)
    plugins.expect_allowed(*experiment.modules)  # before a data set is downloaded
    folder = out if out is not None else experiments.default_folder(experiment)
    runs.check_folder(experiment, folder, resume)
    finished_before = runs.is_finished(folder)
    if not finished_before:
        methods.make(experiment)  # reading images may take long
    observers = tracker.trackers(options.names("--track", track), folder)
    images = looked_at or read(experiment.dataset)
    partition.expect_clients(clients, experiment.partition.setting, images)

    def started() -> None:
        tell_folder(console, "run", folder)
        if not resume and not folder.exists():
            own_images.say_plan([experiment], images, console.print)

    try:
        finished = runs.execute(experiment, images, folder, resume, observers=observers, started=started)
    except runs.Interrupted as stopped:
        console.print(str(stopped))
        raise typer.Exit(stopped.exit_code) from None
    if finished_before:
        console.print(f"{folder}: the run is finished already; nothing was trained")
    Console().print(summary_table(finished))
    plain_console().print(f"report: {folder / runs.REPORT_FILE}")
    for name, place in tracker.places(folder):
        plain_console().print(f"{name}: {place}")
