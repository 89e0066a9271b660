"""`feddure run`, from the command line to the report, and what it says when it cannot."""

import json

import numpy as np
import pytest

from feddure.simulation import runs
from feddure.tracking.records import read_run

SMALL = (
    *("--method", "fedavg", "--model", "cnn", "--rounds", "2", "--clients", "4"),
    *("--set", "partition.labels_per_class=3", "--set", "clients_per_round=2", "--set", "labelled_batch=5"),
    *("--set", "evaluate_every=1", "--set", "engine.device=cpu"),
)


@pytest.fixture
def data(tmp_path, images):
    """The tiny data set as a file; returns its name."""
    arrays = {name: getattr(images, name) for name in ("images", "labels", "test_images", "test_labels")}
    np.savez(tmp_path / "tiny.npz", **arrays)
    return f"npz:{tmp_path / 'tiny.npz'}"


def test_from_the_command_line_to_the_report(feddure, data, tmp_path):
    code, out, err = feddure("run", "--dataset", data, *SMALL, "--seed", 3, "--out", "mine")
    assert code == 0, err
    assert "run folder: mine" in err
    assert "round 2/2" in err
    assert "accuracy, last evaluation" in out
    assert "report: mine/report.html" in out
    done = read_run(tmp_path / "here" / "mine")
    assert done.finished
    assert done.experiment.seed == 3
    assert done.experiment.partition.clients == 4
    assert "<html" in (done.folder / "report.html").read_text()
    assert list(done.folder.glob("events.*"))


@pytest.mark.usefixtures("quiet")
def test_what_is_noted_of_a_start_is_noted_once(feddure, data, tmp_path, images):
    assert feddure("run", "--dataset", data, *SMALL, "--out", "first")[0] == 0
    arrays = {name: getattr(images, name) for name in ("images", "labels", "test_images", "test_labels")}
    np.savez(tmp_path / "other.npz", **arrays, classes=list("wxyz"))
    code, _, err = feddure("run", "--dataset", f"npz:{tmp_path / 'other.npz'}", *SMALL, "--init", "first")
    assert code == 0, err
    assert err.count("its classifier is not for these 4 classes") == 1


def test_a_method_that_does_not_exist_is_said_before_images_are_read(feddure, tmp_path):
    (tmp_path / "scans").mkdir()
    code, _, err = feddure("run", "--dataset", tmp_path / "scans", "--method", "typo")
    assert code == 2
    assert "method 'typo'" in err


@pytest.mark.parametrize("given", [[], ["--out", "run"]], ids=str)
def test_a_run_of_nothing_names_two_ways_on(feddure, tmp_path, given):
    code, _, err = feddure("run", *given)
    assert code == 2
    assert "--preset demo" in err
    assert "--dataset PATH" in err
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.usefixtures("quiet")
def test_a_folder_is_chosen_where_none_is_given(feddure, data, tmp_path):
    for _ in range(2):
        code, _, err = feddure("run", "--dataset", data, *SMALL)
        assert code == 0, err
    made = list((tmp_path / "here" / "runs").iterdir())
    assert len(made) == 2
    assert all("fedavg" in folder.name and "seed0" in folder.name for folder in made)


@pytest.mark.usefixtures("quiet")
def test_a_run_is_replayed_from_its_configuration(feddure, data, tmp_path):
    assert feddure("run", "--dataset", data, *SMALL, "--out", "one")[0] == 0
    assert feddure("run", "--config", "one/config.yaml", "--out", "two")[0] == 0
    here = tmp_path / "here"
    for name in ("metrics.jsonl", "model.safetensors", "config.yaml", "partition.npz"):
        assert (here / "one" / name).read_bytes() == (here / "two" / name).read_bytes()


