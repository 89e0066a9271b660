"""Sweeps: what a file expands to, what is refused, and what a folder may be used for."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

import synthetic
from feddure import experiments
from feddure.errors import ConfigError, DataError, RunError
from feddure.studies import sweep

BASE = {
    "preset": "demo",
    "set": {"rounds": 2},
    "grid": {"method": ["feddure", "fedavg"], "optimizer.learning_rate": ["1e-3", "5e-4"]},
    "seeds": [0, 1, 2],
}


def read(folder, tree=None, text=None, **changes):
    """A sweep from a file; a change to None removes the key."""
    tree = {key: value for key, value in ((tree or BASE) | changes).items() if value is not None}
    file = folder / "rates.yaml"
    file.write_text(text or yaml.safe_dump(tree, sort_keys=False).replace("'", ""))
    return sweep.read(file, allow_modules=True)


def test_the_documented_examples(tmp_path):
    """Of the manual and of the command's help."""
    from feddure.cli.sweep import sweep as command

    manual = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    for text in (manual, inspect.cleandoc(command.__doc__)):
        found = read(tmp_path, text=re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
        assert len(found.points) == 8
        assert len(found.cells()) == 24
        assert found.points[0].name == "few labels, FedDure, learning rate 0.001"
        assert found.points[0].cells[0].experiment.partition.labels_per_class == 1
        assert {cell.experiment.rounds for cell in found.cells()} == {20}


def test_every_combination_on_every_seed(tmp_path):
    found = read(tmp_path)
    combinations = [(p.values["method"], p.values["optimizer.learning_rate"]) for p in found.points]
    assert combinations == [("feddure", 1e-3), ("feddure", 5e-4), ("fedavg", 1e-3), ("fedavg", 5e-4)]
    cells = found.cells()
    assert [cell.experiment.seed for cell in cells] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({cell.hash for cell in cells}) == 12
    first = cells[0]
    assert (first.study, first.preset, first.options) == ("rates", "demo", "optimizer.learning_rate=0.001")
    changes = {"rounds": 2, "method": "feddure", "optimizer.learning_rate": 1e-3}
    assert first.experiment == experiments.load("demo", changes=changes)  # as `run` would make it


def test_cases_without_a_grid_and_with_nothing_to_change(tmp_path):
    cases = [{"name": "as it is"}, {"name": "FedProx", "proximal": 0.1, "local_steps": 3}]
    found = read(tmp_path, grid=None, cases=cases, seeds=[4])
    assert [point.name for point in found.points] == ["as it is", "FedProx"]
    assert found.points[1].cells[0].experiment.proximal == 0.1
    assert found.points[1].cells[0].options == "proximal=0.1 local_steps=3"


def test_a_case_may_say_what_it_is_there_for(tmp_path):
    cases = [{"name": "FedProx", "proximal": 0.1, "about": "Drift alone."}]
    (point,) = read(tmp_path, grid=None, cases=cases).points
    (bare,) = read(tmp_path, grid=None, cases=[{"name": "FedProx", "proximal": 0.1}]).points
    assert (point.about, bare.about) == ("Drift alone.", "")
    assert point.cells[0].hash == bare.cells[0].hash
    for wrong in ({"about": 3}, {"against": "nobody"}):
        with pytest.raises(ConfigError, match=r"case 'FedProx': a.* expected"):
            read(tmp_path, grid=None, cases=[{"name": "FedProx", "proximal": 0.1, **wrong}])


def test_null_empties_a_field(tmp_path):
    found = read(tmp_path, set={"server.ema": 0.5}, grid={"proximal": [None, 0.1]})
    assert [point.cells[0].experiment.proximal for point in found.points] == [None, 0.1]
    (tmp_path / "start.yaml").write_text("dataset: fashion-mini\nserver: {ema: 0.5}\n")
    found = read(tmp_path, preset=None, config="start.yaml", set=None, grid={"server.ema": [None, 0.9]})
    assert [point.cells[0].experiment.server.ema for point in found.points] == [None, 0.9]
    assert found.points[0].name == "server ema empty"


def test_free_options_are_numbers_where_people_mean_numbers(tmp_path):
    found = read(tmp_path, grid={"options.alpha": ["1e-3", "2E+1", "-5e-1"]})
    assert [point.cells[0].experiment.options for point in found.points] == [{"alpha": a} for a in (1e-3, 20.0, -0.5)]


def test_the_configuration_is_found_beside_the_file(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "start.yaml").write_text("dataset: fashion-mini\nmodel: cnn\n")
    found = read(tmp_path / "inner", preset=None, config="start.yaml")
    assert (found.start, found.points[0].cells[0].preset) == ("start.yaml", "start.yaml")
    assert found.points[0].cells[0].experiment.model == "cnn"


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"gird": {}}, ConfigError, "unknown key 'gird'; did you mean 'grid'"),
        ({"preset": None}, ConfigError, "expected preset or config"),
        ({"config": "a.yaml"}, ConfigError, "expected preset or config, one of them"),
        ({"preset": 3}, ConfigError, "preset: 3 was given, expected a name"),
        ({"preset": "dmeo"}, ConfigError, r"rates\.yaml: preset 'dmeo' does not exist"),
        ({"preset": None, "config": "absent.yaml"}, ConfigError, r"yaml: config: \S+absent.yaml: cannot be read"),
        ({"set": {"rounds": "many"}}, ConfigError, r"rates\.yaml: set: rounds: 'many' was given"),
        ({"set": {"dataset": "fashion-minny"}}, DataError, r"rates\.yaml: set: .* did you mean 'fashion-mini'"),
        ({"grid": None}, ConfigError, "expected grid or cases"),
        ({"grid": [1]}, ConfigError, r"grid: \[1\] was given, expected fields"),
        ({"grid": {"method": "feddure"}}, ConfigError, r"grid\.method: 'feddure' was given, expected a list"),
        ({"grid": {"method": []}}, ConfigError, r"grid\.method: the list is empty"),
        ({"grid": {"local_steps": [5, 6, 5]}}, ConfigError, r"grid\.local_steps: 5 was given twice"),
        ({"grid": {"optimizer.learnin_rate": [1]}}, ConfigError, r"did you mean 'optimizer\.learning_rate'"),
        ({"grid": {"optimizer.lr": [1]}}, ConfigError, r"grid \(.*\): .* did you mean 'optimizer\.learning_rate'"),
        ({"grid": {"optimizer": [1]}}, ConfigError, r"'optimizer' is a section; .* such as optimizer\.name"),
        ({"grid": {"clients_per_round": [2, "many"]}}, ConfigError, r"\(clients_per_round: many\): clients_per_round"),
        ({"grid": {"clients_per_round": [2, 11]}}, ConfigError, "clients_per_round is 11 but partition.clients is 10"),
        ({"grid": {"method": ["fedavg", "fedsure"]}}, ConfigError, "method 'fedsure': .* did you mean 'feddure'"),
        ({"grid": {"seed": [1]}}, ConfigError, "grid: seed was given; list all seeds under seeds"),
        ({"grid": {"rounds": [3, 4]}}, ConfigError, "set: rounds is in grid too"),
        ({"grid": {"engine.lanes": [1, 2]}}, ConfigError, "lanes 1' and 'engine lanes 2' are the same experiment"),
        ({"seeds": 3}, ConfigError, "seeds: 3 was given, expected a list of whole numbers"),
        ({"seeds": [0, True]}, ConfigError, "seeds: .* expected a list of whole numbers"),
        ({"seeds": [1, 1]}, ConfigError, "seeds: 1 was given twice"),
        ({"cases": {}}, ConfigError, "cases: .* expected a list of changes, each with a name"),
        ({"cases": [{"norm": "group"}]}, ConfigError, "cases: number 1 has no name"),
        ({"cases": [{"name": "a"}, {"name": "a"}]}, ConfigError, "the name 'a' was given twice"),
        ({"cases": [{"name": "a", "method": "fedavg"}]}, ConfigError, "case 'a': method is in grid too"),
        ({"cases": [{"name": "a", "norm": "layer"}]}, ConfigError, r"yaml: case 'a': norm: 'layer' was given"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_file_and_the_key(tmp_path, changes, error, match):
    with pytest.raises(error, match=match) as caught:
        read(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'rates.yaml'}: ")


def test_a_case_may_be_an_exception_from_what_is_set_for_all(tmp_path):
    found = read(tmp_path, cases=[{"name": "usual"}, {"name": "longer", "rounds": 3}])
    rounds = {point.case: point.cells[0].experiment.rounds for point in found.points}
    assert rounds["longer"] == 3 != rounds["usual"]


def test_mistakes_in_two_places_are_told_one_after_the_other(tmp_path):
    with pytest.raises(ConfigError, match=r"yaml: set: rounds: 'many' was given") as caught:
        read(tmp_path, set={"rounds": "many"}, grid={"optimizer.lr": [1]})
    assert "optimizer.lr" not in str(caught.value)


def test_fields_that_nothing_reads_tell_no_experiments_apart(tmp_path):
    thresholds = {"fixmatch.threshold": [0.9, 0.95]}
    assert len(read(tmp_path, set={"method": "fedprox-fixmatch"}, grid=thresholds).points) == 2
    with pytest.raises(ConfigError, match=r"0\.9' and .* 0\.95' are the same experiment.* in cases"):
        read(tmp_path, set={"method": "fedavg"}, grid=thresholds)


def test_a_field_that_is_right_only_together_with_the_grid(tmp_path):
    found = read(tmp_path, set={"clients_per_round": 12}, grid={"partition.clients": [12, 15]})
    assert [point.cells[0].experiment.partition.clients for point in found.points] == [12, 15]
    with pytest.raises(ConfigError, match=r"rates\.yaml: grid \(partition\.clients: 11\): clients_per_round is 12"):
        read(tmp_path, set={"clients_per_round": 12}, grid={"partition.clients": [12, 11]})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("preset: [", "not valid YAML"),
        ("- a", "expected a mapping"),
        ("preset: demo\ngrid: {rounds: [1], rounds: [2]}", "the key 'rounds' is there twice"),
    ],
)
def test_files_that_are_no_sweep(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, text=text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        sweep.read(tmp_path / "absent.yaml")


# --- folders -------------------------------------------------------------------------------------------


def test_a_folder_takes_its_own_sweep_again_and_a_larger_one(tmp_path):
    sweep.open_folder(read(tmp_path), tmp_path / "out")
    larger = read(tmp_path, seeds=[0, 1, 2, 3], grid=BASE["grid"] | {"method": ["fedavg", "feddure", "fedmatch"]})
    store = sweep.open_folder(larger, tmp_path / "out")
    assert (tmp_path / "out" / "sweep.yaml").read_text() == larger.text
    synthetic.filled(store.folder, larger.cells(), lambda cell: 50.0)
    sweep.check_folder(larger, tmp_path / "out")
    with pytest.raises(RunError, match=r"holds 12 cells that this sweep lacks.*may grow but not shrink"):
        sweep.check_folder(read(tmp_path), tmp_path / "out")


def test_own_images_are_not_swept_by_a_preset_that_only_runs_fit_to_them(tmp_path):
    own = {"preset": "recommended", "grid": {"fedtutor.view": ["strong", "weak"]}, "seeds": [0]}
    with pytest.raises(ConfigError, match=r"sites by `feddure run`.*config: runs/NAME/config\.yaml"):
        read(tmp_path, own, set={"dataset": "folder:scans"})
    stated = read(tmp_path, own, set={"dataset": "folder:scans", "partition.setting": "sites"})
    assert stated.cells()[0].experiment.partition.setting == "sites"
    assert read(tmp_path, own, set={"dataset": "cifar10"}).cells()


@pytest.mark.parametrize("name", ["notes.txt", "cells"])
def test_a_folder_with_something_else_is_refused(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).touch()
    with pytest.raises(RunError, match="not empty and holds no sweep"):
        sweep.open_folder(read(tmp_path), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    with pytest.raises(RunError, match="a file is there"):
        sweep.check_folder(read(tmp_path), tmp_path / "rates.yaml")


def test_a_sweeps_folder_is_refused_to_other_studies(tmp_path):
    sweep.expect_no_sweep(tmp_path / "out")
    sweep.open_folder(read(tmp_path), tmp_path / "out")
    with pytest.raises(RunError, match=r"out: the folder belongs to a sweep, see .*sweep\.yaml; choose another folder"):
        sweep.expect_no_sweep(tmp_path / "out")


def test_more_experiments_than_anybody_measures_are_refused_at_once(tmp_path):
    values = ", ".join(map(str, range(1, 101)))
    grid = "\n".join(f"  {key}: [{values}]" for key in ("rounds", "clients_per_round", "local_steps", "labelled_batch"))
    (tmp_path / "huge.yaml").write_text(f"preset: demo\ngrid:\n{grid}\n")
    with pytest.raises(ConfigError, match=r"100,000,000 experiments were asked for, expected at most 100,000"):
        sweep.read(tmp_path / "huge.yaml")
