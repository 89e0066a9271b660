"""A run's options, as Flower's `--run-config` gives them, and the app that it gives them to."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feddure import experiments, methods
from feddure.config import Experiment
from feddure.errors import ConfigError, RunError, did_you_mean
from feddure.files import write_whole
from feddure.flower.app import APP_NAME, CLIENT_APP, PUBLISHER, SERVER_APP
from feddure.flower.app import description as descriptions
from feddure.flower.app.description import Description
from feddure.flower.app.privacy import Protection
from feddure.flower.app.site_data import ImageFolder
from feddure.simulation import runs
from feddure.version import VERSION

KEYS: dict[str, Any] = {
    "preset": "",  # to start from; empty for the defaults
    "method": "",  # empty for the preset's
    "rounds": 0,  # 0 for the preset's
    "seed": -1,  # -1 for the preset's
    "init": "",  # a model to start from, at the server: a finished run's folder or a .safetensors file
    "settings": "",  # any other fields of an experiment: key=value, with spaces between several
    "run-folder": "runs/federation",  # where the server writes the run
    "resume": False,  # go on with the run that is in the run folder
    "round": 0,  # to go back to, with resume; 0 for the last
    "test-folder": "",  # with <class>/ images on which the server tests the global model; empty for none
    "minimum-sites": 0,  # fewest connected sites to train with; 0: all to start, and then any
    "wait-seconds": 600.0,  # for so many sites, at most
    "timeout-seconds": 0.0,  # for the answers of a round, at most; 0 for the description's
    "clip-norm": 0.0,  # bound on the Euclidean norm of a site's update; 0 for none
    "dp-noise": 0.0,  # on a site's update: standard deviation over clip-norm; 0 for none
    "server-folder": "",  # where the operator keeps what was agreed with sites; empty for nowhere
    "description": "",  # the federation's, as in federation.yaml
}
"""Every key with its default: Flower takes no other than those that the app has."""
WEIGHT_CAP = 3.0
"""Sites say themselves how many images they have: none weighs more than so many times the median."""
NORM_BOUND = 3.0
"""Longest update of a site, in medians of the round, where the settings say nothing else."""

_HEAD = f"""\
# A Flower app for feddure, written anew for each run. The code is that of the installed package.
[project]
name = "{APP_NAME}"
version = "{VERSION}"
description = "Federated semi-supervised learning with feddure"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "{PUBLISHER}"

[tool.flwr.app.components]
serverapp = "{SERVER_APP}"
clientapp = "{CLIENT_APP}"

[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class RunOptions:
    """What the operator asks of a run."""

    experiment: Experiment
    description: Description
    folder: Path
    resume: bool
    round: int  # to go back to; 0 for the last
    tests: ImageFolder | None
    minimum_sites: int
    wait_seconds: float
    timeout_seconds: float
    protection: Protection
    server_folder: Path | None


def read(given: Mapping[str, Any]) -> RunOptions:
    """The options in a run's configuration; what is not given has its default."""
    for key in given:
        if key not in KEYS:
            raise ConfigError(f"run-config: unknown key '{key}'; there are: {', '.join(KEYS)}{did_you_mean(key, KEYS)}")
    values = {key: _typed(key, given.get(key, default), default) for key, default in KEYS.items()}
    description = descriptions.parse(values["description"], "run-config description")
    experiment = _experiment(values, description)
    if experiment.batch_norm == "static":
        raise ConfigError("batch_norm: static was given, but a server has no training images; use aggregate")
    if experiment.partition.labelled_as_unlabelled:
        raise ConfigError(
            "partition.labelled_as_unlabelled: true was given, but the simulator alone knows it; set it to false"
        )
    if not methods.exchanges(experiment.method):
        raise ConfigError(
            f"method '{experiment.method}' exchanges nothing, so a federation has nothing to do; use another"
        )
    if experiment.server.dp_clip is not None:
        raise ConfigError(
            "server.dp_clip is for the simulator, whose noise everybody who knows the seed can remove; use --clip-norm "
            "and --dp-noise, which act at the sites"
        )
    return RunOptions(
        experiment=experiment,
        description=description,
        folder=Path(values["run-folder"]).expanduser(),
        resume=values["resume"],
        round=values["round"],
        tests=ImageFolder.parse(values["test-folder"], "test-folder") if values["test-folder"] else None,
        minimum_sites=values["minimum-sites"],
        wait_seconds=values["wait-seconds"],
        timeout_seconds=values["timeout-seconds"] or description.timeout_seconds,
        protection=Protection(values["clip-norm"], values["dp-noise"]),
        server_folder=Path(values["server-folder"]) if values["server-folder"] else None,
    )


def as_resumed(options: RunOptions) -> RunOptions:
    """The options of a run that goes on: what was settled when it began stays so."""
    present = runs.read_config(options.folder) if options.resume else None
    if present is None:
        return options
    tree = options.experiment.model_dump()
    if options.experiment.init is None:
        tree |= {"init": present.init, "init_sha256": present.init_sha256}
    if options.experiment.unlabelled_batch == "auto":
        tree["unlabelled_batch"] = present.unlabelled_batch
    return replace(options, experiment=experiments.build(tree))


def _experiment(values: dict[str, Any], description: Description) -> Experiment:
    changes = {
        "method": values["method"] or None,
        "rounds": values["rounds"] or None,
        "seed": values["seed"] if values["seed"] >= 0 else None,
        "init": values["init"] or None,
        "checkpoint_every": 1,
        "dataset": description.name,
        "partition.setting": "sites",
        "partition.clients": len(description.sites),
        "server.weight_cap": WEIGHT_CAP,
        "server.norm_bound": NORM_BOUND,
    }
    return experiments.load(values["preset"] or None, None, changes, shlex.split(values["settings"]))


def _typed(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
        raise ConfigError(f"run-config {key}: {value!r} was given, expected {words[type(default)]}")
    if isinstance(value, float) and not value >= 0:
        raise ConfigError(f"run-config {key}: {value!r} was given, expected 0 or more")
    return value


def write_app(folder: Path, description: Description) -> None:
    """Write what `flwr run FOLDER` needs: an app that points at this package, with this description."""
    values = KEYS | {"description": description.to_yaml()}
    # Texts and numbers of JSON are also TOML.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be made ({problem.strerror})") from None
    write_whole(folder / "pyproject.toml", (_HEAD + "".join(lines)).encode(), RunError)
