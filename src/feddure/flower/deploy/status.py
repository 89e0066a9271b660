"""`feddure federate status`: sites and runs as the server knows them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from feddure.flower.app.registry import Registration, Registry
from feddure.flower.deploy.control import LOOPBACK, Control, SiteStatus
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings
from feddure.flower.deploy.processes import is_listening
from feddure.flower.deploy.run import read_run_index
from feddure.tracking import records
from feddure.tracking.summary import evaluations


@dataclass(frozen=True)
class RunStatus:
    """A run; `round` is the last one that ended, `accuracy` that of the last evaluation.

    `suspicious` has the rounds in which a site's update looked hostile.
    """

    run: str
    status: str
    seconds: float
    folder: str
    round: int | None
    accuracy: float | None
    suspicious: dict[str, list[int]] = field(default_factory=dict)


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
    if not is_listening(LOOPBACK, settings.control_port):
        return Status(description.name, address, False, [], [], images)
    control = Control(folder)
    known = {site.site: site for site in control.sites()}
    absent = "unregistered" if settings.secure else "unknown"
    sites = [known.get(site) or SiteStatus(site, absent) for site in description.sites]
    folders = {entry.run: Path(entry.folder) for entry in read_run_index(folder)}
    runs = []
    for state in control.runs():
        run_folder = folders.get(state.run)
        metrics = run_folder / records.METRICS if run_folder is not None else None
        lines = records.read(metrics) if metrics is not None and metrics.exists() else []
        about = state.run, state.status, state.seconds, str(run_folder or "")
        runs.append(RunStatus(*about, *_progress(lines), _suspicious(lines, description.sites)))
    return Status(description.name, address, True, sites, runs, images)


def _progress(lines: Sequence[records.Record]) -> tuple[int | None, float | None]:
    accuracies = evaluations(lines, "accuracy")
    return (lines[-1]["round"] if lines else None, accuracies[-1][1] if accuracies else None)


def _suspicious(lines: Sequence[records.Record], names: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in lines:
        for client in map(int, line.get("suspicious", {})):
            found.setdefault(names[client] if client < len(names) else f"client {client}", []).append(line["round"])
    return found
