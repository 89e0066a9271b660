"""Every example runs from its file, in an empty folder, and says how it went."""

import ast
import dataclasses
import importlib
import json
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import feddure
import tiny
from feddure import api, experiments
from feddure.studies import compare_report, sweep
from feddure.studies.grid.store import Store

EXAMPLES = Path(__file__).parents[1] / "examples"
SWEEPS = sorted(EXAMPLES.glob("*.yaml"))
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
    scripts = {"own_method.py", "own_network.py", "own_images.py", "first_hour.ipynb", "controls.py"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == scripts | {path.name for path in SWEEPS}


@pytest.mark.usefixtures("controls")
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_can_be_read(path):
    cells = [cell for point in sweep.read(path, allow_modules=True).points for cell in point.cells]
    assert len({cell.hash for cell in cells}) == len(cells) > 1


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


def test_the_notebook_runs(monkeypatch, tmp_path, quiet):
    """Its cells in their order; what a notebook shows of their last lines is made too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_report, "write", lambda folder, view: folder / "report.html")
    monkeypatch.setattr(api, "write_report", lambda folders, out: out)
    book = json.loads((EXAMPLES / "first_hour.ipynb").read_text())
    module = types.ModuleType("first_hour")
    monkeypatch.setitem(sys.modules, "first_hour", module)
    shown = []
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            tree = ast.parse("".join(cell["source"]).replace("ROUNDS = 3", "ROUNDS = 1"))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "first_hour.ipynb", "exec"), vars(module))
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "first_hour.ipynb", "eval"), vars(module))
                shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert len(shown) == 7
    assert "accuracy, last evaluation" in shown[1]
    assert len(list(Path("runs").glob("*/config.yaml"))) == 2


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


def test_the_sweep_of_privacy_differs_in_noise_alone():
    points = sweep.read(EXAMPLES / "privacy.yaml").points
    private = [point for point in points if point.case != "no privacy"]
    noises = {point.cells[0].experiment.server.dp_noise for point in private}
    assert noises == {0, 0.5, 1, 2, 4}
    apart = experiments.differences([cell.experiment for point in private for cell in point.cells])
    assert set(apart) == {"method", "server.dp_noise"}
    assert all(point.cells[0].experiment.server.dp_clip is None for point in points if point not in private)


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


# --- controls ------------------------------------------------------------------------------------------------


@pytest.fixture
def controls(monkeypatch):
    """The module as the sweep finds it: beside its file."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("controls")


def test_true_labels_are_the_loss_of_a_tutor_that_knows_them(controls, images, monkeypatch):
    wanted = {"rounds": 2, "server.ema": 0.9}
    knowing = tiny.finished(tiny.experiment(wanted, method="controls:TrueLabels"), images)

    def all_knowing(self, client, batches):
        return {"unlabelled": torch.eye(client.classes, dtype=client.theta.dtype)[batches.truth]}

    monkeypatch.setattr("feddure.methods.fedtutor.FedTutor.before_steps", all_knowing)
    tutored = tiny.finished(tiny.experiment(wanted, method="fedtutor"), images)
    tiny.assert_equal(knowing.server.state, tutored.server.state)


def test_strong_labels_differ_in_the_view_alone(controls, images):
    weak, strong = (
        tiny.federation(tiny.experiment(method=method, rounds=1), images).tasks()[0].batches
        for method in ("fedavg-matched", "controls:StrongLabels")
    )
    assert torch.equal(weak.labels, strong.labels)
    assert not torch.equal(weak.labelled, strong.labelled)


@pytest.fixture
def small_sources(controls, monkeypatch):
    """A CIFAR-10 of 400 images and a Fashion-MNIST of smaller grey ones; 10 labels of each of the 4 classes."""
    made = {"cifar10": tiny.dataset(size=400, channels=3), "fashion-mnist": tiny.dataset(size=600, side=8)}
    monkeypatch.setattr(feddure, "load_dataset", lambda name, data_dir: made[name], raising=False)
    monkeypatch.setattr(controls, "LABELLED", 10)
    return made["cifar10"]


def test_noisy_labels_are_wrong_on_a_fifth_of_the_labelled_images(controls, small_sources):
    noisy = controls.noisy_labels(None)
    assert noisy.labelled.sum() == 40
    wrong = noisy.labels != small_sources.labels
    assert wrong.sum() == 8
    assert noisy.labelled[wrong].all()
    assert np.array_equal(noisy.test_labels, small_sources.test_labels)


def test_other_images_are_dealt_as_cifars_own(controls, small_sources):
    other = controls.fashion_unlabelled(None)
    assert other.images.shape == small_sources.images.shape
    assert not other.images[~other.labelled][:, :2].any()  # padded
    options = tiny.experiment({"partition.labels_per_class": None}).partition
    first = np.isin(np.arange(400), controls._first_of_each_class(small_sources, 10))
    own = dataclasses.replace(small_sources, labelled=first)
    counts = [tiny.partitions.make(data, options, 3).counts(data.labels, 4) for data in (other, own)]
    assert np.array_equal(counts[0][1], counts[1][1])
    assert counts[0][1].sum() == 360


@pytest.mark.parametrize("name", ["controls", "controls-demo", "sage-protocol"])
def test_every_case_says_what_it_is_there_for(controls, name):
    assert all(point.about for point in sweep.read(EXAMPLES / f"{name}.yaml", allow_modules=True).points)
