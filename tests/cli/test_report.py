import pytest

from commands import invoke
from feddure import experiments
from feddure.errors import RunError
from feddure.experiments import load
from feddure.tracking.records import Writer


def make_run(folder, seed=0):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(experiments.to_yaml(load("demo", changes={"seed": seed})))
    with Writer(folder / "metrics.jsonl") as writer:
        writer.write({"round": 2, "clients": [1], "steps": [5], "test": {"accuracy": 0.5, "loss": 1.0}})
    return folder


def test_the_report_of_one_run_lies_in_its_folder(tmp_path):
    run = make_run(tmp_path / "run")
    assert invoke("report", run).stdout == f"{run / 'report.html'}\n"
    assert "50.0" in (run / "report.html").read_text()


def test_the_report_of_several_runs_lies_here(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / "runs" / str(seed), seed) for seed in (0, 1)]
    monkeypatch.chdir(tmp_path)
    assert invoke("report", *runs).stdout == "report.html\n"
    assert "2 runs" in (tmp_path / "report.html").read_text()


def test_the_file_can_be_chosen(tmp_path):
    run = make_run(tmp_path / "run")
    invoke("report", run, "--out", tmp_path / "mine.html")
    assert (tmp_path / "mine.html").is_file()
    assert not (run / "report.html").exists()


def test_a_folder_that_is_no_run_is_refused_and_nothing_is_written(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match=r"other: not a run folder, config\.yaml and metrics\.jsonl missing"):
        invoke("report", run, tmp_path / "other", "--out", tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
