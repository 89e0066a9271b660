"""Flower's programs: their environment and command lines, and what the server's operator asks of the SuperLink.

One connection is known to Flower, called `federation`: the SuperLink on this machine's loopback address.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddure.errors import ConfigError, RunError
from feddure.files import write_json, write_whole
from feddure.flower.app.sanitize import printable
from feddure.flower.deploy import certificates
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings

CONNECTION = "federation"
LOOPBACK = "127.0.0.1"
OWN_SUPEREXEC = ("--isolation", "process")
"""Flower would start a SuperExec by itself, and never look after it: feddure starts one that it can watch."""
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower asks nobody on the internet for anything, and installs nothing."""
_USED_BEFORE = "already in use"

Show = Callable[[str], None]
"""Prints a line for the operator."""
Registered = dict[str, dict[str, str]]
"""For each site its node's number and its key; no number, and the nodes before, while a registration is under way."""


def timed(show: Show) -> Show:
    """Shows lines with the time of day."""
    return lambda line: show(f"{time.strftime('%H:%M:%S')}  {line}")


def environment(flower_home: Path, programs: Path | None = None) -> dict[str, str]:
    """The environment of Flower's processes: quiet, with its own home, and with this Python's programs on the path.

    What lies in `programs` is found before those.
    """
    found = dict(os.environ) | _QUIET
    found["FLWR_HOME"] = str(flower_home.resolve())
    # Flower starts its other programs by bare name.
    found["PATH"] = os.pathsep.join(map(str, filter(None, (programs, _programs(), found.get("PATH")))))
    # Its processes talk to each other on the loopback address, whatever proxy leads to the outside.
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join([*filter(None, [found.get(name)]), LOOPBACK, "localhost"])
    return found


def superexec_command(port: int, parent: int, authority: Path | None) -> list[str]:
    """What starts the programs of runs for the SuperLink or SuperNode at this port, and ends with that process."""
    return [
        *(sys.executable, "-P", "-m", "feddure.flower.deploy.superexec"),
        *(["--root-certificates", str(authority)] if authority is not None else ["--insecure"]),
        *("--runtime-api-address", join_address(LOOPBACK, port)),
        *("--parent-pid", str(parent)),
    ]


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


