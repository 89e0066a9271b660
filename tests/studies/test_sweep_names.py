"""Words for the fields and values of a sweep."""

import pytest

from feddure.studies.sweep_names import combination, part, shown


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
    assert (part(key, value), shown(key, value)) == (alone, in_a_column)


def test_a_combination_is_its_case_and_its_values():
    values = {"method": "fedavg-matched", "partition.setting": "dir-dir", "rounds": 20}
    assert combination("few labels", values) == "few labels, FedAvg-matched, DIR-DIR, rounds 20"
    assert combination("", {"rounds": 20}) == "rounds 20"
