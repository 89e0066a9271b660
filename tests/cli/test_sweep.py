"""`feddure sweep` from the outside: what it prints, what it leaves, and that it goes on."""

import re
import signal

import pytest
import yaml

import tiny
from commands import invoke, table
from feddure import data, environment, experiments
from feddure.errors import ConfigError, DataError, FeddureWarning, RunError
from feddure.reports.page import Picture
from feddure.simulation import runs
from feddure.studies import sweep as study
from feddure.studies import sweep_report
from feddure.studies.grid.runner import _Worker
from feddure.studies.grid.store import Store
from folders import visible

NAME = "tiny-sweep"
FILES = {"cells.jsonl", "leaderboard.csv", "leaderboard.md", "leaderboard.png", "report.html", "results.csv",
         "sweep.yaml"}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _registered():
    data.register(NAME, lambda: tiny.dataset(name=NAME))


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "commit", lambda: None)
    (tmp_path / "tiny.yaml").write_text(experiments.to_yaml(tiny.experiment(dataset=NAME)))


@pytest.fixture
def measured(monkeypatch):
    """The cells that were trained, in order."""
    found, measure = [], _Worker._measure

    def count(self, cell, engine):
        found.append(cell.hash)
        measure(self, cell, engine)

    monkeypatch.setattr(_Worker, "_measure", count)
    return found


@pytest.fixture
def _undrawn(monkeypatch):
    """Pictures take longer than these cells."""
    monkeypatch.setattr(sweep_report.style, "render", lambda figure, ending: b"picture")
    monkeypatch.setattr(sweep_report, "embed", lambda figure, alt: Picture(alt, 1, 1))


def write(path, methods=("fedavg", "fedavg-matched"), seeds=(0, 1), **changes):
    tree = {"config": "tiny.yaml", "grid": {"method": list(methods), "local_steps": [1, 2]}, "seeds": list(seeds)}
    (path / "mine.yaml").write_text(yaml.safe_dump(tree | changes, sort_keys=False))


def kept(folder):
    return list(Store(folder).measurements())


def test_a_sweep_from_end_to_end(tmp_path, measured):
    write(tmp_path, methods=("fedavg-fixmatch", "fedavg-matched"))
    printed = " ".join(invoke("sweep", "mine.yaml").stdout.split())
    out = tmp_path / "runs" / "sweep-mine"
    assert visible(out) == FILES
    assert len(measured) == len(set(measured)) == 8
    for text in ("FedAvg-FixMatch, local steps 2", "±", "on the same 2 seeds", "runs/sweep-mine/report.html"):
        assert text in printed, text
    board, results = table(out / "leaderboard.csv"), table(out / "results.csv")
    means = [float(row["accuracy_last10_mean"]) for row in board]
    assert means == sorted(means, reverse=True)
    assert {(row["method"], row["seed"], row["options"]) for row in results} == {
        (method, seed, f"local_steps={steps}")
        for method in ("fedavg-fixmatch", "fedavg-matched")
        for seed in "01"
        for steps in (1, 2)
    }
    best = [float(row["accuracy_last10"]) for row in results if row["config_hash"] in board[0]["config_hashes"]]
    assert means[0] == pytest.approx(sum(best) / 2, abs=0.01)


