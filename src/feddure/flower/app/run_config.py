"""The run's options, as Flower's `--run-config` and an app's pyproject.toml give them."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddure import config
from feddure.config import Experiment
from feddure.errors import ConfigError
from feddure.flower.app import description as descriptions
from feddure.flower.app import location as places
from feddure.flower.app.description import Description, did_you_mean
from feddure.flower.app.location import Place

KEYS: dict[str, tuple[Any, str]] = {
    "preset": ("", "Preset to start from, such as demo; empty for the defaults."),
    "method": ("", "Method; empty for the preset's."),
    "rounds": (0, "Number of rounds; 0 for the preset's."),
    "seed": (-1, "Seed; -1 for the preset's."),
    "settings": ("", "Any other fields of an experiment: key=value, with spaces between several."),
    "run-folder": ("runs/federation", "Where the server writes the run."),
    "resume": (False, "Go on with the run that is in the run folder."),
    "test-folder": ("", "Folder with <class>/ images on which the server tests the global model; empty for none."),
    "minimum-sites": (0, "Fewest connected sites to train with; 0: all to start, and then any."),
    "wait-seconds": (600.0, "Longest time to wait for so many sites."),
    "timeout-seconds": (0.0, "Longest time to wait for the answers of a round; 0 for the description's."),
    "clipping-norm": (0.0, "Bound on the Euclidean norm of a site's update; 0 for none."),
    "dp-epsilon": (0.0, "Epsilon of local differential privacy in each round, at most 1; 0 for none."),
    "dp-delta": (1e-5, "Delta of local differential privacy."),
    "dataset": ("fashion-mini", "In Flower's simulation, without a description: the data set to share out."),
    "data-dir": ("", "In Flower's simulation: where downloaded data sets lie; empty for the usual place."),
    "description": ("", "The federation's description, as in federation.yaml; empty for a simulation."),
}
"""Every key with its default and meaning."""


@dataclass(frozen=True)
class RunOptions:
    """What the operator asks of a run."""

    experiment: Experiment
    description: Description | None  # None in Flower's simulation
    folder: Path
    resume: bool
    tests: Place | None
    minimum_sites: int
    wait_seconds: float
    timeout_seconds: float
    clipping_norm: float
    dp_epsilon: float
    dp_delta: float
    data_dir: str
    clients_given: bool  # whether partition.clients was asked for


def read(given: Mapping[str, Any]) -> RunOptions:
    """The options in a run's configuration; what is not given has its default."""
    for key in given:
        if key not in KEYS:
            known = tuple(KEYS)
            raise ConfigError(
                f"run-config: unknown key '{key}'; there are: {', '.join(known)}{did_you_mean(key, known)}"
            )
    values = {key: _typed(key, given.get(key, default), default) for key, (default, _) in KEYS.items()}
    text = values["description"].strip()
    description = descriptions.parse(text, "run-config description") if text else None
    sets = shlex.split(values["settings"])
    experiment = _experiment(values, description, sets)
    if experiment.batch_norm == "static":
        raise ConfigError("batch_norm: static was given, but a server has no training images; use aggregate")
    timeout = values["timeout-seconds"] or (description.timeout_seconds if description else 600.0)
    return RunOptions(
        experiment=experiment,
        description=description,
        folder=Path(values["run-folder"]).expanduser(),
        resume=values["resume"],
        tests=places.read(values["test-folder"], "test-folder") if values["test-folder"] else None,
        minimum_sites=values["minimum-sites"],
        wait_seconds=values["wait-seconds"],
        timeout_seconds=timeout,
        clipping_norm=values["clipping-norm"],
        dp_epsilon=values["dp-epsilon"],
        dp_delta=values["dp-delta"],
        data_dir=values["data-dir"],
        clients_given=any(text.partition("=")[0].strip() == "partition.clients" for text in sets),
    )


def _experiment(values: dict[str, Any], description: Description | None, sets: list[str]) -> Experiment:
    changes: dict[str, Any] = {
        "method": values["method"] or None,
        "rounds": values["rounds"] or None,
        "seed": values["seed"] if values["seed"] >= 0 else None,
        "checkpoint_every": 1,
    }
    if description is None:
        changes["dataset"] = values["dataset"]
    else:
        changes |= {
            "dataset": description.name,
            "partition.setting": "sites",
            "partition.clients": len(description.sites),
        }
    return config.load(values["preset"] or None, None, changes, sets)


def _typed(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
        raise ConfigError(f"run-config {key}: {value!r} was given, expected {words[type(default)]}")
    if isinstance(value, float) and not value >= 0:
        raise ConfigError(f"run-config {key}: {value!r} was given, expected 0 or more")
    return value
