"""Boards: which combinations of a sweep are ranked together, and what boards and rows are called."""

import pytest
import yaml

from feddure.studies import sweep
from feddure.studies.sweep_boards import divide

METHODS = {"method": ["feddure", "fedavg"]}


def boards(folder, grid, **tree):
    """The names of the rows by the titles of their boards."""
    return {board.title: [point.name for point in board.sweep.points] for board in divided(folder, grid, **tree)}


def divided(folder, grid, **tree):
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump({"preset": "demo", "grid": grid, **tree}, sort_keys=False))
    return divide(sweep.read(file))


@pytest.mark.parametrize(
    ("grid", "cases"),
    [
        (METHODS | {"optimizer.learning_rate": [0.1, 0.01]}, None),
        (METHODS, [{"name": "group", "norm": "group"}, {"name": "as it is"}]),
        ({"partition.gamma": [0.1, 0.5]}, None),
        ({"partition.setting": ["iid-iid", "dir-dir"], "dataset": ["cifar10", "fashion-mini"]}, None),
        (None, [{"name": "few labels", "partition.labels_per_class": 1}, {"name": "as it is"}]),
        (METHODS | {"partition.setting": ["iid-dir"]}, None),
        (METHODS | {"partition.seed": [1, 2]}, None),
    ],
    ids=["no problem", "cases", "gamma", "problems only", "cases only", "one problem", "the partition's seed"],
)
def test_a_single_board_is_the_sweep_itself(tmp_path, grid, cases):
    found = divided(tmp_path, grid, cases=cases)
    assert [board.title for board in found] == [""]
    assert found[0].sweep == sweep.read(tmp_path / "rates.yaml")


def test_a_board_for_each_value_of_the_grids_problem_fields(tmp_path):
    rows = ["FedDure", "FedAvg"]
    assert boards(tmp_path, METHODS | {"partition.setting": ["iid-iid", "dir-dir"]}) == {
        "IID-IID": rows,
        "DIR-DIR": rows,
    }
    assert boards(tmp_path, {"partition.gamma": [0.3, 1.0]} | METHODS) == {"gamma 0.3": rows, "gamma 1": rows}
    found = boards(
        tmp_path, {"dataset": ["cifar10", "fashion-mini"], "partition.labels_per_class": [None, 2]} | METHODS
    )
    assert list(found) == [
        "CIFAR-10, labels per class empty",
        "CIFAR-10, labels per class 2",
        "Fashion-Mini, labels per class empty",
        "Fashion-Mini, labels per class 2",
    ]


def test_a_setting_outside_the_paper_is_said_to_be_one(tmp_path):
    found = boards(tmp_path, METHODS | {"partition.setting": ["dir-dir", "fedmatch"]})
    assert list(found) == ["DIR-DIR", "setting fedmatch"]


def test_a_fixed_value_of_the_grid_stands_in_the_title_too(tmp_path):
    found = divided(tmp_path, METHODS | {"dataset": ["cifar10"], "partition.clients": [10, 20]})
    assert [board.title for board in found] == ["CIFAR-10, clients 10", "CIFAR-10, clients 20"]
    assert {board.sweep.axes for board in found} == {("method",)}


def test_cases_that_are_the_problem_stand_in_the_titles(tmp_path):
    cases = [{"name": "few labels", "partition.labels_per_class": 1}, {"name": "as it is"}]
    rows = ["FedDure", "FedAvg"]
    assert boards(tmp_path, METHODS, cases=cases) == {"few labels": rows, "as it is": rows}
    assert list(boards(tmp_path, METHODS | {"partition.setting": ["iid-dir", "dir-dir"]}, cases=cases)) == [
        "IID-DIR, few labels",
        "DIR-DIR, few labels",
        "IID-DIR, as it is",
        "DIR-DIR, as it is",
    ]


def test_cases_that_mix_method_and_problem_stay_in_the_rows(tmp_path):
    cases = [
        {"name": "FedDure, few", "method": "feddure", "partition.labels_per_class": 1},
        {"name": "FixMatch, few", "method": "fedavg-fixmatch", "partition.labels_per_class": 1},
        {"name": "FedDure, 2 %", "method": "feddure", "partition.labels_per_class": None,
         "partition.label_fraction": 0.02},
    ]  # fmt: skip
    assert boards(tmp_path, None, cases=cases) == {
        "labels per class 1": ["FedDure, few", "FixMatch, few"],
        "label fraction 0.02": ["FedDure, 2 %"],
    }


def test_gamma_is_no_problem_without_dirichlet(tmp_path):
    cases = [
        {"name": "FedDure", "method": "feddure", "partition.setting": "iid-iid", "partition.gamma": 0.1},
        {"name": "FedAvg", "method": "fedavg", "partition.setting": "iid-iid", "partition.gamma": 0.2},
        {"name": "FedAvg, unequal", "method": "fedavg", "partition.setting": "dir-dir", "partition.gamma": 0.2},
    ]
    assert boards(tmp_path, None, cases=cases) == {
        "IID-IID": ["FedDure", "FedAvg"],
        "DIR-DIR, gamma 0.2": ["FedAvg, unequal"],
    }


def test_rows_on_the_same_data_are_told_apart_even_by_a_field_of_the_partition(tmp_path):
    own = {"method": "feddure.methods.fedavg:FedAvg"}  # by import path it could read anything
    cases = [{"name": "equal", "partition.setting": "iid-iid"}, {"name": "unequal", "partition.setting": "dir-dir"}]
    found = boards(tmp_path, {"partition.gamma": [0.1, 0.2]}, set=own, cases=cases)
    assert found == {
        "equal": ["gamma 0.1", "gamma 0.2"],
        "gamma 0.1, unequal": ["unequal, gamma 0.1"],  # nothing would be left of the name
        "gamma 0.2, unequal": ["unequal, gamma 0.2"],
    }
