"""An observer that reports a run to MLflow: to MLFLOW_TRACKING_URI, or a file `mlflow.db` in the current folder."""

import os
import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from feddure import experiments
from feddure.config import Experiment
from feddure.tracking.tracker import Tracker, config
from feddure.version import VERSION

_AT_ONCE = 100  # parameters that MLflow takes in one call; of metrics it takes more


class MLflow(Tracker):
    """A run of the experiment MLFLOW_EXPERIMENT_NAME, by default "feddure"."""

    name, title = "mlflow", "MLflow"
    _run_id = ""

    def open(self, experiment: Experiment, run_id: str | None) -> tuple[str, str]:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody has asked for it
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the next round is the next attempt
        self._mlflow: Any = import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        self._last_round = 0
        run = self._find(run_id)
        if run is None:
            self._run_id = self._run_id or self._create(experiment)  # what comes after it may fail and be tried again
            parameters = [self._mlflow.entities.Param(key, str(value)) for key, value in config(experiment).items()]
            for start in range(0, len(parameters), _AT_ONCE):
                self._client.log_batch(self._run_id, params=parameters[start : start + _AT_ONCE])
        else:
            self._run_id = run.info.run_id
            self._last_round = int(run.data.metrics.get("round", 0))
            self._client.update_run(self._run_id, status="RUNNING")
        return self._run_id, f"run {self._run_id} of {self._mlflow.get_tracking_uri()}"

    def log(self, round_number: int, values: dict[str, float]) -> None:
        if round_number > self._last_round:  # a resumed run repeats those since its last checkpoint
            self._log({**values, "round": round_number}, round_number)
            self._last_round = round_number

    def log_end(self, summary: dict[str, float | str], model: Path | None) -> None:
        numbers = {f"summary/{name}": value for name, value in summary.items() if not isinstance(value, str)}
        self._log(numbers, self._last_round)
        for name, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._run_id, f"feddure.{name}", value)
        if model is not None:
            self._client.log_artifact(self._run_id, str(model))

    def end(self, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")

    def _log(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_key(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _create(self, experiment: Experiment) -> str:
        tags = {"feddure.version": VERSION, "feddure.fingerprint": experiments.fingerprint(experiment)}
        tags |= {"feddure.group": self.group} if self.group else {}
        return self._client.create_run(self._experiment_id(), tags=tags, run_name=self.run_name).info.run_id

    def _experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "feddure"
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _find(self, run_id: str | None) -> Any:
        """The run of an earlier process; None where there was none, or this server does not know it."""
        if run_id is None:
            return None
        try:
            return self._client.get_run(run_id)
        except self._mlflow.MlflowException as problem:
            if problem.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None


def _key(name: str) -> str:
    """MLflow takes letters, digits and a few signs; a class may be called anything."""
    group, slash, rest = name.partition("/")
    return group + slash + (re.sub(r"[^\w\-. :]", "_", rest).strip(".") or "_" * bool(slash))
