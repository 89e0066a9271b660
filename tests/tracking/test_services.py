"""MLflow with a real store in SQLite, and Weights & Biases with its offline files; where they are installed."""

import dataclasses
import json
import struct
import sys
from unittest.mock import MagicMock

import pytest

import feddure
import tiny
from feddure.errors import ConfigError
from feddure.tracking.mlflow import MLflow

SETS = {
    "partition.clients": 4,
    "partition.labels_per_class": 3,
    "clients_per_round": 2,
    "local_steps": 1,
    "evaluate_every": 1,
    "checkpoint_every": 2,
    "server.ema": 0.9,
    "engine.device": "cpu",
}


class Breaks(feddure.Observer):
    def round_done(self, federation, record, seconds):
        if record["round"] == 3:
            raise ValueError("enough")


def run_in_two_parts(out, track):
    """Four rounds, of which the third is trained twice: the checkpoint is of the second."""
    images = dataclasses.replace(tiny.dataset(), classes=("T-shirt/top", "naïve (?)", "..", "d"))
    about = {"dataset": images, "method": "fedavg", "model": "cnn", "rounds": 4, "progress": False, "sets": SETS}
    with pytest.raises(ValueError, match="enough"):
        feddure.run(**about, out=out, track=[track], observers=[Breaks()])
    return feddure.run(**about, out=out, resume=True)


def test_mlflow(tmp_path, monkeypatch, quiet):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    done = run_in_two_parts(tmp_path / "mine", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "feddure"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "mine"
    assert found.data.params["method"] == "fedavg"
    assert found.data.params["server.ema"] == "0.9"
    for model in ("test", "test_ema"):
        history = client.get_metric_history(found.info.run_id, f"{model}/accuracy")
        wanted = [(record["round"], record[model]["accuracy"]) for record in done.metrics]
        assert [(one.step, one.value) for one in history] == wanted
    by_class = {name for name in found.data.metrics if name.startswith("test_per_class/")}
    assert by_class == {f"test_per_class/{name}" for name in ("T-shirt_top", "naïve ___", "_", "d")}
    assert found.data.metrics["summary/accuracy_last10"] == pytest.approx(done.summary.accuracy_last10)
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["model.safetensors"]


def test_an_outage_while_mlflow_begins_leaves_one_run(tmp_path, monkeypatch):
    service = MagicMock()
    client = service.MlflowClient.return_value
    client.log_batch.side_effect = [ConnectionError("away"), *[None] * 9]
    monkeypatch.setitem(sys.modules, "mlflow", service)
    tracker = MLflow(tmp_path, "mine")
    with pytest.raises(ConnectionError):
        tracker.open(feddure.Experiment(), None)
    sent = len(client.log_batch.mock_calls)
    run, _ = tracker.open(feddure.Experiment(), None)
    assert run == client.create_run.return_value.info.run_id
    assert client.create_run.call_count == 1
    assert len(client.log_batch.mock_calls) > sent


def records(file):
    """The records of an offline file: a header of 7 bytes, then pieces in blocks of 32 KiB, as LevelDB writes logs."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def items(listed):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in listed}


def test_wandb_offline(tmp_path, monkeypatch, quiet):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = run_in_two_parts(tmp_path / "mine", "wandb")
    parts = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2
    found = [record for part in parts for record in records(part)]
    begun = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in begun}) == 1
    assert {run.display_name for run in begun} == {"mine"}
    assert items(begun[0].config.update)["server.ema"] == 0.9
    history = [items(record.history.item) for record in found if record.WhichOneof("record_type") == "history"]
    for model in ("test", "test_ema"):
        logged = {row["_step"]: row[f"{model}/accuracy"] for row in history}
        assert logged == {record["round"]: record[model]["accuracy"] for record in done.metrics}
    summary = {}
    for record in found:
        summary |= items(record.summary.update)
    assert summary["summary/accuracy_last"] == done.summary.accuracy_last
    assert [record.artifact.type for record in found if record.WhichOneof("record_type") == "artifact"] == ["model"]


def test_wandb_without_a_key_is_said_before_training(tmp_path, monkeypatch, quiet):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="wandb login"):
        feddure.run("demo", out=tmp_path / "mine", track=["wandb"], progress=False)
    assert not (tmp_path / "mine").exists()