def test_resume_from_the_folder_alone(feddure, data, tmp_path, monkeypatch):
    assert feddure("run", "--dataset", data, *SMALL, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(runs.Stop, "__call__", lambda self: True)
        patch.setattr(runs.Stop, "signal", 15)
        code, _, err = feddure("run", "--dataset", data, *SMALL, "--out", "stopped")
    assert code == 143
    assert "go on with: feddure run --out stopped --resume" in err
    code, out, _ = feddure("run", "--out", "stopped", "--resume")
    assert code == 0
    assert "accuracy, last evaluation" in out
    here = tmp_path / "here"
    assert (here / "stopped" / "metrics.jsonl").read_bytes() == (here / "whole" / "metrics.jsonl").read_bytes()
    code, out, err = feddure("run", "--out", "stopped", "--resume")
    assert code == 0
    assert "finished already" in err
    assert "accuracy, last evaluation" in out
    for words, message in (
        (["--dataset", data, *SMALL, "--out", "stopped"], "(--resume)"),
        (["--out", "stopped", "--resume", "--rounds", 9], "rounds: 2 there, 9 given"),
        (["--resume"], "name the folder"),
        (["--preset", "demo", "--resume"], "--resume was given without --out"),
    ):
        code, _, err = feddure("run", *words)
        assert code == 2
        assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fedmagic"], "fedmagic"),
        (["--model", "resnet1000"], "resnet1000"),
        (["--setting", "nonsense"], "partition.setting: 'nonsense' was given"),
        (["--setting", "sites"], "does not say which site"),
        (["--rounds", "some"], "'--rounds'"),
        (["--clients", "1"], "add --set clients_per_round=1"),
        (["--clients", "1000"], "ask for fewer --clients"),
        (["--set", "server.weigth=total"], "did you mean 'server.weight'"),
        (["--set", "validation=0.9"], "sets 144 images aside"),
        (["--set", "server.robust=median", "--method", "fedmatch"], "server.robust"),
        (["--dataset", "no-such-data"], "there is no data set 'no-such-data'"),
        (["--dataset", "npz:absent.npz"], "absent.npz"),
        (["--dataset", "folder:absent"], "absent"),
        (["--dataset", "no.such.module:function"], "no.such.module"),
        (["--preset", "dmeo"], "preset 'dmeo' does not exist; there are: aaai24"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--resume"], "no run is there to resume"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_message_and_leave_nothing(feddure, data, tmp_path, arguments, message):
    given = ["--dataset", data, *SMALL, *arguments] if "--resume" not in arguments else arguments
    code, out, err = feddure("run", *given, "--out", "run")
    assert code == 2
    assert message in " ".join(err.split())
    assert out == ""
    assert "feddure watch" not in err
    assert list((tmp_path / "here").iterdir()) == []


def test_a_number_of_clients_that_contradicts_the_sites_is_refused(feddure, data, tmp_path, images):
    arrays = {name: getattr(images, name) for name in ("images", "labels", "test_images", "test_labels")}
    np.savez(tmp_path / "sites.npz", **arrays, site=np.arange(len(images.labels)) % 2, sites=["north", "south"])
    given = ["--dataset", f"npz:{tmp_path / 'sites.npz'}", "--setting", "sites", *SMALL]
    for command in (["run"], ["compare", "--methods", "fedavg"]):
        words = given if command == ["run"] else [word for word in given if word not in ("--method", "fedavg")]
        code, _, err = feddure(*command, *words, "--out", "out")
        assert code == 2
        assert "--clients 4: data set" in err
        assert "has 2 sites" in err
        assert list((tmp_path / "here").iterdir()) == []
    code, _, err = feddure("run", *given, "--clients", "2", "--out", "out")
    assert code == 0, err


@pytest.mark.usefixtures("quiet")
def test_folders_with_brackets_and_spaces(feddure, data, tmp_path):
    name = "my [/old] runs [bold]"
    code, out, err = feddure("run", "--dataset", data, *SMALL, "--out", name)
    assert code == 0
    assert f"run folder: {name}" in err
    assert f"report: {name}/report.html" in out


@pytest.mark.usefixtures("quiet")
def test_a_run_whose_updates_are_all_left_out_fails(feddure, data, tmp_path):
    package = tmp_path / "here" / "broken_method.py"
    package.write_text(
        "from feddure.methods.fedavg import FedAvg\n"
        "class Broken(FedAvg):\n"
        "    def upload(self, client):\n"
        "        sent = super().upload(client)\n"
        "        return sent | {'theta': sent['theta'] / 0}\n"
    )
    code, _, err = feddure("run", "--dataset", data, *SMALL, "--method", "broken_method:Broken", "--out", "mine")
    assert code == 2, err
    assert "note: round 1: left out were updates" in " ".join(err.split())
    assert "used no client" in err
    assert not (tmp_path / "here" / "mine" / "model.safetensors").exists()
    lines = (tmp_path / "here" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert all(len(json.loads(line)["left_out"]) == 2 for line in lines)


@pytest.mark.usefixtures("quiet")
def test_an_error_in_ones_own_method_shows_its_lines_and_no_others(feddure, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(
        "from feddure.methods.fedavg import FedAvg\n"
        "class Broken(FedAvg):\n    def step(self, client, batch):\n        return 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, told = feddure("run", "--preset", "demo", "--method", "broken:Broken", "--out", tmp_path / "run")
    assert code == 1
    assert "return 1 / 0" in told
    assert "ZeroDivisionError" in told
    assert "lanes.py" not in told


def test_names_between_colons_are_printed_as_they_are(feddure):
    code, _, told = feddure("report", "a:x:b", "--out", "report.html")
    assert code == 2
    assert "a:x:b" in told
