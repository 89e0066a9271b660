"""Lanes with the clients as an axis of every kernel give what a lane each gives."""

import importlib
from pathlib import Path

import pytest
import torch

import tiny
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Lanes


def one_hot(labels, classes):
    """As PyTorch's on a GPU, which does not look at the labels first: what is traced must not."""
    return (labels.unsqueeze(-1) == torch.arange(classes)).long()


@pytest.fixture(scope="module")
def together():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        patch.setattr(torch.nn.functional, "one_hot", one_hot)
        yield importlib.import_module("together_lanes")


@pytest.mark.parametrize("method", ["fedavg-matched", "fedprox-uda", "fedtutor", "feddure", "fedmatch", "proxyfl"])
def test_whole_rounds_of_unequal_clients(together, images, method):
    wanted = tiny.experiment({"method": method, "local_steps": "epoch", "clients_per_round": 3, "rounds": 2})
    expected, found = tiny.federation(wanted, images), tiny.federation(wanted, images)
    found.engine.lanes = together.TogetherLanes(torch.device("cpu"), 3, compiles=False)
    for _ in range(2):
        records = [tiny.play_round(made) for made in (expected, found)]
        assert len(set(records[0]["steps"])) > 1
        assert records[1]["train"] == pytest.approx(records[0]["train"], rel=1e-5)
    tiny.assert_near(found.server.state, expected.server.state)


def test_fewer_places_than_clients(together, images):
    wanted = tiny.experiment({"method": "fedavg-matched", "local_steps": "epoch", "clients_per_round": 4})
    tasks = tiny.federation(wanted, images, Engine(wanted.engine)).tasks()
    expected = Lanes(torch.device("cpu"), 1).run(tasks)
    for one, other in zip(together.TogetherLanes(torch.device("cpu"), 3, False).run(tasks), expected, strict=True):
        tiny.assert_near(one.upload, other.upload)
