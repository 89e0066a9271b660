"""A run's folder: what it holds, what is refused, and what is left behind."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import folders
import tiny
from feddure import experiments
from feddure.data.partition import Partition
from feddure.errors import ConfigError, DataError, RunError
from feddure.reports.frame import of_runs
from feddure.reports.run_report import render
from feddure.serving.load import read_network
from feddure.simulation import runs
from feddure.tracking import records
from feddure.tracking.summary import summarise
from folders import LONG, contents, disk_is_full, execute, visible

pytestmark = pytest.mark.usefixtures("quiet")

FILES = {
    "checkpoint",
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "partition.json",
    "partition.npz",
    "report.html",
    "timing.jsonl",
}


def refused(error, match, folder, **arguments):
    """The message with which a run is refused."""
    with pytest.raises(error, match=match) as caught:
        execute(folder, **arguments)
    return str(caught.value)


# --- what a run leaves ---------------------------------------------------------------------------------


def test_a_run_leaves_everything_to_replay_it(tmp_path, whole):
    finished = execute(tmp_path / "deep" / "run", **LONG)
    folder = finished.folder
    assert visible(folder) == FILES | {"averaged.safetensors"}
    assert [record["round"] for record in finished.metrics] == [1, 2, 3, 4, 5, 6]
    assert experiments.load(file=folder / "config.yaml") == tiny.experiment(LONG)
    assert Partition.load(folder / "partition.npz", folders.IMAGES).sha256 == finished.partition["sha256"]
    assert finished.environment["device"] == "cpu"
    assert contents(folder) == whole


def test_the_model_file_is_the_global_model(tmp_path):
    folder = execute(tmp_path / "run").folder
    expected = tiny.finished(tiny.experiment(), folders.IMAGES).server.model_state()
    tiny.assert_equal(load_file(folder / "model.safetensors"), expected)
    _, module = read_network(folder)
    assert not module.training
    with torch.no_grad():
        assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["feddure"])["classes"] == list("abcd")


def test_a_run_in_another_thread_needs_no_signals(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(execute(tmp_path / "run")))
    thread.start()
    thread.join()
    assert done[0].finished


# --- folders that cannot be used -----------------------------------------------------------------------


def test_an_existing_run_is_not_overwritten(tmp_path):
    folder = execute(tmp_path / "run").folder
    before = contents(folder)
    refused(RunError, "a run is there already.*--resume", folder)
    assert contents(folder) == before


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"beach")
    for resume in (False, True):
        refused(RunError, "not empty and holds no run", tmp_path, resume=resume)
    assert visible(tmp_path) == {"holiday.jpg"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    refused(RunError, "a file is there", tmp_path / "run")
    refused(RunError, "cannot be made", tmp_path / "run" / "below")
    assert (tmp_path / "run").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    refused(RunError, "Permission denied", tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"method": "fedmagic"}, "method.*'fedmagic'.* fedavg"),
        ({"model": "resnet1000"}, "model.*'resnet1000'.* resnet9"),
        ({"method": "no.such.module:Thing"}, r"no\.such\.module"),
        ({"partition.setting": "sites"}, "sites"),
        ({"partition.labels_per_class": 400}, "labels"),
        pytest.param(
            {"engine.device": "cuda"},
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_be_run_leaves_no_folder(tmp_path, change, match):
    refused(ConfigError, match, tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_resuming_with_another_configuration_is_refused(tmp_path):
    folder = execute(tmp_path / "run").folder
    before = contents(folder)
    message = refused(RunError, "another configuration", folder, resume=True, seed=3)
    assert "seed: 0 there, 3 given" in message
    other = {"partition.gamma": 0.1, "optimizer.learning_rate": 0.5}
    message = refused(RunError, "another configuration", folder, resume=True, **other)
    assert "partition.gamma: 0.5 there, 0.1 given" in message
    assert "optimizer.learning_rate: 0.0005 there, 0.5 given" in message
    assert contents(folder) == before


def test_resuming_with_other_images_is_refused(tmp_path):
    folder = execute(tmp_path / "run").folder
    (folder / "model.safetensors").unlink()
    refused(DataError, "fingerprint", folder, resume=True, images=tiny.dataset(size=164))


# --- a full disk ---------------------------------------------------------------------------------------


def full_from_round(write, first, position):
    """`write`, until the record among its arguments is of this round."""

    def limited(self, *arguments):
        if arguments[position]["round"] >= first:
            disk_is_full()
        write(self, *arguments)

    return limited


def fill_the_disk(patch, victim):
    """Let what `victim` writes after the first checkpoint not fit."""
    if victim == "metrics":
        patch.setattr(records.Writer, "write", full_from_round(records.Writer.write, 4, 0))
    elif victim == "tensorboard":
        patch.setattr(folders.Watcher, "round_done", full_from_round(folders.Watcher.round_done, 4, 1))
    else:
        really, calls = os.fsync, iter(range(100))  # of metrics, timing and the checkpoint, each with its folder
        patch.setattr(os, "fsync", lambda file: disk_is_full() if next(calls) >= 6 else really(file))


@pytest.mark.parametrize("victim", ["metrics", "tensorboard", "checkpoint"])
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, monkeypatch, whole, victim):
    with monkeypatch.context() as patch:
        fill_the_disk(patch, victim)
        message = refused(RunError, "No space left on device", tmp_path, **LONG)
    assert str(tmp_path) in message
    assert not list(tmp_path.rglob(".*.*"))
    with safe_open(tmp_path / "checkpoint" / "state.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["feddure"])["round"] == 2
    assert contents(execute(tmp_path, resume=True, **LONG).folder) == whole


def test_a_full_disk_at_the_start_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", disk_is_full)
    refused(RunError, "config.yaml: cannot be written", tmp_path / "run")


def test_a_full_disk_at_the_end_leaves_a_run_to_resume(tmp_path, monkeypatch, whole):
    really = Path.replace

    def full_for_the_model(self, target):
        return disk_is_full() if target.name == "model.safetensors" else really(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full_for_the_model)
        refused(RunError, "model.safetensors: cannot be written", tmp_path, **LONG)
    assert contents(execute(tmp_path, resume=True, **LONG).folder) == whole


@pytest.mark.parametrize("tests", [20, 0])
def test_a_run_with_validation_names_its_best_round(tmp_path, tests):
    images = tiny.dataset(size=80, tests=tests, side=8)
    changes = {"validation": 0.25, "rounds": 4, "server.ema": 0.7}
    run = execute(tmp_path / "run", images=images, **changes)
    found = summarise(run.metrics)
    by_round = {record["round"]: record["validation"]["accuracy"] for record in run.metrics}
    assert found.score.validation_best == by_round[found.score.best_round] == max(by_round.values())
    assert found.score.validation_ema == run.metrics[-1]["validation_ema"]["accuracy"]
    if tests:
        assert found.score.best == run.metrics[found.score.best_round - 1]["test"]["accuracy"]
    assert any(str(found.score.best_round) in name for name, _ in found.rows())
    assert run.partition["validation"] == 20
    assert "Validation accuracy" in render([run])
    row = of_runs([run]).iloc[0]
    assert row["validation_best"] == pytest.approx(100 * found.score.validation_best)


def test_a_repeated_run_has_the_same_validation_images(tmp_path):
    whole = execute(tmp_path / "whole", validation=0.25, **LONG)
    stopped = execute(tmp_path / "again", validation=0.25, **LONG)
    assert contents(whole.folder) == contents(stopped.folder)
    with pytest.raises(RunError, match=r"validation: 0\.25 there, 0\.5 given"):
        execute(tmp_path / "again", resume=True, validation=0.5, **LONG)


def test_a_lock_that_is_a_link_is_not_taken(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runs.LOCK_FILE).symlink_to(victim)
    with pytest.raises(RunError, match="a link, which no run makes"):
        runs.expect_unlocked(tmp_path / "run")
    assert victim.read_text() == "mine"
