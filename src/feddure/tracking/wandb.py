"""An observer that reports a run to Weights & Biases, or with WANDB_MODE=offline to files for `wandb sync`."""

import os
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from feddure.config import Experiment
from feddure.errors import ConfigError, first_line
from feddure.tracking.tracker import Tracker, config

_SECONDS_TO_BEGIN = 20.0


class WandB(Tracker):
    """A run of the project WANDB_PROJECT, by default "feddure"; those of a comparison or a sweep are a group."""

    name, title = "wandb", "Weights & Biases"

    @classmethod
    def check(cls) -> None:
        online = os.environ.get("WANDB_MODE", "online") in ("online", "shared")
        if online and not _package().login(prompt=False, verify=False):
            raise ConfigError(
                "--track wandb: no key of Weights & Biases was found; run `wandb login`, or set WANDB_MODE=offline"
            )

    def open(self, experiment: Experiment, run_id: str | None) -> tuple[str, str]:
        wandb = _package()
        about: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT") or "feddure",
            "dir": os.environ.get("WANDB_DIR") or str(self.files),
            "name": self.run_name,
            "group": self.group or None,
            "config": config(experiment),
            "reinit": "create_new",  # a run of the user's own in this process stays as it is
            "settings": wandb.Settings(silent=True, console="off", init_timeout=_SECONDS_TO_BEGIN),
        }
        try:
            self._run = wandb.init(**about, id=run_id or _new_id(), resume="allow" if run_id else None)
        except wandb.errors.CommError as problem:
            # It would not take the same id again in this process.
            self._run = wandb.init(**about, id=_new_id(), mode="offline")
            files = Path(self._run.dir).parent
            self.note(
                f"Weights & Biases cannot be reached ({first_line(problem)}); send the run later: wandb sync {files}"
            )
        return self._run.id, self._run.url or str(Path(self._run.dir).parent)

    def log(self, round_number: int, values: dict[str, float]) -> None:
        # Rounds that a resumed run repeats have a smaller step than the last one, and W&B leaves them out.
        self._run.log(values, step=round_number, commit=True)  # else a row waits for the next one, or for the end

    def log_end(self, summary: dict[str, float | str], model: Path | None) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        if model is not None:
            self._run.log_artifact(str(model), name=f"model-{self._run.id}", type="model")

    def end(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def _package() -> Any:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nobody has asked for it
    os.environ.setdefault("WANDB_SILENT", "true")
    return import_module("wandb")


def _new_id() -> str:
    return secrets.token_hex(4)
