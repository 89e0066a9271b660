"""What the server of a real federation leaves on disk: an ordinary run folder."""

import fcntl
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddure import environment
from feddure.config import Experiment
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports.run_report import write_report
from feddure.simulation import checkpoint, runs
from feddure.simulation.server import ImageCounts, Server
from feddure.tracking import records
from feddure.tracking.tensorboard import TensorBoard

LOCK_FILE = ".lock"


class RunFolder:
    """A run's folder, opened for writing."""

    def __init__(self, folder: Path, experiment: Experiment, resume: bool):
        self.folder = folder
        self._check = lambda: runs.check_folder(experiment, folder, resume)
        self._check()
        self.run_name = secrets.token_hex(8)
        self._classes: list[str] = []
        self._names: list[str] = []
        self._written: dict[str, Any] = {}
        self._sites: dict[int, dict[str, Any]] = {}
        self._read_about()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While this holds, no other server writes to the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / LOCK_FILE).open("w")
        except OSError as problem:
            raise RunError(f"{self.folder}: the run's folder cannot be made ({problem.strerror})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(
                    f"{self.folder}: another server is writing this run; wait for its end, or choose another run-folder"
                ) from None
            self._check()  # a server that held the lock while this one waited for sites may have left a run
            yield

    def open(self, server: Server, sites: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> None:
        """Write what a run starts with; brings the server to the folder's checkpoint, if there is one.

        `names` are those of all sites of the federation, `sites` what the present ones said of themselves.
        """
        self._read_about()
        checkpoint.read(server, self.folder)
        self._classes = classes = list(server.dataset.classes)
        self._names = list(names)
        self.write_sites(sites)
        about = {"command": "flwr run", "device": str(server.engine.device)}  # the process's own holds a token
        self._write_json(records.PARTITION, {"classes": classes})
        self._write_json(records.ENVIRONMENT, environment.describe() | about)
        write_whole(self.folder / records.CONFIG, server.experiment.to_yaml().encode(), RunError)
        self._recorder = records.Recorder(self.folder, server.round)
        self._board = TensorBoard(self.folder, server.dataset.classes)

    def write_sites(self, sites: Sequence[dict[str, Any]]) -> None:
        """Remember what sites said of themselves, beside what those said that are away now."""
        self._sites |= {site["client"]: site for site in sites}
        known = [self._sites[client] for client in sorted(self._sites)]
        content = {"run": self.run_name, "classes": self._classes, "names": self._names, "sites": known}
        if content != self._written:
            self._write_json(records.FEDERATION, content)
            self._written = content

    def write_round(self, server: Server, record: dict[str, Any], seconds: float, sites: dict[str, Any]) -> None:
        """A round's record and how long it took, in all and at each site."""
        self._recorder.write(record, seconds, sites=sites)
        self._board.round_done(server, record, seconds)

    def write_checkpoint(self, server: Server) -> None:
        """Replace the checkpoint by the server's state."""
        checkpoint.write(server, self.folder)

    def finish(self, server: Server) -> Path:
        """The model and the report, after the last round."""
        self.close()
        write_whole(self.folder / runs.MODEL_FILE, runs.pack_model(server), RunError)
        report = self.folder / runs.REPORT_FILE
        write_report([self.folder], report)
        return report

    def close(self) -> None:
        """No further round comes."""
        for observer in (self._recorder, self._board):
            observer.close()

    def _read_about(self) -> None:
        path = self.folder / records.FEDERATION
        self._written = about = _read(path)
        self.run_name = about.get("run") or self.run_name
        try:
            self._sites = {site["client"]: site for site in about.get("sites", [])}
            self.holdings = {  # of every client that ever took part in the run
                client: ImageCounts(site["labelled"], site["unlabelled"]) for client, site in self._sites.items()
            }
        except (KeyError, TypeError) as problem:
            raise RunError(f"{path}: a site lacks {problem}; restore it from a copy") from None

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_whole(self.folder / name, (json.dumps(content, indent=1) + "\n").encode(), RunError)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); restore it from a copy") from None
    return found
