"""What the server of a real federation leaves on disk: an ordinary run folder."""

import json
import secrets
from pathlib import Path
from typing import Any

from feddure import environment
from feddure.config import Experiment
from feddure.errors import RunError
from feddure.federation import checkpoint, runs
from feddure.federation.server import Server
from feddure.files import write_whole
from feddure.tracking import records
from feddure.tracking.report import write_report
from feddure.tracking.tensorboard import TensorBoard

FEDERATION_FILE = "federation.json"
"""The run's own name, under which sites keep what they remember, and what the sites said of themselves."""


class RunFolder:
    """A run's folder, opened for writing."""

    def __init__(self, folder: Path, experiment: Experiment, resume: bool):
        runs.check_folder(experiment, folder, resume)
        self.folder = folder
        about = _read(folder / FEDERATION_FILE)
        self.run_name: str = about.get("run") or secrets.token_hex(8)

    def open(self, server: Server, sites: list[dict[str, Any]]) -> None:
        """Write what a run starts with; brings the server to the folder's checkpoint, if there is one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise RunError(f"{self.folder}: the run's folder cannot be made ({problem.strerror})") from None
        checkpoint.read(server, self.folder)
        classes = list(server.dataset.classes)
        self._write_json(FEDERATION_FILE, {"run": self.run_name, "classes": classes, "sites": sites})
        about = {"command": "flwr run", "device": str(server.engine.device)}  # the process's own holds a token
        self._write_json(records.PARTITION, {"classes": classes})
        self._write_json(records.ENVIRONMENT, environment.describe() | about)
        write_whole(self.folder / records.CONFIG, server.experiment.to_yaml().encode(), RunError)
        self._metrics = records.Writer(self.folder / records.METRICS)
        self._timing = records.Writer(self.folder / records.TIMING)
        self._metrics.keep(server.round)
        self._timing.keep(server.round)
        self._board = TensorBoard(self.folder, server, server.dataset.classes)

    def write_round(self, server: Server, record: dict[str, Any], timing: dict[str, Any]) -> None:
        """A round's record and how long it took."""
        self._metrics.write(record)
        self._timing.write(timing)
        self._board.round_done(server, record, timing["seconds"])

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
        for writer in (self._metrics, self._timing, self._board):
            writer.close()

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
