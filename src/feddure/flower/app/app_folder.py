"""A Flower app that points at this package: what `flwr run FOLDER` needs, and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddure.errors import ConfigError, RunError
from feddure.files import write_whole
from feddure.flower.app.description import Description, did_you_mean
from feddure.flower.app.run_config import KEYS
from feddure.version import VERSION

_HEAD = """\
# A Flower app for feddure: `flwr run` starts a run of it. The code is that of the installed package.
[project]
name = "feddure-federation"
version = {version}
description = "Federated semi-supervised learning with feddure"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "feddure"

[tool.flwr.app.components]
serverapp = "feddure.flower.app.server:app"
clientapp = "feddure.flower.app.client:app"

# Change any of these for one run with: flwr run . CONNECTION --run-config 'rounds=10 method="feddure"'
[tool.flwr.app.config]
"""


def write_app(folder: Path, description: Description | None, defaults: Mapping[str, Any] | None = None) -> None:
    """Write the app; `defaults` are values for keys of the run's configuration (see `run_config.KEYS`).

    Without a description the app is for Flower's simulation, on the data set that the configuration names.
    """
    values = {key: default for key, (default, _) in KEYS.items()}
    if description is None:
        values["preset"] = "demo"  # minutes on two CPU cores
    values |= defaults or {}
    for key in values:
        if key not in KEYS:
            known = tuple(KEYS)
            raise ConfigError(f"unknown key '{key}'; there are: {', '.join(known)}{did_you_mean(key, known)}")
    if description is not None:
        values["description"] = description.to_yaml()
    lines = [f"# {meaning}\n{key} = {_toml(values[key])}\n" for key, (_, meaning) in KEYS.items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be made ({problem.strerror})") from None
    content = _HEAD.format(version=_toml(VERSION)) + "".join(lines)
    write_whole(folder / "pyproject.toml", content.encode(), RunError)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)  # TOML's basic strings know all of JSON's escapes
