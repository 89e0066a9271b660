"""What the server's operator asks of the SuperLink, through Flower's own command line."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.flower.deploy import certificates, commands
from feddure.flower.deploy.layout import ServerFolder, read_settings
from feddure.flower.deploy.terminal import printable

Show = Callable[[str], None]
"""Prints a line for the operator."""
Registered = dict[str, dict[str, str]]
"""For each site its node's number and its key; no number, and the nodes before, while a registration is under way."""
_USED_BEFORE = "already in use"


@dataclass(frozen=True)
class Node:
    """A registered site; `status` is Flower's word: registered, online or offline."""

    site: str
    node: str
    status: str
    since: str


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
        settings = read_settings(folder)
        self.environment = commands.environment(folder.flower_home)
        folder.flower_home.mkdir(parents=True, exist_ok=True)
        text = commands.connections(folder, settings.control_port, settings.secure)
        write_whole(folder.flower_home / "config.toml", text.encode(), RunError)

    def register(self, sites: Sequence[str]) -> None:
        """Let the SuperLink know the sites' public keys as they lie in the folder, and no others."""
        listed = {entry["node-id"] for entry in self._nodes()}
        known = self._adopt_interrupted(self._registered(), listed)
        keys = {site: self._public_key(site) for site in sites}
        for site, entry in list(known.items()):
            if entry["node"] not in listed or entry["key"] != keys.get(site):
                if entry["node"] in listed:
                    self.ask(commands.unregister(entry["node"]), show=True)
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
            answer = self.ask(commands.register(path, site), show=True)
        except RunError as problem:
            if _USED_BEFORE not in str(problem).lower():
                raise
            self._keep(known)
            self._show(
                f"site {site}: this key was used before, and Flower takes none a second time; the site cannot join "
                f"before it makes a new one and its public key lies at {path}"
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
        content = json.dumps(known, indent=1) + "\n"
        write_whole(self._folder.registered, content.encode(), RunError, durable=True)

    def nodes(self) -> list[Node]:
        """The registered sites."""
        entries = {entry["node-id"]: entry for entry in self._nodes()}
        found = []
        for site, known in self._registered().items():
            entry = entries.get(known["node"])
            if entry is not None:
                since = entry["online-at"] if entry["status"] == "online" else entry["offline-at"]
                found.append(Node(site, known["node"], entry["status"], "" if since == "N/A" else since))
        return found

    def runs(self, run: str | None = None) -> list[RunState]:
        """The runs that the SuperLink knows, the newest first, or one of them."""
        rows = self.ask(commands.list_runs(run))["runs"]
        return [
            RunState(str(row["run-id"]), row["status"], float(row["elapsed"]), printable(row["status-details"] or ""))
            for row in rows
        ]

    def start(self, options: dict[str, Any]) -> str:
        """Start a run of the federation's app; returns its number."""
        return str(self.ask(commands.start_run(self._folder.app, options), show=True)["run-id"])

    def stop(self, run: str) -> None:
        """End a run early."""
        self.ask(commands.stop_run(run), show=True)

    def ask(self, command: Sequence[str], show: bool = False) -> dict[str, Any]:
        """Run one of Flower's commands and return the JSON it answers with."""
        if show:
            self._show("$ " + commands.shown(command))
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
            raise RunError(f"`{commands.shown(command)}` failed:\n{reason}")
        return answer

    def _nodes(self) -> list[dict[str, Any]]:
        return [entry for entry in self.ask(commands.list_nodes())["nodes"] if entry["status"] != "unregistered"]

    def _registered(self) -> Registered:
        try:
            return json.loads(self._folder.registered.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise RunError(f"{self._folder.registered}: is damaged; remove it and {self._folder.database}") from None
