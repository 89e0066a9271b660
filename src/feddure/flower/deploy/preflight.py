"""What a run or a site is asked for, tried out here before anything is started: it would fail there in every round."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from feddure import config
from feddure.data.sources.listing import entries, files_below
from feddure.errors import ConfigError
from feddure.flower.app import site_data
from feddure.flower.app import worker as site
from feddure.flower.app.description import Description, did_you_mean
from feddure.flower.app.privacy import Protection
from feddure.flower.app.run_config import RunOptions
from feddure.simulation import runs
from feddure.simulation.engine import Engine
from feddure.simulation.server import ImageCounts, Server


def try_site(options: Mapping[str, Any]) -> None:
    """Refuse options of a site's ClientApp with which it could not train."""
    _protection(options.get("clipping-norm", 0.0), options.get("dp-epsilon", 0.0), options.get("dp-delta", 1e-5))
    Engine(site.read_experiment(config.Experiment().to_yaml(), str(options.get("device", ""))).engine)


def try_run(options: RunOptions, description: Description) -> None:
    """Refuse options with which a run's ServerApp would end before its first round."""
    options = _as_begun(options)
    runs.check_folder(options.experiment, options.folder, options.resume)
    if options.minimum_sites > len(description.sites):
        raise ConfigError(
            f"--minimum-sites {options.minimum_sites}: the federation '{description.name}' has "
            f"{len(description.sites)} sites; expected that number or fewer"
        )
    protection = _protection(options.clipping_norm, options.dp_epsilon, options.dp_delta)
    if options.tests is not None:
        _expect_tests(options.tests.folder, description)
    experiment = options.experiment
    Engine(experiment.engine)
    if ":" in experiment.method + experiment.model:
        return  # the ServerApp looks for modules elsewhere than this process
    # The network is made where it takes no memory of a GPU that the run needs.
    engine = Engine(experiment.engine.model_copy(update={"device": "cpu", "precision": "fp32", "compile": False}))
    holdings = [ImageCounts(1, 1) for _ in description.sites]
    server = Server(experiment, site_data.without_images(description), holdings, engine, description.fingerprint())
    if protection.epsilon and server.state["statistics"].numel():
        raise ConfigError("--dp-epsilon: batch-norm statistics cannot be made private; add --set norm=group")


def _as_begun(options: RunOptions) -> RunOptions:
    """What the ServerApp settled when the run began stays so when it goes on."""
    present = runs.read_config(options.folder) if options.resume else None
    if present is None or options.experiment.unlabelled_batch != "auto":
        return options
    tree = options.experiment.model_dump() | {"unlabelled_batch": present.unlabelled_batch}
    return replace(options, experiment=config.build(tree))


def _protection(clipping_norm: float, epsilon: float, delta: float) -> Protection:
    try:
        return Protection(clipping_norm, epsilon, delta)
    except ConfigError as problem:
        raise ConfigError(str(problem).replace("clipping-norm", "clip-norm")) from None  # as the option is called


def _expect_tests(folder: Path, description: Description) -> None:
    if not folder.is_dir():
        raise ConfigError(f"--test {folder}: there is no such folder; expected <class>/ folders with images in it")
    for entry in entries(folder):
        if not entry.is_dir() or entry.name not in description.classes:
            raise ConfigError(
                f"--test {folder}: '{entry.name}' is no folder of a class; the federation '{description.name}' has: "
                f"{', '.join(description.classes)}{did_you_mean(entry.name, description.classes)}"
            )
    if not any(files_below(folder)):
        raise ConfigError(f"--test {folder}: no file is there; expected <class>/ folders with images in it")
