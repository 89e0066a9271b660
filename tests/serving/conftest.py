"""A trained run and its exported files, made once for all tests of this folder, which leave them as they are."""

import shutil
from pathlib import Path

import pytest

import feddure
import folders
from feddure import environment
from feddure.simulation import runs

LEARNS = {"method": "fedavg-sl", "partition.setting": "iid-iid", "rounds": 8, "optimizer.learning_rate": 0.01}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has learnt something, with an averaged model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: None)
        patch.setattr(environment, "commit", lambda: None)
        folder = tmp_path_factory.mktemp("trained") / "run"
        return folders.execute(folder, dataset="folder:/home/ada/patients", **LEARNS, **{"server.ema": 0.9}).folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run to do things to; its name has a blank and a dot."""
    return shutil.copytree(trained, tmp_path / "gamma 0.5")


@pytest.fixture(scope="session")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Its files by format."""
    folder = tmp_path_factory.mktemp("exported")
    return {
        kind: feddure.export(trained, folder / kind, format=kind) for kind in ("safetensors", "onnx", "torchscript")
    }
