"""Comparisons: equal conditions, the same results as single runs, and verdicts that chance cannot earn."""

import itertools
import os
from dataclasses import replace

import pytest

import failing
import folders
import tiny
from commands import table
from feddure.errors import FeddureWarning, RunError
from feddure.methods import title as method_title
from feddure.methods.fedavg import FedAvg
from feddure.reports.frame import paired
from feddure.simulation import checkpoint, runs
from feddure.studies import compare as study
from feddure.studies import compare_report
from feddure.studies.compare import Plan, compare, make_plan, read_plan, run_folder
from feddure.studies.compare_report import View
from feddure.studies.grid import jobs
from feddure.tracking import records

METHODS = ("fedavg", "fedavg-matched", "feddure")
write_report = compare_report.write
SAME = ("metrics.jsonl", "model.safetensors", "partition.npz", "config.yaml", str(checkpoint.FILE))


@pytest.fixture(autouse=True)
def _without_report(quiet, monkeypatch):
    monkeypatch.setattr(compare_report, "write", lambda folder, *_: folder / "report.html")


@pytest.fixture
def _with_report(_without_report, monkeypatch):
    monkeypatch.setattr(compare_report, "write", write_report)


def compared(images, folder, methods=METHODS, seeds=(0,), resume=False, against=None, **changes):
    plan = make_plan(methods, seeds, against, read_plan(folder) if resume else None)
    return compare(plan, tiny.experiment(changes), images, folder, resume, progress=False)


def stop_after(monkeypatch, turns):
    """Ask to stop when the lanes have taken so many turns."""
    taken = iter(range(10**9))
    monkeypatch.setattr(runs.Stop, "__call__", lambda self: next(taken) >= turns)
    monkeypatch.setattr(runs.Stop, "signal", 2)


def contents(folder):
    return {(run.name, name): (run / name).read_bytes() for run in folder.iterdir() if run.is_dir() for name in SAME}


# --- equal conditions, stopping and going on -------------------------------------------------------------

