"""`feddure reproduce` end to end on the embedded images."""

from pathlib import Path

import pytest

import synthetic
from commands import invoke, table
from feddure.errors import ConfigError, DataError, RunError
from feddure.studies.grid.runner import _Worker
from feddure.studies.grid.store import Store
from feddure.studies.paper.plan import Request, cells

SMALL = ["--preset", "demo", "--datasets", "fashion-mini", "--settings", "dir-dir", "--rounds", "1", "--seeds", "0"]
QUICK = ["--set", "local_steps=1", "--set", "evaluate_every=1"]


def reproduce(*words, code=0):
    return invoke("reproduce", *words, exit_code=code).output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One round of two methods."""
    out = tmp_path_factory.mktemp("reproduction") / "here"
    reproduce("table1", *SMALL, *QUICK, "--methods", "fedavg-matched,feddure", "--out", out)
    return out


def rows(folder):
    return table(folder / "results.csv")


def test_a_study_is_measured_printed_and_written(folder):
    assert [row["method"] for row in rows(folder)] == ["fedavg-matched", "feddure"]
    assert {row["rounds"] for row in rows(folder)} == {"1"}
    written = {path.suffix for path in folder.glob("table1-demo*")}
    assert written == {".csv", ".md", ".png", ".html"}
    assert (folder / "index.html").exists()


def test_the_same_command_again_measures_nothing(folder, monkeypatch):
    monkeypatch.setattr(_Worker, "take", lambda *_: pytest.fail("a finished cell was measured again"))
    told = reproduce("table1", *SMALL, *QUICK, "--methods", "fedavg-matched,feddure", "--out", folder)
    assert "FedDure" in told


@pytest.mark.parametrize(("name", "reason"), [("Raises", "OSError: a mistake"), ("Mistaken", "uses batch.strong")])
def test_what_is_measured_is_written_and_what_failed_is_listed(folder, tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    methods = f"fedavg-matched,failing:{name}"
    words = ("table1", *SMALL, *QUICK, "--methods", methods, "--merge", folder, "--out", "out")
    told = reproduce(*words, code=1)
    assert reason in told[: told.index("wrote out/table1-demo")]  # at once
    assert f"failing:{name} seed 0" in told[told.index("error: ") :]
    (study,) = tmp_path.glob("out/table1-demo*.md")
    assert "1 failed" in study.read_text()
    assert reason in study.read_text()
    assert {path.suffix for path in tmp_path.glob("out/table1-demo*")} == {".csv", ".md", ".png", ".html"}
    assert "fedavg-matched" in {row["method"] for row in rows(tmp_path / "out")}


def test_a_mistake_that_all_cells_share_is_told_once_and_leaves_nothing(tmp_path):
    words = ("--methods", "fedavg,fedavg-matched", "--set", "partition.labels_per_class=4000")
    with pytest.raises(
        ConfigError, match=r"^partition.labels_per_class=4000: .*lower partition.labels_per_class to at most"
    ):
        reproduce("table1", *SMALL, *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--jobs", "2"], ["--ray", "local"], []])
def test_a_dry_run_writes_nothing_and_says_what_its_estimate_does_not_count_in(words, tmp_path):
    told = reproduce("table2", "--dry-run", *words, "--out", tmp_path / "out")
    assert "table2" in told
    assert ("not counted in" in told) == bool(words)
    assert not (tmp_path / "out").exists()


def test_another_folders_cells_are_taken_over(folder, tmp_path):
    words = ("table1", *SMALL, *QUICK, "--methods", "feddure", "--merge", folder, "--out", tmp_path / "new")
    assert "0 of " in reproduce(*words, "--dry-run")
    assert not (tmp_path / "new").exists()
    reproduce(*words)
    assert len(list(Store(tmp_path / "new").measurements())) == 2
    assert {row["method"] for row in rows(tmp_path / "new")} == {"feddure"}


def test_claims_are_judged_by_what_is_there(tmp_path):
    wanted = cells("table1", Request(datasets=("cifar10",)))
    synthetic.filled(tmp_path, wanted, lambda cell: 70.0 if cell.experiment.method == "feddure" else 50.0)
    told = reproduce("claims", "--out", tmp_path)
    assert "holds" in told
    assert "are not measured" in told
    assert (tmp_path / "claims.html").exists()


def test_all_files_are_made_anew_from_the_cells_alone(tmp_path):
    with pytest.raises(RunError, match=r"nothing of the paper is measured there; start with: feddure reproduce table1"):
        reproduce("tables", "--out", tmp_path)
    wanted = cells("table1", Request("aaai24-fine", datasets=("cifar10",), methods=("feddure",), seeds=(0,)))
    synthetic.filled(tmp_path, wanted, lambda cell: 70.0)
    told = reproduce("tables", "--out", tmp_path)
    for name in ("table1-aaai24-fine", "figure1-aaai24-fine", "claims"):
        assert f"{name}.html" in told
        assert (tmp_path / f"{name}.csv").exists()
    assert {row["study"] for row in rows(tmp_path)} == {"table1", "figure1"}
    assert not list(tmp_path.glob("*-aaai24.*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "feddur"], "--methods feddur: expected one of .*did you mean 'feddure'"),
        (["--methods", "xyz"], "--methods xyz: expected one of [^;]*$"),
        (["--settings", "dirdir"], "--settings dirdir: expected one of iid-iid.*did you mean 'dir-dir'"),
        (["--methods", "fedavg,fedavg"], "--methods: fedavg was given twice; name each once"),
        (["--seeds", "0,1,0"], "--seeds: 0 was given twice"),
        (["--seeds", "a"], "--seeds a: expected whole numbers"),
        (["--preset", "nothing"], "preset 'nothing' does not exist"),
        (["--set", "rounds=3"], "--set rounds: the study table1 sets this field itself"),
        (["--set", "optimiser.learning_rate=1"], "unknown field 'optimiser"),
    ],
)
def test_mistakes_are_explained_before_anything_is_done(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        reproduce("table1", *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("what", "words", "option"),
    [
        ("claims", ["--rounds", "3"], "--rounds"),
        ("tables", ["--preset", "aaai24"], "--preset"),
        ("theory", ["--seeds", "0"], "--seeds"),
    ],
)
def test_options_that_would_change_nothing_are_refused(what, words, option, tmp_path):
    with pytest.raises(ConfigError, match=f"{option} does not apply: {what} .*expected only --"):
        reproduce(what, *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["claims", "tables", "theory"])
def test_a_dry_run_of_what_trains_nothing_says_so(what, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDURE_DATA", str(tmp_path))  # for all commands: no option that would change nothing
    told = reproduce(what, "--dry-run", "--out", tmp_path / "out")
    assert told.startswith(what)
    assert "to measure" not in told
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file"):
        reproduce("claims", "--out", tmp_path / "file" / "out")


def test_measured_results_in_this_repository_can_be_gone_on_with():
    """The published cells are the ones that the studies ask for: a study resumes where its measurement stopped."""
    store = Store(Path(__file__).parents[2] / "results" / "reproduction")
    wanted = cells("table1", Request(datasets=("cifar10",)))
    assert all(store.has(cell) for cell in wanted)
    assert {store.find(cell).rounds for cell in wanted} == {200}


def test_absent_data_leave_no_folder(tmp_path):
    with pytest.raises(DataError, match=r"cifar10 is not in .* `feddure data fetch cifar10`"):
        reproduce("table1", "--datasets", "cifar10", "--out", tmp_path / "out", "--data-dir", tmp_path)
    assert not (tmp_path / "out").exists()
