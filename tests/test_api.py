"""The package from Python: objects in, a finished run out."""

import doctest
import functools
import json
import re
import shlex

import numpy as np
import pytest
import torch
from torch import nn

import feddure
import tiny
from feddure import api, experiments
from feddure.config import Experiment
from feddure.errors import ConfigError, DataError, RunError
from feddure.studies import compare_report

SMALL = {
    "partition.clients": 4,
    "partition.labels_per_class": 3,
    "clients_per_round": 2,
    "labelled_batch": 5,
    "unlabelled_batch": 6,
    "evaluate_every": 1,
    "engine.device": "cpu",
    "engine.precision": "fp64",
}


class Halved(feddure.Method):
    """Descends on half the cross entropy."""

    def step(self, client, batch):
        (logits,) = client.model(batch.labelled)
        loss = feddure.mean(feddure.cross_entropy(logits, batch.labels)) / 2
        client.descend(loss)
        return {"loss": loss.detach()}


class Linear(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.head = nn.Linear(channels * 144, classes)

    def forward(self, x):
        return self.head(x.flatten(1))


@pytest.fixture(autouse=True)
def _quiet(quiet):
    """Nearly all tests here are about numbers."""


def run(images, out, **arguments):
    about = {"dataset": images, "method": "fedavg", "model": "cnn", "rounds": 2, "progress": False}
    sets = SMALL | arguments.pop("sets", {})
    return feddure.run(**(about | arguments), out=out, sets=sets)


def test_objects_in_a_finished_run_out(images, tmp_path, monkeypatch):
    monkeypatch.undo()  # this one with its report
    done = run(images, tmp_path / "run", method=Halved, model=Linear, rounds=3)
    assert [record["round"] for record in done.metrics] == [1, 2, 3]
    assert done.summary.rounds == 3
    assert done.summary.accuracy_last == done.metrics[-1]["test"]["accuracy"]
    assert isinstance(done.experiment, Experiment)
    assert isinstance(done.model, Linear)
    assert not done.model.training
    assert done.report() == tmp_path / "run" / "report.html"
    assert "accuracy" in done.report().read_text()
    assert str(tmp_path / "run") in repr(done)


class Norms(feddure.Observer):
    """Follows the global model from round to round."""

    def __init__(self, last=99):
        self.last, self.seen, self.closed = last, [], False

    def round_done(self, federation, record, seconds):
        assert record["round"] == federation.round <= federation.experiment.rounds
        assert seconds > 0
        self.seen.append(federation.server.state["theta"].norm().item())
        if record["round"] == self.last:
            raise ValueError("seen enough")

    def close(self):
        self.closed = True


def test_observers_are_told_of_every_round_and_change_nothing(images, tmp_path):
    norms = Norms()
    watched = run(images, tmp_path / "watched", rounds=3, observers=[norms])
    assert len(set(norms.seen)) == 3
    assert norms.closed
    assert watched.metrics == run(images, tmp_path / "alone", rounds=3).metrics


def test_an_observer_that_fails_ends_the_run_which_can_be_resumed(images, tmp_path):
    failing, other = Norms(last=2), Norms()
    with pytest.raises(ValueError, match="seen enough"):
        run(images, tmp_path / "run", rounds=3, observers=[failing, other], sets={"checkpoint_every": 1})
    assert failing.closed
    assert other.closed
    assert len(other.seen) == 1
    again = run(images, tmp_path / "run", rounds=3, observers=[other], resume=True, sets={"checkpoint_every": 1})
    assert len(other.seen) == 2
    assert again.summary.rounds == 3


def test_the_model_is_what_was_evaluated(images, tmp_path):
    done = run(images, tmp_path / "run", setting="iid-iid", sets={"optimizer.learning_rate": 0.01}, method="fedavg-sl")
    pixels = (torch.from_numpy(images.test_images).permute(0, 3, 1, 2).double() / 255 - 0.35) / 0.25
    with torch.no_grad():
        predicted = done.model.double()(pixels).argmax(1).numpy()
    assert (predicted == images.test_labels).mean() == done.metrics[-1]["test"]["accuracy"]
    assert done.summary.accuracy_last > 0.4


def test_a_run_can_be_opened_again(images, tmp_path):
    done = run(images, tmp_path / "run")
    again = feddure.Run(tmp_path / "run")
    assert again.metrics == done.metrics
    assert again.experiment == done.experiment


def test_a_finished_run_resumes_from_its_folder_alone(images, tmp_path):
    done = run(images, tmp_path / "run")
    again = feddure.run(dataset=images, out=tmp_path / "run", resume=True, progress=False)
    assert again.metrics == done.metrics


def test_names_and_objects_mean_the_same(images, tmp_path):
    feddure.register_method("halved", Halved)
    feddure.register_network("linear", Linear)
    by_name = run(images, tmp_path / "name", method="halved", model="linear")
    by_object = run(images, tmp_path / "object", method=Halved, model=Linear)
    assert by_name.metrics == by_object.metrics
    assert by_object.experiment.method == f"{__name__}:Halved"


def test_a_function_that_makes_the_network(images, tmp_path):
    done = run(images, tmp_path / "run", model=lambda channels, classes: Linear(channels, classes))
    assert isinstance(done.model, Linear)


def test_a_preset_with_changes(tmp_path, images):
    done = feddure.run(
        "demo", dataset=images, method="fedavg-matched", seed=4, rounds=1, out=tmp_path, progress=False, sets=SMALL
    )
    assert done.experiment.seed == 4
    steps = experiments.load("demo").local_steps
    assert done.metrics[0]["steps"] == [steps, steps]


def test_registered_data_sets(images, tmp_path):
    feddure.register_dataset("bands", lambda: images)
    assert run("bands", tmp_path / "run").metrics == run(images, tmp_path / "object").metrics


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "fedmagic"}, ConfigError, "fedmagic"),
        ({"method": dict}, ConfigError, "Method"),
        ({"model": nn.Linear(3, 3)}, ConfigError, "expected a name, a class or a function"),
        ({"model": functools.partial(Linear)}, ConfigError, "expected a name, a class or a function"),
        ({"model": lambda channels, classes: 3}, ConfigError, "made a int, expected a torch.nn.Module"),
        ({"model": lambda channels, classes: Linear(channels, 3)}, ConfigError, r"gave \[2, 3\].* expected .*\[2, 4\]"),
        ({"model": lambda channels, classes: Linear(9, classes)}, ConfigError, "cannot take images of 12 × 12 pixels"),
        ({"dataset": "no-such-data"}, DataError, "there is no data set 'no-such-data'"),
        ({"dataset": tiny.dataset(labels=np.zeros(160))}, DataError, "labels have dtype float64"),
        ({"dataset": tiny.dataset(side=4)}, DataError, "images are 4 × 4 pixels"),
        ({"preset": "demo", "config_file": "mine.yaml"}, ConfigError, "both given"),
        ({"resume": True}, RunError, "no run is there to resume"),
    ],
)
def test_mistakes_leave_nothing_behind(images, tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        run(images, tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_a_network_that_cannot_take_the_images_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="resnet9-slim' cannot take images of 5 × 5 pixels") as caught:
        run(tiny.dataset(size=100, side=5), tmp_path / "run", model="resnet9-slim")
    assert caught.value.__cause__ is not None


def test_default_folders_do_not_collide(tmp_path):
    experiment = tiny.experiment(dataset="folder:my/new pictures?size=8&channels=1")
    first = experiments.default_folder(experiment, tmp_path)
    assert first.parent == tmp_path
    assert shlex.quote(first.name) == first.name  # it is shown, and copied
    first.mkdir()
    second = experiments.default_folder(experiment, tmp_path)
    second.mkdir()
    assert len({first, second, experiments.default_folder(experiment, tmp_path)}) == 3


@pytest.mark.parametrize("change", ["read-only", "backwards"])
def test_arrays_of_any_kind(images, tmp_path, change, recwarn):
    if change == "read-only":
        pixels = images.images.copy()
        pixels.flags.writeable = False
        expected = images
    else:
        pixels = images.images[:, ::-1]
        expected = tiny.dataset(images=np.ascontiguousarray(pixels))
    done = run(tiny.dataset(images=pixels), tmp_path / "odd", rounds=1)
    assert done.metrics == run(expected, tmp_path / "plain", rounds=1).metrics
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


# --- comparisons, sweeps, partitions ---------------------------------------------------------------------------


def test_what_the_docstrings_show_is_so(tmp_path, monkeypatch, quiet):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_report, "write", lambda folder, view: folder)
    found = doctest.testmod(api)
    assert found.attempted >= 10
    assert not found.failed


