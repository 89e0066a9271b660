"""What the server's operator asks of the SuperLink, through Flower's own command line."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddure.deployment import certificates, commands
from feddure.deployment.layout import ServerFolder, read_settings
from feddure.errors import RunError
from feddure.files import write_whole

Show = Callable[[str], None]
"""Prints a line for the operator."""


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
        """Register the public keys of sites that the SuperLink does not know yet; a changed key replaces the old."""
        known = self._registered()
        listed = {entry["node-id"] for entry in self._nodes()}
        for site in sites:
            path = self._folder.public_key(site)
            if not path.exists():
                self._show(f"site {site}: no public key at {path} yet; the site cannot join before it is there")
                continue
            certificates.read_public_key(path)
            key = _key_part(path)
            entry = known.get(site)
            if entry is not None and entry["node"] in listed:
                if entry["key"] == key:
                    continue
                self.ask(commands.unregister(entry["node"]), show=True)
            answer = self.ask(commands.register(path, site), show=True)
            known[site] = {"node": str(answer["node-id"]), "key": key}
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
            RunState(str(row["run-id"]), row["status"], float(row["elapsed"]), row["status-details"] or "")
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
            command, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        begin = done.stdout.find("{")
        try:
            answer = json.loads(done.stdout[begin:]) if begin >= 0 else {}
        except ValueError:
            answer = {}
        if done.returncode or not answer.get("success"):
            reason = str(answer.get("error-message") or done.stderr or done.stdout).strip()
            raise RunError(f"`{commands.shown(command)}` failed:\n{reason}")
        return answer

    def _nodes(self) -> list[dict[str, Any]]:
        return [entry for entry in self.ask(commands.list_nodes())["nodes"] if entry["status"] != "unregistered"]

    def _registered(self) -> dict[str, dict[str, str]]:
        try:
            return json.loads(self._folder.registered.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise RunError(f"{self._folder.registered}: is damaged; remove it and {self._folder.database}") from None


def _key_part(path: Path) -> str:
    """A public key's line without its comment."""
    return " ".join(path.read_text().split()[:2])
