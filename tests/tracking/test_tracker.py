"""Trackers: what reaches a service, through an outage and a resumption; training never waits and never ends."""

import pytest

import feddure
import tiny
from feddure.errors import ConfigError, FeddureWarning
from feddure.studies import compare_report
from feddure.tracking import tracker

SETS = {
    "partition.clients": 4,
    "partition.labels_per_class": 3,
    "clients_per_round": 2,
    "local_steps": 1,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "engine.device": "cpu",
}


class Service(tracker.Tracker):
    """Writes down what it is told; away for the first so many calls."""

    name, title = "mlflow", "The service"
    told: list
    away = 0

    def _call(self, *what):
        if type(self).away > 0:
            type(self).away -= 1
            raise ConnectionError("nobody answers")
        self.told.append(what)

    def open(self, experiment, run_id):
        self._call("open", self.run_name, self.group, run_id)
        return run_id or f"id-{len(self.told)}", "somewhere"

    def log(self, round_number, values):
        self._call("round", round_number, values["test/accuracy"])

    def log_end(self, summary, model):
        self._call("done", summary["accuracy_last"], model and model.name)

    def end(self, finished):
        self._call("end", finished)


@pytest.fixture
def service(monkeypatch, quiet):
    """Stands for MLflow, and is installed."""

    class Fresh(Service):
        told = []  # noqa: RUF012

    monkeypatch.setattr(tracker, "_kinds", lambda names: [Fresh] if Fresh.name in names else [])
    monkeypatch.setattr(tracker, "_is_installed", lambda name: True)
    return Fresh


def run(images, out, **arguments):
    about = {"dataset": images, "method": "fedavg", "model": "cnn", "rounds": 3, "progress": False}
    return feddure.run(**(about | arguments), out=out, sets=SETS)


def test_a_service_is_told_of_rounds_and_the_end(images, tmp_path, service):
    done = run(images, tmp_path / "mine", track=["mlflow"])
    accuracy = [record["test"]["accuracy"] for record in done.metrics]
    assert service.told == [
        ("open", "mine", "", None),
        *(("round", number, value) for number, value in enumerate(accuracy, 1)),
        ("done", accuracy[-1], "model.safetensors"),
        ("end", True),
    ]
    assert tracker.places(tmp_path / "mine") == [("mlflow", "somewhere")]


def test_an_outage_is_told_once_and_loses_nothing(images, tmp_path, service):
    service.away = 1
    with pytest.warns(FeddureWarning, match="The service could not be told.*nobody answers") as caught:
        done = run(images, tmp_path / "mine", track=["mlflow"])
    assert len([one for one in caught if one.category is FeddureWarning]) == 1
    assert done.summary.rounds == 3
    assert [what[:2] for what in service.told if what[0] == "round"] == [("round", 1), ("round", 2), ("round", 3)]
    assert service.told[-1] == ("end", True)


def test_a_service_that_stays_away_does_not_end_the_run(images, tmp_path, service):
    service.away = 99
    with pytest.warns(FeddureWarning, match="nobody answers"):
        assert run(images, tmp_path / "mine", track=["mlflow"]).summary.rounds == 3
    assert service.told == []
    assert tracker.places(tmp_path / "mine") == []


def test_a_resumed_run_goes_on_in_the_same_place(images, tmp_path, service):
    class Breaks(feddure.Observer):
        def round_done(self, federation, record, seconds):
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        run(images, tmp_path / "mine", track=["mlflow"], observers=[Breaks()])
    assert service.told[-1] == ("end", False)
    service.told.clear()
    run(images, tmp_path / "mine", resume=True)  # no word of tracking: the folder knows
    assert service.told[0] == ("open", "mine", "", "id-1")
    assert service.told[-1] == ("end", True)


def test_comparisons_report_each_run_in_a_group(images, tmp_path, service, monkeypatch):
    monkeypatch.setattr(compare_report, "write", lambda folder, view: folder)
    feddure.compare(
        dataset=images, methods=["fedavg", "fedavg-sl"], model="cnn", rounds=1, out=tmp_path / "both", progress=False,
        track=["mlflow"], sets=SETS,
    )  # fmt: skip
    assert [what[1:3] for what in service.told if what[0] == "open"] == [
        ("fedavg-seed0", "both"),
        ("fedavg-sl-seed0", "both"),
    ]
    assert service.told.count(("end", True)) == 2


def test_sweeps_report_each_cell(images, tmp_path, service):
    feddure.register_dataset("tracked-bands", tiny.dataset)
    plan = {
        "preset": "demo",
        "set": {"dataset": "tracked-bands", "rounds": 1, **SETS},
        "grid": {"method": ["fedavg", "fedavg-sl"]},
    }
    feddure.sweep(plan, out=tmp_path / "many", progress=False, track=["mlflow", "tensorboard"])
    opened = [what for what in service.told if what[0] == "open"]
    assert [what[2] for what in opened] == ["many", "many"]
    assert opened[0][1].startswith("fedavg seed=0 ")
    assert [what[0] for what in service.told].count("done") == 2
    assert len(list((tmp_path / "many" / "tensorboard").glob("*/events*"))) == 2
    assert not (tmp_path / "many" / "unfinished").exists()


@pytest.mark.parametrize(
    ("track", "message"),
    [
        (["mlflwo"], "expected tensorboard, mlflow, wandb; did you mean 'mlflow'"),
        (["mlflow"], r"MLflow is not installed; pip install 'feddure\[mlflow\]'"),
        (["wandb"], r"Weights & Biases is not installed; pip install 'feddure\[wandb\]'"),
    ],
)
def test_what_cannot_be_tracked_is_said_before_training(images, tmp_path, track, message, monkeypatch):
    monkeypatch.setattr(tracker, "_is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=message):
        run(images, tmp_path / "mine", track=track)
    assert not (tmp_path / "mine").exists()