@pytest.fixture
def compared(images, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_report, "write", lambda folder, view: folder / "report.html")
    return feddure.compare(
        dataset=images,
        methods=["fedavg", Halved],
        seeds=[0, 1],
        model=Linear,
        rounds=2,
        out=tmp_path / "both",
        progress=False,
        sets=SMALL,
    )


def test_a_comparison_from_python(compared, images, tmp_path):
    mine = f"{__name__}:Halved"
    assert [row["method"] for row in compared.table] == ["fedavg", mine]
    for row in compared.table:
        own = [one.summary.accuracy_last for one in compared.runs if one.experiment.method == row["method"]]
        assert len(own) == 2
        assert row["accuracy_last_mean"] == pytest.approx(100 * np.mean(own), abs=1e-4)
        assert row["failed"] is None
    assert {row["against"] for row in compared.pairs} == {"fedavg"}
    assert compared.report().parent == compared.folder
    assert mine in compared._repr_html_()
    again = feddure.compare(
        dataset=images, out=tmp_path / "both", resume=True, seeds=[2], progress=False, allow_modules=True
    )
    assert len(again.runs) == 6


def test_a_sweep_of_ones_own_method(images, tmp_path):
    feddure.register_dataset("bands-to-sweep", lambda: images)
    plan = {
        "preset": "demo",
        "set": SMALL | {"dataset": "bands-to-sweep", "rounds": 1, "local_steps": 1},
        "grid": {"method": ["fedavg", Halved], "optimizer.learning_rate": [0.01, 0.001]},
        "seeds": [0],
    }
    found = feddure.sweep(plan, out=tmp_path / "many", progress=False)
    assert len(found.table) == 4
    assert not found.failed
    accuracy = [row["accuracy_last10_mean"] for row in found.table]
    assert accuracy == sorted(accuracy, reverse=True)
    assert "Halved" in found._repr_html_()
    assert found.report().exists()
    written = (tmp_path / "many" / "cells.jsonl").read_bytes()
    feddure.sweep(plan, out=tmp_path / "many", progress=False)  # all is measured
    assert (tmp_path / "many" / "cells.jsonl").read_bytes() == written


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"preset": "demo"}, "expected grid or cases"),
        ({"preset": "demo", "grids": {}}, "unknown key 'grids'; did you mean 'grid'"),
        ({"preset": "demo", "grid": {"rounds": [np.float64(3)]}}, "can stand in a sweep"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_refused(tmp_path, plan, message):
    with pytest.raises(ConfigError, match=message):
        feddure.sweep(plan, out=tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_a_partition_from_python_is_that_of_a_run(images, tmp_path):
    dealt = feddure.partition(images, "iid-iid", clients=4, labels_per_class=3, seed=0)
    done = run(images, tmp_path / "run", setting="iid-iid")
    assert dealt.summary["sha256"] == json.loads((done.folder / "partition.json").read_text())["sha256"]
    assert [row["labelled"] for row in dealt.table] == [12] * 4
    assert dealt.plot(tmp_path / "clients.png").stat().st_size > 1000
    dealt.save(tmp_path / "clients.npz")
    assert "unlabelled" in dealt._repr_html_()
    with pytest.raises(ConfigError, match="gama"):
        feddure.partition(images, gama=0.3)


def test_notebooks_show_runs_without_script_or_request(images, tmp_path):
    done = run(images, tmp_path / "<script>alert(1)", rounds=3, sets={"server.ema": 0.9})
    html = done._repr_html_()
    assert "accuracy, last evaluation" in html
    assert html.count("<img") == 1
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert not re.search(r"(src=\"(?!data:)|href|url\()", html)


def test_a_field_can_be_emptied(images, tmp_path):
    emptied = {"partition.labels_per_class": None, "partition.label_fraction": 0.2}
    assert run(images, tmp_path / "run", sets=emptied).experiment.partition.labels_per_class is None


def test_everything_promised_is_there():
    assert set(feddure.__all__) <= set(dir(feddure))
    assert all(hasattr(feddure, name) for name in feddure.__all__)


def test_a_folder_of_data_may_be_a_text(tmp_path):
    with pytest.raises(feddure.FeddureError, match="cifar10"):
        feddure.load_dataset("cifar10", str(tmp_path))
