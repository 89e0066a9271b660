"""Estimates: from cells of the same kind measured on the same hardware, and plainly from elsewhere else."""

import dataclasses

import pytest

import synthetic
from feddure import environment, experiments
from feddure.studies.grid.cost import REFERENCE_GPU, estimate, reference_seconds
from feddure.studies.grid.store import Cell

CPU = {"gpu": None, "cpu": "abacus", "cores": 2}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """This machine; a test may change it."""
    about = dict(CPU)
    monkeypatch.setattr(environment, "describe", lambda: about)
    return about


def demo(**changes):
    return Cell("mine", "demo", experiments.load("demo", changes=changes))


def paper(**changes):
    return Cell("mine", "aaai24", experiments.load("aaai24", changes=changes))


def measured(cell, times, about=CPU):
    """The cell, so many times slower than the reference."""
    found = synthetic.measured(cell, 50.0)
    return dataclasses.replace(found, seconds=times * reference_seconds(cell.experiment), environment=about)


def test_cells_of_the_same_network_and_data_set_tell_the_speed():
    cells = [demo(seed=1), demo(seed=2, rounds=60)]
    found = estimate(cells, [measured(demo(), 7)])
    assert found.seconds == pytest.approx(7 * sum(reference_seconds(cell.experiment) for cell in cells))
    assert "measured on this hardware" in found.text
    assert REFERENCE_GPU not in found.text


def test_a_method_has_a_speed_of_its_own():
    cells = [demo(seed=1), demo(seed=1, method="fedavg"), demo(method="fedavg-fixmatch")]
    found = estimate(cells, [measured(demo(), 7), measured(demo(method="fedavg"), 3)])
    one, two, three = (reference_seconds(cell.experiment) for cell in cells)
    assert found.seconds == pytest.approx(7 * one + 3 * two + 5 * three)


@pytest.mark.parametrize("other", [paper(), demo(model="resnet9"), demo(dataset="fashion-mnist")])
def test_nothing_is_said_of_another_network_or_data_set(other):
    found = estimate([other], [measured(demo(), 7)])
    assert found.seconds == pytest.approx(reference_seconds(other.experiment))
    assert REFERENCE_GPU in found.text
    assert "no GPU here" in found.text


def test_other_hardware_and_code_that_others_name_tell_nothing():
    elsewhere = measured(demo(), 7, {"gpu": "large", "cpu": "abacus", "cores": 2})
    theirs = dataclasses.replace(measured(demo(), 7), experiment={"method": "code_of_others:Method"})
    assert estimate([demo(seed=1)], [elsewhere, theirs]) == estimate([demo(seed=1)], [])


def test_small_cells_without_a_gpu_are_tried(monkeypatch):
    asked = []

    def trial(experiment):
        asked.append(experiment.method)
        return 30.0

    cells = [demo(seed=seed, method=method) for method in ("feddure", "fedtutor") for seed in (1, 2)]
    found = estimate(cells, [], trial)
    assert asked == ["feddure", "fedtutor"]  # a seed takes as long as another
    assert found.seconds == pytest.approx(120)
    assert "2:00 min by a few steps here" in found.text
    both = estimate([*cells, paper()], [], trial).text  # one is too large to try
    assert "for 4 by a few steps here" in both
    assert f"for 1 on one {REFERENCE_GPU}" in both
    assert REFERENCE_GPU in estimate(cells, [], lambda experiment: None).text


def test_the_reference_knows_itself(here):
    here["gpu"] = REFERENCE_GPU
    assert "28 s" in estimate([paper()], []).text
    here["gpu"] = "another"
    assert "nothing like it was measured" in estimate([paper()], []).text


def test_the_model_of_time_counts_what_costs():
    base = reference_seconds(demo(method="fedavg-fixmatch", rounds=2).experiment)
    assert reference_seconds(demo(method="feddure", rounds=2).experiment) > base
    assert reference_seconds(demo(method="fedavg-fixmatch", rounds=4).experiment) == pytest.approx(2 * base)
    assert reference_seconds(demo(method="fedavg-fixmatch", rounds=2, unlabelled_batch=60).experiment) > base
