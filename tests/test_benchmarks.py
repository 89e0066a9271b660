"""Benchmarks that say something of results: they compare what they say they compare."""

import importlib
from pathlib import Path

import pytest

import federated
from feddure import recommended


@pytest.fixture
def kills(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("kills")


def test_a_killed_federation_is_compared_with_the_simulator_on_the_same_experiment(kills, tmp_path):
    federated.write_images(tmp_path)
    federated.federate(tmp_path, preset=recommended.NAME, method="")
    assert kills.from_simulator(tmp_path, tmp_path / "run") < 1e-8
