"""The command lines of Flower that feddure runs, and the environment they run in: pure functions of what was asked.

One connection is known to Flower, called `federation`: the SuperLink on this machine's loopback address.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddure.errors import ConfigError
from feddure.flower.deploy.layout import Bundle, Connection, ServerFolder, join_address

CONNECTION = "federation"
LOOPBACK = "127.0.0.1"

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower asks nobody on the internet for anything, and installs nothing."""

_OWN_SUPEREXEC = ("--isolation", "process")
"""Flower would start a SuperExec by itself, and never look after it: feddure starts one that it can watch."""


def superlink(folder: ServerFolder, control_port: int, secure: bool) -> list[str]:
    """The SuperLink, on the loopback address only; sites reach it through the gate."""
    if secure:
        protection = ["--ssl-ca-certfile", str(folder.authority), "--ssl-certfile", str(folder.certificate)]
        protection += ["--ssl-keyfile", str(folder.key), "--enable-supernode-auth"]
    else:
        protection = ["--insecure"]
    return [
        program("flower-superlink"),
        *protection,
        *("--host", LOOPBACK, "--port", str(control_port)),
        *("--database", str(folder.database)),
        *_OWN_SUPEREXEC,
        "--disable-runtime-dependency-installation",
    ]


def superexec(port: int, parent: int, authority: Path | None) -> list[str]:
    """What starts the programs of runs for the SuperLink or SuperNode at this port, and ends with that process."""
    return [
        program("flower-superexec"),
        *(["--root-certificates", str(authority)] if authority is not None else ["--insecure"]),
        *("--runtime-api-address", join_address(LOOPBACK, port)),
        *("--parent-pid", str(parent)),
    ]


def supernode(
    bundle: Bundle, connection: Connection, data: Path, port: int, options: Mapping[str, Any] | None = None
) -> list[str]:
    """A site's SuperNode; `port` is for the site's own processes, `options` are those of its ClientApp."""
    if connection.secure:
        protection = ["--root-certificates", str(bundle.authority), "--auth-supernode-private-key", str(bundle.key)]
    else:
        protection = ["--insecure"]
    config: dict[str, Any] = {
        "site": connection.site,
        "data": str(data),
        "state": str(bundle.state),
        "description": str(bundle.description),
        **(options or {}),
    }
    return [
        program("flower-supernode"),
        *("--superlink", connection.address),
        *protection,
        *("--host", LOOPBACK, "--port", str(port)),
        *_OWN_SUPEREXEC,
        *("--node-config", toml_pairs(config)),
    ]


def register(public_key: Path, site: str) -> list[str]:
    """Tell the SuperLink a site's public key."""
    return [*_flwr("supernode", "register"), str(public_key), CONNECTION, "--name", site, "--format", "json"]


def unregister(node: str) -> list[str]:
    """Take a site's old key back."""
    return [*_flwr("supernode", "unregister"), node, CONNECTION, "--format", "json"]


def list_nodes() -> list[str]:
    """Which nodes are registered and online."""
    return [*_flwr("supernode", "list"), CONNECTION, "--format", "json"]


def start_run(app: Path, options: Mapping[str, Any]) -> list[str]:
    """Start a run of the app."""
    return [*_flwr("run"), str(app), CONNECTION, "--run-config", toml_pairs(options), "--format", "json"]


def stream_log(run: str) -> list[str]:
    """Show a run's log until it ends."""
    return [*_flwr("log"), run, CONNECTION, "--stream"]


def stop_run(run: str) -> list[str]:
    """End a run early."""
    return [*_flwr("stop"), run, CONNECTION, "--format", "json"]


def list_runs(run: str | None = None) -> list[str]:
    """The runs and how they ended, or one of them."""
    chosen = ["--run-id", run] if run is not None else []
    return [*_flwr("list"), CONNECTION, *chosen, "--format", "json"]


def connections(folder: ServerFolder, control_port: int, secure: bool) -> str:
    """Flower's config.toml: the one connection, by absolute path."""
    protection = f"root-certificates = {_toml(str(folder.authority.resolve()))}" if secure else "insecure = true"
    address = _toml(join_address(LOOPBACK, control_port))
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = {address}\n{protection}\n'


def environment(
    flower_home: Path, programs: Path | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of Flower's processes: quiet, with its own home, and with this Python's programs on the path.

    What lies in `programs` is found before those.
    """
    found = dict(os.environ if base is None else base) | QUIET
    found["FLWR_HOME"] = str(flower_home.resolve())
    # Flower starts its other programs by bare name.
    found["PATH"] = os.pathsep.join(map(str, filter(None, (programs, _programs(), found.get("PATH")))))
    # Its processes talk to each other on the loopback address, whatever proxy leads to the outside.
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join([*filter(None, [found.get(name)]), LOOPBACK, "localhost"])
    return found


def shown(command: Sequence[str]) -> str:
    """A command as a person would type it."""
    first, *rest = command
    return shlex.join([Path(first).name, *rest])


def toml_pairs(values: Mapping[str, Any]) -> str:
    """key=value pairs as Flower's --run-config and --node-config read them."""
    return " ".join(f"{key}={_toml(value)}" for key, value in values.items())


def program(name: str) -> str:
    """The path of one of Flower's programs beside this Python, or its name where it lies elsewhere on the path."""
    beside = _programs() / name
    return str(beside) if beside.exists() else name


def _programs() -> Path:
    return Path(sys.executable).parent


def _flwr(*words: str) -> list[str]:
    return [program("flwr"), *words]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    # Flower's own reader of these pairs knows no escapes: a text must do without one of the two quotes.
    text = str(value)
    if not any(character in text for character in '"\\\n'):
        return f'"{text}"'
    if not any(character in text for character in "'\n"):
        return f"'{text}'"
    raise ConfigError(f"{text!r}: has quotation marks that Flower cannot be told; use a name without them")
