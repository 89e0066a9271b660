"""A run in a real process: nobody else works on its folder, and however a signal ends it, no number is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import folders
import tiny
from feddure import data
from feddure.errors import RunError
from feddure.simulation import runs

ROOT = Path(__file__).parents[2]
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
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_that_a_signal_ends_resumes_bit_for_bit(experiment, expected, tmp_path, number, code):
    configuration, folder = tmp_path / "config.yaml", tmp_path / "run"
    configuration.write_text(experiment.to_yaml())
    process = start(configuration, folder)
    wait_for_rounds(process, folder, 3)
    images = data.load(experiment.dataset)
    for resume in (False, True):
        with pytest.raises(RunError, match=f"process {process.pid} is working on it"):
            runs.execute(experiment, images, folder, resume=resume, progress=False)
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, err
    assert "Traceback" not in err
    if code > 0:
        assert "stopped after round" in err
        assert f"go on with: feddure run --out {folder} --resume" in err
    assert not (folder / "model.safetensors").exists()
    runs.execute(experiment, images, folder, resume=True, progress=False)
    assert folders.contents(folder) == expected


def test_kill_at_any_moment_and_resume():
    tool = ROOT / "tools" / "kill_and_resume.py"
    done = subprocess.run([sys.executable, str(tool), "--times", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical after 1 kills" in done.stdout