def test_a_dry_run_writes_nothing(tmp_path, measured):
    write(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    printed = invoke("sweep", "mine.yaml", "--dry-run").stdout
    assert sorted(tmp_path.rglob("*")) == before
    assert measured == []
    assert "8 of 8 cells to measure, about" in printed
    assert "Labels only, local steps 2" in printed


@pytest.mark.usefixtures("_undrawn")
def test_finished_cells_are_not_measured_again_and_a_sweep_may_grow(tmp_path, measured):
    write(tmp_path)
    invoke("sweep", "mine.yaml", "--out", "out")
    first = list(measured)
    invoke("sweep", "mine.yaml", "--out", "out")
    assert measured == first
    write(tmp_path, seeds=(0, 1, 2))
    assert "4 of 12 cells to measure" in invoke("sweep", "mine.yaml", "--out", "out", "--dry-run").stdout
    assert "4 of 12 cells to measure" in invoke("sweep", "mine.yaml", "--merge", "out", "--dry-run").stdout
    invoke("sweep", "mine.yaml", "--out", "out")
    assert len(measured) == 12
    assert {row["seeds_measured"] for row in table(tmp_path / "out" / "leaderboard.csv")} == {"0 1 2"}


@pytest.mark.usefixtures("_undrawn")
def test_a_part_of_a_sweep_is_measured_first_and_the_rest_later(tmp_path, measured):
    write(tmp_path)
    part = ("--only", "labels only, * 2", "--only", "fedavg*", "--seeds", "1")
    assert "3 of 3 cells to measure" in invoke("sweep", "mine.yaml", *part, "--dry-run").stdout
    assert "5 cells are not measured" in invoke("sweep", "mine.yaml", *part, "--out", "out").stdout
    found = {one.config_hash: one.experiment for one in kept(tmp_path / "out")}
    assert [found[name]["method"] for name in measured] == ["fedavg-matched", "fedavg", "fedavg"]
    assert {one["seed"] for one in found.values()} == {1}
    invoke("sweep", "mine.yaml", "--out", "out")
    assert len(measured) == 8
    for wrong in (("--only", "FedDure"), ("--only", "[f]edavg*"), ("--seeds", "2")):  # only * means something
        with pytest.raises(ConfigError, match=re.escape(wrong[1])):
            invoke("sweep", "mine.yaml", *wrong)


@pytest.mark.usefixtures("_undrawn")
def test_a_stopped_sweep_goes_on(tmp_path, measured, monkeypatch):
    write(tmp_path, seeds=(0,))
    with monkeypatch.context() as patch:
        patch.setattr(runs.Stop, "__call__", lambda self: len(measured) > 1)
        patch.setattr(runs.Stop, "signal", signal.SIGINT)
        stopped = invoke("sweep", "mine.yaml", "--out", "out", exit_code=130)
    assert "finished cells are kept" in stopped.stderr
    assert "go on with: feddure" in stopped.stderr
    assert len(kept(tmp_path / "out")) == 1
    assert len(table(tmp_path / "out" / "results.csv")) == 1
    assert [row["seeds_measured"] for row in table(tmp_path / "out" / "leaderboard.csv")] == ["0", "", "", ""]
    assert "3 cells are not measured" in stopped.stdout
    measured.clear()
    invoke("sweep", "mine.yaml", "--out", "out")
    assert len(measured) == 3
    assert visible(tmp_path / "out") == FILES


@pytest.mark.usefixtures("_undrawn")
def test_an_error_in_code_leaves_the_others_their_places(tmp_path):
    """In that of a method, and in that of a data set."""
    write(tmp_path, grid={"method": ["fedavg", "failing:Raises", "fedavg-matched"]})
    found = invoke("sweep", "mine.yaml", "--out", "out", "--allow-modules", exit_code=1)
    assert visible(tmp_path / "out") == FILES | {"unfinished"}
    board = table(tmp_path / "out" / "leaderboard.csv")
    assert sorted(row["seeds_measured"] for row in board) == ["", "0 1", "0 1"]
    assert "2 cells are not measured" in found.stdout
    for name in ("leaderboard.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "Failed: failing:Raises, seeds 0, 1 (OSError: a mistake)." in text
    assert found.stderr.count("note: cell failing:Raises") == 2
    error = found.stderr[found.stderr.index("error: ") :]
    assert 'failing.py", line ' in error
    assert error.count("File ") == 1
    write(tmp_path, seeds=(0,), grid={"dataset": [NAME, "failing:no_data"]})
    other = invoke("sweep", "mine.yaml", "--out", "other", "--allow-modules", exit_code=1)
    assert "in no_data" in other.stderr
    assert len(kept(tmp_path / "other")) == 1


@pytest.mark.usefixtures("_undrawn")
def test_only_the_cells_of_the_sweep_are_taken_over(tmp_path, measured):
    write(tmp_path, seeds=(0, 1, 2))
    invoke("sweep", "mine.yaml", "--out", "one")
    (tmp_path / "mine.yaml").rename(tmp_path / "first.yaml")
    write(tmp_path, methods=("fedavg", "fedavg-fixmatch"), seeds=(0,))
    (tmp_path / "mine.yaml").rename(tmp_path / "second.yaml")
    measured.clear()
    found = invoke("sweep", "second.yaml", "--out", "two", "--merge", "one")
    assert "one: 2 new cells taken over" in found.stderr
    assert len(measured) == 2
    assert len(kept(tmp_path / "two")) == 4
    assert [row["study"] for row in table(tmp_path / "two" / "results.csv")] == ["second"] * 4


@pytest.mark.usefixtures("_undrawn")
def test_every_problem_has_its_table_and_verdict(tmp_path):
    grid = {"method": ["fedavg", "fedavg-matched"], "partition.setting": ["iid-iid", "dir-dir"]}
    write(tmp_path, seeds=(0,), grid=grid)
    printed = " ".join(invoke("sweep", "mine.yaml", "--out", "out").stdout.split())
    first, second = printed.index("mine: IID-IID"), printed.index("mine: DIR-DIR")
    assert first < second
    for text in (printed[first:second], printed[second:]):
        assert "1 FedAvg" in text
        assert "on the same 1 seed: one seed cannot tell" in text
    assert "setting" not in printed
    assert printed.count("accuracies on different data cannot be compared") == 1
    assert printed.count("Ordered by test accuracy") == 1
    board = table(tmp_path / "out" / "leaderboard.csv")
    assert [(row["problem"], row["place"]) for row in board] == [
        (problem, place) for problem in ("IID-IID", "DIR-DIR") for place in "12"
    ]


@pytest.mark.usefixtures("_undrawn")
def test_jobs_are_the_same_command_and_their_cells_are_reported_here(tmp_path, measured, monkeypatch):
    (tmp_path / "of_a_job.py").write_text("import tiny\n\ndef images():\n    return tiny.dataset()\n")
    write(tmp_path, methods=["fedavg"], set={"dataset": "of_a_job:images"}, seeds=(0,))
    monkeypatch.setattr("sys.argv", ["feddure", "sweep", "mine.yaml", "--out", "out", "--jobs", "2", "--allow-modules"])
    found = invoke("sweep", "mine.yaml", "--out", "out", "--jobs", "2", "--allow-modules")
    assert measured == []  # not here
    assert found.stderr.count("% (last)") == 2
    assert visible(tmp_path / "out") == FILES
    assert {one.environment["command"] for one in kept(tmp_path / "out")} == {
        "feddure sweep mine.yaml --out out --jobs 2 --allow-modules"
    }


def test_a_folder_that_cannot_be_taken_over_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path)
    for words in ([], ["--dry-run"]):
        with pytest.raises(RunError, match="absent: no measured cells are there"):
            invoke("sweep", "mine.yaml", "--out", "out", "--merge", "absent", *words)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "cells.jsonl").write_text("{")
    with pytest.raises(RunError, match=r"cells\.jsonl: line 1 is damaged"):
        invoke("sweep", "mine.yaml", "--out", "out", "--merge", "damaged")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_undrawn")
