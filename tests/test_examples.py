"""Every example runs from its file, in an empty folder, and says how it went."""

import runpy
import sys
from pathlib import Path

import pytest

from feddure import experiments
from feddure.studies import sweep
from feddure.studies.grid.store import Store

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULTS = EXAMPLES.parent / "results"


@pytest.fixture
def example(monkeypatch, capsys, tmp_path, quiet):
    """Runs an example for a round or two; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(name, rounds):
        monkeypatch.setattr(sys, "argv", [name, "--rounds", str(rounds)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_all_examples_are_tested():
    scripts = {"own_method.py", "own_network.py", "own_images.py"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == scripts | {
        "attacks.yaml",
        "few-labels.yaml",
        "regulators.yaml",
        "regulators-cifar10.yaml",
        "regulators-slim.yaml",
        "tutor.yaml",
    }


def test_own_method(example):
    ours, yardstick = example("own_method.py", 2).splitlines()
    assert ours.startswith("__main__:EntropyMinimisation: accuracy 0.")
    assert yardstick.startswith("fedavg-matched: accuracy 0.")
    assert len(list(Path("runs").iterdir())) == 2


def test_own_method_is_short():
    lines = (EXAMPLES / "own_method.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 40


def test_the_page_on_extending_shows_the_same_method():
    page = (EXAMPLES.parent / "docs" / "extending.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    step = code.partition("def step(self, client, batch):\n")[2]
    assert step
    assert step in (EXAMPLES / "own_method.py").read_text()


def test_own_network(example):
    assert "8,170 parameters, accuracy 0." in example("own_network.py", 1)


def test_own_images(example):
    assert "4 sites, accuracy 0." in example("own_images.py", 1)


@pytest.mark.parametrize(
    ("name", "cells"), [("few-labels", 120), ("regulators", 160), ("regulators-cifar10", 72), ("regulators-slim", 2)]
)
def test_the_sweeps_are_measured(name, cells):
    wanted, published = sweep.read(EXAMPLES / f"{name}.yaml"), Store(RESULTS / name)
    assert len(wanted.cells()) == cells
    assert all(published.has(cell) for cell in wanted.cells())


@pytest.mark.parametrize("name", ["regulators", "regulators-cifar10"])
def test_the_control_has_no_regulator(name):
    (control,) = {
        (
            cell.experiment.method,
            experiments.options(cell.experiment, "fixmatch").threshold,
            experiments.options(cell.experiment, "fixmatch").weight,
        )
        for point in sweep.read(EXAMPLES / f"{name}.yaml").points
        if point.case == "every pseudo label at half weight"
        for cell in point.cells
    }
    assert control == ("fedavg-fixmatch", 0.0, 0.5)
