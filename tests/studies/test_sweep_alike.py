"""What tells experiments apart: the table of sections keeps pace with the methods."""

import inspect

import pytest

from feddure import methods
from feddure.methods.fedavg import FedAvg
from feddure.studies.sweep_alike import READ_BY, what_counts
from tiny import experiment


def source(method):
    return "".join(inspect.getsource(part) for part in method.__mro__ if part.__module__.startswith("feddure.methods"))


@pytest.mark.parametrize("section", READ_BY)
def test_the_table_names_the_methods_that_read_a_section(section):
    built_in = {name: m for name, m in methods.METHODS.items() if m.__module__.startswith("feddure.methods.")}
    assert READ_BY[section] == {name for name, method in built_in.items() if f"experiment.{section}" in source(method)}


def test_seeds_and_methods_always_count():
    assert what_counts(experiment()) == what_counts(experiment(**{"engine.lanes": 3, "uda.weight": 2.0}))
    for change in ({"seed": 1}, {"method": "fedavg-sl"}, {"partition.gamma": 0.3}):
        assert what_counts(experiment()) != what_counts(experiment(**change))


def test_a_method_of_ones_own_may_read_anything(monkeypatch):
    class Mine(FedAvg):
        name = "fedavg"

    monkeypatch.setitem(methods.METHODS, "fedavg", Mine)
    assert what_counts(experiment()) != what_counts(experiment(**{"uda.weight": 2.0}))
