"""A run in a real process: nobody else works on its folder, and however a signal ends it, no number is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import folders
import tiny
from feddure import data, experiments
from feddure.errors import RunError
from feddure.simulation import runs

DEADLINE = 120


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A run of some seconds on images in a file, so that a process of its own can read them."""
    file = tmp_path_factory.mktemp("images") / "tiny.npz"
    arrays = {name: getattr(folders.IMAGES, name) for name in ("images", "labels", "test_images", "test_labels")}
    np.savez(file, **arrays)
    changes = {"dataset": f"npz:{file}", "rounds": 60, "checkpoint_every": 7, "evaluate_every": 20}
    return tiny.experiment(folders.LONG | changes)


@pytest.fixture(scope="module")
def expected(experiment, tmp_path_factory):
    """The files of the same run without any interruption."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: None)
        runs.execute(experiment, data.load(experiment.dataset), folder, progress=False)
    return folders.contents(folder)


def start(configuration: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", "from feddure.cli import main; main()", "run"]
    command += ["--config", str(configuration), "--out", str(folder), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_rounds(process: subprocess.Popen, folder: Path, wanted: int) -> None:
    deadline = time.monotonic() + DEADLINE
    path = folder / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < wanted:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_a_signal_ends_resumes_bit_for_bit(experiment, expected, tmp_path, number, code):
    configuration, folder = tmp_path / "config.yaml", tmp_path / "run"
    configuration.write_text(experiments.to_yaml(experiment))
    images = data.load(experiment.dataset)
    process = start(configuration, folder)
    wait_for_rounds(process, folder, 3)
    for resume in (False, True):
        with pytest.raises(RunError, match=f"process {process.pid} is working on it"):
            runs.execute(experiment, images, folder, resume=resume, progress=False)
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "stopped after round" in err
    assert f"go on with: feddure run --out {folder} --resume" in err
    assert not (folder / "model.safetensors").exists()
    runs.execute(experiment, images, folder, resume=True, progress=False)
    assert folders.contents(folder) == expected


@pytest.mark.usefixtures("quiet")
def test_kills_at_any_moment_cost_no_number(experiment, expected, tmp_path):
    """Before the first round, and some time after a checkpoint."""
    configuration, folder = tmp_path / "config.yaml", tmp_path / "run"
    configuration.write_text(experiments.to_yaml(experiment))
    for rounds in (0, 9):
        process = start(configuration, folder)
        wait_for_rounds(process, folder, rounds)
        time.sleep(random.uniform(0, 0.03))
        process.kill()
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == -signal.SIGKILL, err
    runs.execute(experiment, data.load(experiment.dataset), folder, resume=True, progress=False)
    assert folders.contents(folder) == expected
