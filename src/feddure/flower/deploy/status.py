"""`feddure federate status`: sites and runs as the server knows them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from feddure.flower.app.registry import Registration, Registry
from feddure.flower.deploy.control import Control, RunState, SiteStatus
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings
from feddure.flower.deploy.processes import is_listening
from feddure.flower.deploy.run import read_run_index
from feddure.simulation.runs import FAILURE_FILE
from feddure.tracking import records
from feddure.tracking.metrics import TITLES
from feddure.tracking.summary import evaluations


@dataclass(frozen=True)
class RunStatus:
    """A run; `round` is the last one that ended, `accuracy` and `metrics` are those of the last evaluation.

    `suspicious` has the rounds in which a site's update looked hostile, `failure` why an error ended the run.
    """

    run: str
    status: str
    seconds: float
    folder: str
    round: int | None
    accuracy: float | None
    suspicious: dict[str, list[int]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Status:
    """A federation at a moment; sites and runs only while its server runs."""

    federation: str
    server: str
    running: bool
    sites: list[SiteStatus]
    runs: list[RunStatus]
    images: dict[str, Registration] = field(default_factory=dict)  # of each site that a run has heard of


def read_status(folder: ServerFolder) -> Status:
    """Ask the server on this machine, where it runs, and read the run folders."""
    description = folder.read()
    settings = read_settings(folder)
    address = join_address(description.server.host, description.server.port)
    images = Registry(folder.server).read()
    if not is_listening(settings.control_port):
        return Status(description.name, address, False, [], [], images)
    control = Control(folder)
    known = {site.site: site for site in control.sites()}
    sites = [known.get(site) or SiteStatus(site, "unregistered") for site in description.sites]
    index = read_run_index(folder)
    folders, latest = {entry.run: entry.folder for entry in index}, {entry.folder: entry.run for entry in index}
    runs = []
    for state in control.runs():
        place = folders.get(state.run, "")
        runs.append(_run_status(state, place, latest.get(place) == state.run, description.sites))
    return Status(description.name, address, True, sites, runs, images)


def _run_status(state: RunState, folder: str, is_latest: bool, sites: Sequence[str]) -> RunStatus:
    """A run's state and what its folder knows, where it has one; a failure is that of the latest start there."""
    metrics = Path(folder) / records.METRICS
    lines = records.read(metrics) if folder and metrics.exists() else []
    tested = {name: found[-1][1] for name in TITLES if (found := evaluations(lines, name))}
    return RunStatus(
        *(state.run, state.status, state.seconds, folder),
        lines[-1]["round"] if lines else None,
        tested.get("accuracy"),
        _suspicious(lines, sites),
        tested,
        _failure(Path(folder)) if is_latest else "",
    )


def _failure(folder: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / FAILURE_FILE).read_bytes())["error"])
    return ""


def _suspicious(lines: Sequence[records.Record], names: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in lines:
        for client in map(int, line.get("suspicious", {})):
            found.setdefault(names[client] if client < len(names) else f"client {client}", []).append(line["round"])
    return found