def _toml(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    # Flower's own reader of these pairs knows no escapes: a text must do without one of the two quotes.
    for quote, special in (('"', '"\\\n'), ("'", "'\n")):
        if not any(character in value for character in special):
            return f"{quote}{value}{quote}"
    raise ConfigError(f"{value!r}: has quotation marks that Flower cannot be told; use a name without them")


def _connections(folder: ServerFolder, control_port: int) -> str:
    """Flower's config.toml: the one connection, by absolute path."""
    protection = f"root-certificates = {_toml(str(folder.authority.resolve()))}"
    address = _toml(join_address(LOOPBACK, control_port))
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = {address}\n{protection}\n'


@dataclass(frozen=True)
class SiteStatus:
    """A site; `status` is unregistered, registered (never seen), online or offline."""

    site: str
    status: str
    since: str = ""
    node: str = ""  # Flower's number


@dataclass(frozen=True)
class RunState:
    """A run as the SuperLink knows it; `status` is Flower's word, such as finished:completed."""

    run: str
    status: str
    seconds: float
    details: str = ""

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"

    @property
    def going_on(self) -> bool:
        return not self.status.startswith("finished")

    @property
    def begun(self) -> bool:
        return self.status not in ("pending", "starting")


class Control:
    """The SuperLink of a federation, asked by the operator on its machine."""

    def __init__(self, folder: ServerFolder, show: Show = lambda line: None):
        self._folder = folder
        self._show = show
        self.environment = environment(folder.flower_home)
        folder.flower_home.mkdir(parents=True, exist_ok=True)
        text = _connections(folder, read_settings(folder).control_port)
        write_whole(folder.flower_home / "config.toml", text.encode(), RunError)

    def register(self, sites: Sequence[str]) -> None:
        """Let the SuperLink know the sites' public keys as they lie in the folder, and no others."""
        listed = {entry["node-id"] for entry in self._nodes()}
        known = self._adopt_interrupted(self._registered(), listed)
        keys, damaged = {}, []
        for site in sites:
            try:
                keys[site] = self._public_key(site)
            except certificates.CertificateError as problem:  # no reason to keep another site that was revoked
                damaged.append(site)
                self._show(f"site {site}: {problem}; what the server knows of it stays as it is")
        for site, entry in list(known.items()):
            if entry["node"] not in listed or (site not in damaged and entry["key"] != keys.get(site)):
                if entry["node"] in listed:
                    self.ask("supernode", "unregister", entry["node"], CONNECTION, show=True)
                del known[site]
                self._keep(known)
        for site, key in keys.items():
            if key is None:
                path = self._folder.public_key(site)
                self._show(f"site {site}: no public key at {path} yet; the site cannot join before it is there")
            elif site not in known:
                self._register(site, key, known)

    def _register(self, site: str, key: str, known: Registered) -> None:
        path = self._folder.public_key(site)
        # Flower takes no key twice: what is asked for is noted first, in case this process ends before the answer.
        before = " ".join(entry["node-id"] for entry in self._nodes())
        self._keep(known | {site: {"node": "", "key": key, "before": before}})
        try:
            answer = self.ask("supernode", "register", str(path), CONNECTION, "--name", site, show=True)
        except RunError as problem:
            if _USED_BEFORE not in str(problem).lower():
                raise
            self._keep(known)
            self._show(
                f"site {site}: this key was used before, and Flower takes none a second time; let the site make "
                f"a new one and run `feddure federate sites rotate DIR {site} --public-key FILE`"
            )
            return
        known[site] = {"node": str(answer["node-id"]), "key": key}
        self._keep(known)

    def _adopt_interrupted(self, known: Registered, listed: set[str]) -> Registered:
        """Find the node of a registration that was asked for, but whose answer was never noted."""
        found = {site: entry for site, entry in known.items() if entry["node"]}
        for site, entry in known.items():
            if not entry["node"]:
                new = listed - set(entry["before"].split()) - {other["node"] for other in found.values()}
                if len(new) == 1:
                    found[site] = {"node": new.pop(), "key": entry["key"]}
        if found != known:
            self._keep(found)
        return found

    def _public_key(self, site: str) -> str | None:
        """A site's public key as a line without its comment; None where there is none yet."""
        path = self._folder.public_key(site)
        if not path.exists():
            return None
        certificates.read_public_key(path)
        return " ".join(path.read_text().split()[:2])

    def _keep(self, known: Registered) -> None:
        write_json(self._folder.registered, known, RunError, durable=True)

    def sites(self) -> list[SiteStatus]:
        """The registered sites."""
        entries = {entry["node-id"]: entry for entry in self._nodes()}
        found = []
        for site, known in self._registered().items():
            entry = entries.get(known["node"])
            if entry is not None:
                since = entry["online-at"] if entry["status"] == "online" else entry["offline-at"]
                found.append(SiteStatus(site, entry["status"], "" if since == "N/A" else since, known["node"]))
        return found

    def runs(self, run: str | None = None) -> list[RunState]:
        """The runs that the SuperLink knows, the newest first, or one of them."""
        chosen = ["--run-id", run] if run is not None else []
        rows = self.ask("list", CONNECTION, *chosen)["runs"]
        return [
            RunState(str(row["run-id"]), row["status"], float(row["elapsed"]), printable(row["status-details"] or ""))
            for row in rows
        ]

    def start(self, options: dict[str, Any]) -> str:
        """Start a run of the federation's app; returns its number."""
        words = ("run", str(self._folder.app), CONNECTION, "--run-config", toml_pairs(options))
        return str(self.ask(*words, show=True)["run-id"])

    def stop(self, run: str) -> None:
        """End a run early."""
        self.ask("stop", run, CONNECTION, show=True)

    def ask(self, *words: str, show: bool = False) -> dict[str, Any]:
        """Run one of the commands of `flwr` and return the JSON it answers with."""
        command = [program("flwr"), *words, "--format", "json"]
        if show:
            self._show("$ " + shown(command))
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process, which decides what it means for the command
        )
        begin = done.stdout.find("{")
        try:
            answer = json.loads(done.stdout[begin:]) if begin >= 0 else {}
        except ValueError:
            answer = {}
        if done.returncode or not answer.get("success"):
            reason = printable(str(answer.get("error-message") or done.stderr or done.stdout).strip())
            raise RunError(f"`{shown(command)}` failed:\n{reason}")
        return answer

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            entry for entry in self.ask("supernode", "list", CONNECTION)["nodes"] if entry["status"] != "unregistered"
        ]

    def _registered(self) -> Registered:
        try:
            return json.loads(self._folder.registered.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise RunError(f"{self._folder.registered}: is damaged; remove it and {self._folder.database}") from None
