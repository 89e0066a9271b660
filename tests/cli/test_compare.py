"""`feddure compare` from the outside: what it prints, what it leaves, what it refuses."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import folders
import tiny
from commands import invoke, table
from feddure import data, experiments
from feddure.errors import ConfigError, FeddureError, FeddureWarning, RunError
from feddure.reports import frame
from feddure.simulation import runs
from feddure.studies import compare, compare_report
from waiting import until

NAME = "tiny-compare"
write_report = compare_report.write


@pytest.fixture(scope="module", autouse=True)
def _registered():
    data.register(NAME, lambda: tiny.dataset(name=NAME))


@pytest.fixture(autouse=True)
def _quick(quiet, monkeypatch, tmp_path):
    monkeypatch.setattr(compare_report, "write", lambda folder, *_: folder / "report.html")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(experiments.to_yaml(tiny.experiment(dataset=NAME)))


def start(*arguments, **named):
    return invoke("compare", "--config", "tiny.yaml", *arguments, **named)


def compared(folder):
    """Methods and their seeds, as the table of a comparison has them."""
    return [(row["method"], row["seeds"]) for row in table(folder / "comparison.csv")]


def refused(error, match, *arguments):
    with pytest.raises(error, match=match):
        start(*arguments)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (["--methods", "fedavg,feddur"], "did you mean 'feddure'"),
        (["--methods", "fedavg,no.such:Method"], "no.such"),
        (["--model", "typo"], "model 'typo': expected one of"),
        (["--clients", 10**5], "partition.labels_per_class"),
        (["--methods", "fedmatch", "--set", "server.robust=median"], "server.robust"),
        (["--track", "typo"], "--track typo"),
    ],
    ids=str,
)
def test_no_folder_is_named_for_what_no_method_can_be_run_on(feddure, mistake, message):
    code, _, err = feddure("compare", "--preset", "demo", *mistake, "--out", "compared")
    assert code == 2
    assert message in err
    assert "comparison folder" not in err
    assert "feddure watch" not in err
    assert not Path("compared").exists()


def test_the_tables_and_where_the_files_are(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_report, "write", write_report)
    found = start("--methods", "fedavg, fedavg-matched", "--seeds", "0,1", "--out", "out").stdout
    for text in ("tiny-compare, dir-dir", "±", "95 % interval", "against Labels only", "over 2 seeds"):
        assert text in " ".join(found.split()), text
    assert "report  out/report.html" in found
    assert compared(tmp_path / "out") == [("fedavg", "0 1"), ("fedavg-matched", "0 1")]
    inside = folders.visible(tmp_path / "out")
    files = {"comparison.yaml", "comparison.csv", "paired.csv", "sites.csv", "report.html"}
    assert inside == {f"{method}-seed{seed}" for method in ("fedavg", "fedavg-matched") for seed in (0, 1)} | files


def test_one_seed_is_said_to_tell_nothing_against_a_reference_of_choice():
    found = start("--methods", "fedavg,feddure", "--against", "feddure", "--out", "a folder", "--rounds", "1").stdout
    assert "against FedDure" in found
    assert "one seed cannot tell" in found
    assert "feddure compare --out 'a folder' --resume --seeds 1,2" in found


def test_where_nothing_can_be_told_more_seeds_are_suggested(monkeypatch):
    monkeypatch.setattr(compare_report, "write", write_report)
    few, command = ("--methods", "fedavg,feddure", "--rounds", "1"), "--resume --seeds 2,3"
    for end in ("above", "below"):
        monkeypatch.setattr(frame.Difference, end, False)
    assert command in start(*few, "--seeds", "0,1", "--out", "out").stdout
    monkeypatch.setattr(frame.Difference, "above", True)
    assert command not in start(*few, "--seeds", "0,1", "--out", "told").stdout


def test_a_new_folder_each_time(tmp_path):
    for name in ("compare-tiny-compare-dir-dir", "compare-tiny-compare-dir-dir-2"):
        assert f"runs/{name}/report.html" in start("--methods", "fedavg", "--rounds", "1").stdout
        assert experiments.load(file=tmp_path / "runs" / name / "fedavg-seed0" / "config.yaml").rounds == 1


def decays(folder):
    return {experiments.load(file=run / "config.yaml").server.ema for run in folder.glob("*-seed*")}


def test_all_methods_models_are_averaged_or_none(tmp_path, monkeypatch):
    few = ("--methods", "fedavg,fedtutor", "--rounds", "1")
    start(*few, "--out", "out")
    assert decays(tmp_path / "out") == {0.9}
    assert all(row["accuracy_ema_last10_mean"] for row in table(tmp_path / "out" / "comparison.csv"))
    start(*few, "--out", "own", "--set", "server.ema=0.5")
    assert decays(tmp_path / "own") == {0.5}
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_DECAY", None)  # as before
        start(*few, "--out", "old")
    invoke("compare", "--out", "old", "--resume", "--seeds", "1")
    assert decays(tmp_path / "old") == {None}


def test_options_reach_every_run(tmp_path):
    options = ["--setting", "iid-iid", "--clients", "3", "--set", "clients_per_round=2", "--rounds", "1"]
    start("--methods", "fedavg,fedavg-matched", "--out", "out", *options)
    for method in ("fedavg", "fedavg-matched"):
        found = experiments.load(file=tmp_path / "out" / f"{method}-seed0" / "config.yaml")
        assert (found.method, found.partition.setting, found.partition.clients) == (method, "iid-iid", 3)
        assert (found.clients_per_round, found.rounds) == (2, 1)


def test_resume_needs_nothing_but_the_folder(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        turns = iter(range(100))
        patch.setattr(runs.Stop, "__call__", lambda self: next(turns) >= 9)
        patch.setattr(runs.Stop, "signal", 15)
        stopped = start("--methods", "fedavg,feddure", "--seeds", "4", "--out", "out", exit_code=143)
    assert "go on with: feddure compare --out out --resume" in stopped.stderr
    invoke("compare", "--out", "out", "--resume")
    assert compared(tmp_path / "out") == [("fedavg", "4"), ("feddure", "4")]
    invoke("compare", "--out", "out", "--resume", "--methods", "fedavg-sl", "--seeds", "7")
    assert compared(tmp_path / "out") == [("fedavg", "4 7"), ("feddure", "4 7"), ("fedavg-sl", "4 7")]


def test_a_method_that_fails_is_listed_with_its_reason(tmp_path):
    with pytest.warns(FeddureWarning):
        found = start("--methods", "fedavg,failing:Raises,fedavg-matched", "--out", "a folder", exit_code=1)
    assert "failing:Raises failed: OSError: a mistake." in " ".join(found.stdout.split())
    error = found.stderr[found.stderr.index("error: ") :]
    assert error.count("File ") == 1  # the method's
    assert "try again with: feddure compare --out 'a folder' --resume --allow-modules" in error
    assert compared(tmp_path / "a folder") == [("fedavg", "0"), ("fedavg-matched", "0"), ("failing:Raises", "")]


def test_what_is_refused_leaves_nothing(tmp_path):
    some = ("--methods", "fedavg,feddure", "--out", "out")
    refused(ConfigError, "no method was given", "--out", "out")
    refused(ConfigError, "--methods fedavg,: expected names", "--methods", "fedavg,", "--out", "out")
    refused(ConfigError, "fedavg was given twice", "--methods", "fedavg,feddure,fedavg", "--out", "out")
    refused(ConfigError, "--seeds 0,one: expected whole numbers", *some, "--seeds", "0,one")
    refused(ConfigError, "--seeds -1", *some, "--seeds", "-1")
    refused(ConfigError, "seeds: 2 was given twice", *some, "--seeds", "2,1,2")
    refused(ConfigError, "against fedavg-sl: expected one of", *some, "--against", "fedavg-sl")
    refused(ConfigError, "give methods .--methods. instead", *some, "--set", "method=feddure")
    refused(ConfigError, "give seeds .--seeds. instead", *some, "--set", "seed = 3")
    refused(FeddureError, "no data set", *some, "--dataset", "fashion-mimi")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.yaml"]


def test_folders_that_cannot_be_used(tmp_path):
    refused(RunError, "not empty and holds no comparison", "--methods", "fedavg", "--out", tmp_path)
    with pytest.raises(ConfigError, match="nothing says what to train"):
        invoke("compare", "--out", tmp_path / "new")
    with pytest.raises(RunError, match="needs the folder of a comparison"):
        invoke("compare", "--resume")
    with pytest.raises(RunError, match="nowhere: no comparison is there to resume"):
        invoke("compare", "--resume", "--out", "nowhere")


PAIR = ("--preset", "demo", "--methods", "fedavg-matched,fedtutor", "--seeds", "0,1", "--set", "local_steps=1")


@pytest.fixture
def command():
    """Starts `feddure compare` as a process of its own."""
    started = []

    def call(*arguments):
        line = [sys.executable, "-m", "feddure", "compare", *PAIR, *arguments]
        started.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def test_processes_that_share_the_runs_leave_what_one_leaves(command, tmp_path):
    invoke("compare", *PAIR, "--rounds", 2, "--out", "one", "--jobs", 1)
    process = command("--rounds", "2", "--out", "two", "--jobs", "2")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert said.count("comparison folder") == 1
    for file in (tmp_path / "one").glob("*/metrics.jsonl"):
        assert file.read_bytes() == (tmp_path / "two" / file.parent.name / file.name).read_bytes()
    assert (tmp_path / "one" / "paired.csv").read_bytes() == (tmp_path / "two" / "paired.csv").read_bytes()


def test_ctrl_c_stops_all_processes_and_says_how_to_go_on(command, tmp_path):
    process = command("--rounds", "5000", "--out", "out", "--jobs", "2")
    until(lambda: len(list((tmp_path / "out").glob("*/timing.jsonl"))) == 2, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 130, said
    assert "go on with: feddure compare --out out --resume" in said
    begun = [path for path in (tmp_path / "out").glob("*-seed*") if path.is_dir()]
    assert len(begun) == 2
    for path in begun:
        runs.expect_unlocked(path)
        assert (path / "checkpoint" / "state.safetensors").exists()