SEEDS = (0, 5)
CHANGES = {"rounds": 3, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory):
    """The files of each run where it trains by itself."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: None)
        for method, seed in itertools.product(METHODS, SEEDS):
            wanted = tiny.experiment(CHANGES | {"method": method, "seed": seed})
            runs.execute(wanted, images, run_folder(folder, method, seed), progress=False)
    return contents(folder)


def test_a_comparison_is_its_runs_one_by_one_on_shared_partitions_and_clients(images, tmp_path, alone):
    found = compared(images, tmp_path, seeds=SEEDS, **CHANGES).runs
    assert contents(tmp_path) == alone
    hashes, clients = {}, {}
    for seed in SEEDS:
        group = [run for run in found if run.experiment.seed == seed]
        assert [run.experiment.method for run in group] == list(METHODS)
        (hashes[seed],) = {run.partition["sha256"] for run in group}
        (clients[seed],) = {str([record["clients"] for record in run.metrics]) for run in group}
    assert hashes[0] != hashes[5]
    assert clients[0] != clients[5]


@pytest.mark.parametrize("turns", [0, 25])
def test_a_stopped_comparison_resumes_to_the_same_results(images, tmp_path, monkeypatch, alone, turns):
    with monkeypatch.context() as patch:
        stop_after(patch, turns)
        with pytest.raises(runs.Interrupted, match=f"feddure compare --out {tmp_path} --resume") as caught:
            compared(images, tmp_path, seeds=SEEDS, **CHANGES)
    assert caught.value.exit_code == 130
    assert not (tmp_path / "comparison.csv").exists()
    compared(images, tmp_path, methods=(), seeds=(), resume=True, **CHANGES)
    assert contents(tmp_path) == alone


def test_methods_and_seeds_can_be_added_and_finished_runs_stay(images, tmp_path, alone):
    compared(images, tmp_path, methods=METHODS[:2], seeds=(0,), **CHANGES)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-seed0/*")}
    found = compared(images, tmp_path, methods=METHODS[2:], seeds=(5,), resume=True, **CHANGES)
    assert found.plan == Plan(METHODS, SEEDS, "fedavg-matched") == read_plan(tmp_path)
    assert len(found.runs) == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert contents(tmp_path) == alone
    (run_folder(tmp_path, "feddure", 0) / "model.safetensors").unlink()
    compared(images, tmp_path, methods=(), seeds=(), resume=True, **CHANGES)
    assert contents(tmp_path) == alone


def test_a_second_comparison_in_the_folder_is_refused(images, tmp_path):
    with runs.lock(tmp_path), pytest.raises(RunError, match=f"process {os.getpid()} is working on it"):
        compared(images, tmp_path)


def test_progress_names_method_and_seed(images, tmp_path, capsys):
    compare(make_plan(["fedavg", "feddure"], [3]), tiny.experiment(rounds=1), images, tmp_path)
    lines = [line.split("  ")[:2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [["FedAvg*, seed 3 (1 of 2)", "round 1/1"], ["FedDure, seed 3 (2 of 2)", "round 1/1"]]


# --- methods that fail ---------------------------------------------------------------------------------


@pytest.fixture
def _bad_methods():
    failing.register()


bad_methods = pytest.mark.usefixtures("_bad_methods")
told = pytest.mark.filterwarnings("ignore::feddure.errors.FeddureWarning")


@bad_methods
@pytest.mark.usefixtures("_with_report")
@told
def test_a_method_that_fails_takes_no_other_with_it(images, tmp_path):
    changes = {"rounds": 3, "checkpoint_every": 1}
    found = compared(images, tmp_path / "out", ("raises", "fedavg", "mistaken", "fedavg-matched"), (0, 1), **changes)
    assert list(found.failed) == ["raises", "mistaken"]
    assert found.failed["raises"].reason == "OSError: a mistake"
    assert "failing.py" in found.failed["raises"].traceback
    assert found.failed["mistaken"].traceback == ""
    assert found.plan.methods == ("fedavg", "fedavg-matched")
    assert list(found.pairs()["method"]) == ["FedAvg*"]
    lines = {row["method"]: row for row in table(tmp_path / "out" / "comparison.csv")}
    assert lines["raises"]["failed"] == "OSError: a mistake"
    assert set(lines["raises"].values()) == {"raises", "OSError: a mistake", ""}
    assert lines["fedavg"]["failed"] == ""
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Raises failed: OSError: a mistake." in page
    assert "Mistaken failed: method &#39;mistaken&#39; uses batch.strong" in page


@bad_methods
@told
def test_a_failed_method_is_tried_again_and_joins_the_others(images, tmp_path, monkeypatch):
    folder, changes = tmp_path / "out", {"rounds": 3, "checkpoint_every": 1}
    found = compared(images, folder, ("raises", "fedavg"), **changes)
    assert read_plan(folder) == Plan(("raises", "fedavg"), (0,), "raises")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("fedavg-seed0/*")}
    monkeypatch.setattr(failing.Raises, "step", FedAvg.step)
    found = compared(images, folder, (), (), resume=True, **changes)
    assert found.failed == {}
    assert list(found.methods()["method"]) == ["Raises", "FedAvg*"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    compared(images, tmp_path / "whole", ("raises", "fedavg"), **changes)
    assert contents(folder) == contents(tmp_path / "whole")


@bad_methods
@told
def test_what_has_ended_a_method_in_a_job_is_not_found_out_again(images, tmp_path, monkeypatch):
    folder, plan, experiment = tmp_path / "out", make_plan(("raises", "fedavg"), (0, 1)), tiny.experiment(rounds=2)
    tried, execute = [], runs.execute

    def in_a_job(*_):
        with monkeypatch.context() as patch:
            patch.setenv(jobs.JOB, "1-1")
            patch.setattr(jobs, "end_with_parent", lambda: None)
            study.work(plan, experiment, images, folder)

    def count(wanted, *rest):
        tried.append((wanted.method, wanted.seed))
        return execute(wanted, *rest)

    monkeypatch.setattr(study, "_train_in_jobs", in_a_job)
    monkeypatch.setattr(runs, "execute", count)
    found = compare(plan, experiment, images, folder, progress=False, processes=2)
    assert tried == [("raises", 0), ("fedavg", 0), ("fedavg", 1)]
    assert found.failed["raises"].reason == "OSError: a mistake"
    assert "failing.py" in found.failed["raises"].traceback
    assert not (folder / ".failures").exists()


@bad_methods
@pytest.mark.usefixtures("_with_report")
def test_without_its_reference_a_comparison_tells_no_differences(images, tmp_path):
    with pytest.warns(FeddureWarning, match="^raises: OSError: a mistake"):  # at once
        found = compared(images, tmp_path / "out", ("raises", "fedavg"), against="raises")
    assert found.differences == {}
    assert "It was the reference: no difference from it can be told." in (tmp_path / "out" / "report.html").read_text()


@bad_methods
@told
def test_where_all_methods_fail_there_is_nothing_to_compare(images, tmp_path):
    with pytest.raises(RunError, match=r"(?s)ended method raises:\nTraceback.*a mistake.*\nmethod mistaken cannot be"):
        compared(images, tmp_path / "out", ("raises", "mistaken"))
    assert not (tmp_path / "out" / "comparison.csv").exists()


@bad_methods
def test_a_full_disk_ends_the_comparison(images, tmp_path, monkeypatch):
    monkeypatch.setattr(records.Writer, "write", folders.disk_is_full)
    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\)"):
        compared(images, tmp_path / "out", ("fedavg", "fedavg-matched"))


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "against", "expected"),
    [
        (["feddure", "fedavg-matched"], None, "fedavg-matched"),
        (["feddure", "fedavg"], None, "feddure"),
        (["feddure", "fedavg"], "fedavg", "fedavg"),
    ],
)
def test_the_reference(methods, against, expected):
    assert make_plan(methods, [0], against).against == expected


def test_folders_that_hold_something_else(images, tmp_path):
    folder = tmp_path / "out"
    compared(images, folder)
    before = contents(folder)
    with pytest.raises(RunError, match=r"a comparison is there already.*--resume"):
        compared(images, folder)
    with pytest.raises(RunError, match=r"fedavg-seed0: .*another configuration .*gamma: 0\.5 there, 0\.1 given"):
        compared(images, folder, resume=True, **{"partition.gamma": 0.1})
    (tmp_path / "holiday.jpg").write_bytes(b"beach")
    for resume in (False, True):
        with pytest.raises(RunError, match="not empty and holds no comparison"):
            compared(images, tmp_path, resume=resume)
    with pytest.raises(RunError, match="a file is there"):
        compared(images, tmp_path / "holiday.jpg")
    assert contents(folder) == before


@pytest.mark.parametrize("text", ["methods: [", "methods: 3\nseeds: [0]\nagainst: a"])
def test_a_damaged_plan_is_named(tmp_path, text):
    (tmp_path / "comparison.yaml").write_text(text)
    with pytest.raises(RunError, match=r"comparison\.yaml: damaged"):
        read_plan(tmp_path)


def test_runs_on_different_partitions_are_not_compared(images, tmp_path):
    folder = tmp_path / "out"
    compared(images, folder, methods=("fedavg",))
    dealt = tiny.experiment({"seed": 0, "partition.seed": 9, "method": "feddure"})
    other = runs.execute(dealt, images, tmp_path / "other", progress=False)
    compared(images, folder, methods=("feddure",), resume=True)
    inside = run_folder(folder, "feddure", 0)
    (inside / "partition.json").write_bytes((other.folder / "partition.json").read_bytes())
    with pytest.raises(RunError, match=r"feddure-seed0 and .*fedavg-seed0 have different partitions"):
        compared(images, folder, methods=(), seeds=(), resume=True)


# --- the numbers ---------------------------------------------------------------------------------------


def made_up(tmp_path, method, seed, accuracies, steps, communication=None, seconds=2.0, **others):
    metrics = [
        {"round": n, "clients": [0, 1], "steps": steps, "test": {"accuracy": accuracy, **others}}
        | ({"communication": communication} if communication else {})
        for n, accuracy in enumerate(accuracies, start=1)
    ]
    timing = [{"round": n, "seconds": seconds, "clients": 2, "shared_by": 1} for n in range(1, len(accuracies) + 1)]
    experiment = tiny.experiment(method=method, seed=seed, rounds=len(accuracies))
    return records.Run(tmp_path, experiment, metrics, timing, {}, {})


def test_the_tables(tmp_path):
    plan = make_plan(["fedavg-matched", "feddure"], [0, 1])
    sent = {"down": 100, "up": 70, "up_sparse": 7}
    found = [
        made_up(tmp_path, "fedavg-matched", 0, [0.1, *[0.5] * 9, 0.6], [4, 6], sent),
        made_up(tmp_path, "fedavg-matched", 1, [0.1, *[0.4] * 9, 0.5], [4, 6], sent),
        made_up(tmp_path, "feddure", 0, [0.1, *[0.6] * 9, 0.7], [5, 5], seconds=3.0),
        made_up(tmp_path, "feddure", 1, [0.1, *[0.6] * 9, 0.6], [5, 5], seconds=5.0),
    ]
    view = View(plan, found, {})
    view.write_tables(tmp_path)
    matched, feddure = table(tmp_path / "comparison.csv")
    assert matched == {
        "method": "fedavg-matched", "seeds": "0 1", "rounds": "11", "local_steps_per_round": "10.0",
        "local_steps_per_client_and_round": "5.0", "accuracy_last_mean": "55.0", "accuracy_last_sd": "7.0711",
        "accuracy_last10_mean": "46.0", "accuracy_last10_sd": "7.0711", "bytes_down": "1100", "bytes_up": "770",
        "seconds": "22.0", "failed": "",
    }  # fmt: skip
    assert (feddure["bytes_down"], feddure["bytes_up"], feddure["seconds"]) == ("", "", "44.0")
    by_last10, by_last = table(tmp_path / "paired.csv")
    assert (by_last10["evaluations"], by_last["evaluations"]) == ("last10", "last")
    expected = paired({0: 61, 1: 60}, {0: 51, 1: 41})
    assert float(by_last10["difference_mean"]) == pytest.approx(14.5, abs=1e-4)
    assert float(by_last10["interval_low"]) == pytest.approx(expected.low, abs=1e-4)
    assert float(by_last10["interval_high"]) == pytest.approx(expected.high, abs=1e-4)
    assert by_last10["verdict"] == "no difference can be told"
    assert by_last["interval_low"] == ""
    assert list(view.methods()["last 10"].map(str)) == ["46.0 ± 7.1", "60.5 ± 0.7"]
    assert list(view.methods()["sent"]) == ["1.87 kB", "–"]
    assert list(view.methods()["time"]) == ["22 s", "44 s"]
    assert "mean of last 10 evaluations" in view.about_methods()


def test_averaged_models_are_compared_with_averaged_ones(tmp_path):
    found = []
    for method, gain in (("fedavg-matched", 0.0), ("fedtutor", 0.1)):
        for seed in (0, 1):
            run = made_up(tmp_path, method, seed, [0.1, *[0.5] * 10], [4, 6])
            for record in run.metrics:
                record["test_ema"] = {"accuracy": 0.6 + gain + seed / 100}
            found.append(run)
    view = View(make_plan(["fedavg-matched", "fedtutor"], [0, 1]), found, {})
    assert list(view.methods()["averaged"].map(str)) == ["60.5 ± 0.7", "70.5 ± 0.7"]
    assert view.pairs()["averaged"][0] == "+10.0"
    view.write_tables(tmp_path)
    assert table(tmp_path / "comparison.csv")[1]["accuracy_ema_last10_mean"] == "70.5"
    pairs = {row["evaluations"]: row["difference_mean"] for row in table(tmp_path / "paired.csv")}
    assert (float(pairs["last10"]), float(pairs["ema_last10"])) == (0.0, pytest.approx(10.0))


def test_options_that_only_one_method_has_are_said(tmp_path):
    tuned = tiny.experiment({"method": "fedtutor", "fedtutor.calibrate": "both"})
    found = [made_up(tmp_path, method, 0, [0.5], [4, 6]) for method in ("fedavg-matched", "fedtutor")]
    found[1] = replace(found[1], experiment=tuned)
    said = View(make_plan(["fedavg-matched", "fedtutor"], [0]), found, {}).about_methods()
    assert "FedTutor has fedtutor.calibrate=both." in said
    assert "Labels only has" not in said


def test_another_metric_ranks_where_it_is_asked_for(tmp_path):
    plan = make_plan(["fedavg-matched", "feddure"], [0, 1])
    found = [
        made_up(tmp_path, "fedavg-matched", seed, [0.9] * 12, [4, 6], macro_f1=0.3 + seed / 100, ece=0.2)
        for seed in (0, 1)
    ]
    found += [
        made_up(tmp_path, "feddure", seed, [0.5] * 12, [4, 6], macro_f1=0.6 + seed / 50, ece=0.1) for seed in (0, 1)
    ]
    view = View(plan, found, {}, "macro_f1")
    view.write_tables(tmp_path)
    pair = table(tmp_path / "paired.csv")[0]
    assert (pair["metric"], float(pair["difference_mean"])) == ("macro_f1", pytest.approx(30.5))
    assert list(view.methods()["macro F1, last 10"].map(str)) == ["30.5 ± 0.7", "61.0 ± 1.4"]
    assert "Points of macro F1" in view.about_pairs()
    assert list(view.metrics()["accuracy"].map(str)) == ["90.0 ± 0.0", "50.0 ± 0.0"]
    assert [row["ece_last10_mean"] for row in table(tmp_path / "comparison.csv")] == ["20.0", "10.0"]
    curve = view.frame["curve"][0]
    assert curve[0][1] == pytest.approx(30.0)


def test_one_evaluation_is_not_a_mean_of_ten(tmp_path):
    plan = make_plan(["fedavg-matched", "feddure"], [0])
    view = View(plan, [made_up(tmp_path, method, 0, [0.5], [5, 5]) for method in plan.methods], {})
    assert "last" in view.methods().columns
    assert not any("10" in text for text in (*view.methods().columns, view.about_methods(), view.about_pairs()))


@pytest.mark.usefixtures("_with_report")
def test_one_seed_has_no_deviation_and_no_interval(images, tmp_path):
    compared(images, tmp_path / "out", methods=METHODS[:2])
    (fedavg, *_), (pair, *_) = table(tmp_path / "out" / "comparison.csv"), table(tmp_path / "out" / "paired.csv")
    assert fedavg["accuracy_last_sd"] == pair["interval_low"] == ""
    assert pair["verdict"] == "one seed cannot tell"
    assert "one seed cannot tell" in (tmp_path / "out" / "report.html").read_text()
    compared(images, tmp_path / "single", methods=("fedavg",))  # has nothing to be measured against
    assert table(tmp_path / "single" / "paired.csv") == []
    assert "More than chance?" not in (tmp_path / "single" / "report.html").read_text()


@pytest.mark.usefixtures("_with_report")
def test_the_report_of_several_seeds(images, tmp_path):
    found = compared(images, tmp_path / "out", methods=METHODS[:2], seeds=(0, 1))
    page = (tmp_path / "out" / "report.html").read_text()
    for text in ("More than chance?", "over 2 seeds", method_title("fedavg-matched"), "Run by run", "fedavg-seed1"):
        assert text in page, text
    assert found.pairs()["verdict"][0] in page
