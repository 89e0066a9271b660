"""What experiments, their fields and their values are called."""

import pytest

from feddure.experiments import load
from feddure.reports import names
from feddure.reports.names import labels, listed


def experiment(**changes):
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return load("demo", changes={"method": "fedavg"} | given)


def test_labels_say_what_tells_runs_apart_and_no_more():
    assert labels([experiment(method="feddure")]) == ["FedDure"]
    assert labels([experiment(seed=0), experiment(seed=1)]) == ["FedAvg*, seed 0", "FedAvg*, seed 1"]
    methods = [experiment(method="feddure"), experiment(method="fedavg-fixmatch")]
    assert labels(methods) == ["FedDure", "FedAvg-FixMatch"]
    grid = [experiment(method=m, seed=s, rounds=40 + s) for m in ("feddure", "fedavg") for s in (0, 1)]
    assert labels(grid) == ["FedDure, seed 0", "FedDure, seed 1", "FedAvg*, seed 0", "FedAvg*, seed 1"]
    averaged = labels([experiment(), experiment(server__ema=0.9)])
    assert averaged == ["FedAvg*, server ema empty", "FedAvg*, server ema 0.9"]


def test_labels_are_never_equal():
    same = [experiment(), experiment()]
    assert labels(same, ["morning", "evening"]) == ["FedAvg* (morning)", "FedAvg* (evening)"]
    assert labels(same, ["x", "x"]) == ["FedAvg* (run 1)", "FedAvg* (run 2)"]
    assert labels(same) == ["FedAvg* (run 1)", "FedAvg* (run 2)"]


@pytest.mark.parametrize(
    ("key", "value", "alone", "in_a_column"),
    [
        ("method", "feddure", "FedDure", "FedDure"),
        ("partition.setting", "iid-dir", "IID-DIR", "IID-DIR"),
        ("partition.setting", "sites", "setting sites", "sites"),
        ("optimizer.learning_rate", 5e-4, "learning rate 0.0005", "0.0005"),
        ("feddure.d_clip", None, "feddure d clip empty", "empty"),
    ],
)
def test_values_by_themselves_and_in_a_column(key, value, alone, in_a_column):
    assert (names.part(key, value), names.shown(key, value)) == (alone, in_a_column)
    assert names.combination("few labels", {key: value}) == f"few labels, {alone}"


def test_lists_end_where_they_get_long():
    expected = ["", "a", "a and b", "a, b and c", "a, b, c and 1 more"]
    assert [listed(list("abcd"[:size]), 3) for size in range(5)] == expected