def test_cells_of_another_process_are_said_to_be_missing(tmp_path):
    write(tmp_path, seeds=(0,))
    cells = study.read(tmp_path / "mine.yaml").cells()
    wanted = study.open_folder(study.read(tmp_path / "mine.yaml"), tmp_path / "out")
    with Store(wanted.folder).claimed(cells[0]), pytest.warns(FeddureWarning, match="another process"):
        found = invoke("sweep", "mine.yaml", "--out", "out")
    assert "1 cells are not measured" in found.stdout


def test_what_is_refused(tmp_path):
    write(tmp_path, grid={"methd": ["fedavg"]})
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*unknown field 'methd'; did you mean 'method'"):
        invoke("sweep", "mine.yaml")
    write(tmp_path)
    with pytest.raises(RunError, match="holds no sweep"):
        invoke("sweep", "mine.yaml", "--out", ".")
    with pytest.raises(ConfigError, match="--ray nonsense: expected local, auto, HOST:PORT"):
        invoke("sweep", "mine.yaml", "--ray", "nonsense")
    with pytest.raises(ConfigError, match="--ray and --jobs were both given"):
        invoke("sweep", "mine.yaml", "--ray", "local", "--jobs", "2", "--out", "both")
    assert not (tmp_path / "both").exists()


def test_absent_data_are_said_before_anything_is_trained(tmp_path, measured):
    write(tmp_path, grid={"dataset": [NAME, "cifar10"]})
    with pytest.raises(DataError, match="cifar10 is not in"):
        invoke("sweep", "mine.yaml", "--out", "out", "--data-dir", tmp_path)
    assert measured == []
    assert not (tmp_path / "out").exists()
