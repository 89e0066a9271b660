"""Lanes: results depend neither on how many there are, nor on the order of tasks, nor on what ran before."""

import pytest
import torch

import feddure
import tiny
from feddure.errors import FeddureWarning
from feddure.methods.base import Method
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Lanes, Stopped

METHODS = ("fedavg-matched", "fedprox-sl", "feddure")


def assert_same_results(found, expected):
    for one, other in zip(found, expected, strict=True):
        tiny.assert_equal(one.upload, other.upload)
        tiny.assert_equal(one.memory, other.memory)
        tiny.assert_equal(one.records, other.records)


def many_tasks(images, method="feddure", **changes):
    """A round of unequal clients."""
    experiment = tiny.experiment({"method": method, "clients_per_round": 4, "local_steps": "epoch"} | changes)
    return tiny.federation(experiment, images).tasks()


@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_lanes_and_any_order(images, method):
    tasks = many_tasks(images, method)
    assert len({task.steps for task in tasks}) > 1
    expected = Lanes(torch.device("cpu"), 1).run(tasks)
    for lanes in (2, 9):
        assert_same_results(Lanes(torch.device("cpu"), lanes).run(tasks), expected)
    order = [2, 0, 3, 1]
    shuffled = Lanes(torch.device("cpu"), 2).run([tasks[index] for index in order])
    assert_same_results(shuffled, [expected[index] for index in order])


def test_a_refilled_lane_equals_a_fresh_one(images):
    one, *others = many_tasks(images)
    used = Lanes(torch.device("cpu"), 1)
    used.run(others)
    assert_same_results(used.run([one]), Lanes(torch.device("cpu"), 1).run([one]))


def test_a_lane_that_was_stopped_in_the_middle_starts_clean(images):
    tasks = many_tasks(images)
    lanes = Lanes(torch.device("cpu"), 2)
    asked = iter([False, False, False, True])
    lanes.stop = lambda: next(asked)
    with pytest.raises(Stopped):
        lanes.run(tasks)
    lanes.stop = lambda: False
    assert_same_results(lanes.run(tasks), Lanes(torch.device("cpu"), 1).run(tasks))


def test_memory_of_a_client_comes_back_to_it(images):
    changes = {"feddure.f_reg_memory": "client", "clients_per_round": 4, "method": "feddure"}
    remembering = tiny.finished(tiny.experiment(changes), images)
    assert sorted(remembering.server.memories) == [0, 1, 2, 3]
    assert not torch.equal(remembering.server.memories[0]["w"], remembering.server.memories[1]["w"])
    forgetful = tiny.finished(tiny.experiment(changes | {"feddure.f_reg_memory": "none"}), images)
    assert forgetful.server.memories == {}
    assert not torch.equal(remembering.server.state["theta"], forgetful.server.state["theta"])


class Notebook(Method):
    """Keeps a page between rounds; the server sends one of the same name."""

    memory = ("page",)

    def __init__(self, experiment):
        super().__init__(experiment)
        self.found = []

    def allocate(self, client):
        client.state["page"] = client.theta.new_zeros(())

    def broadcast(self, server, client, round_number):
        sent = super().broadcast(server, client, round_number)
        return sent | {"page": server["theta"].new_tensor(7.0)}

    def start_round(self, client, received):
        self.found.append((client.state["page"].item(), received["page"].item()))
        client.state["page"].add_(1)

    def step(self, client, batch):
        pass

    def upload(self, client):
        sent = super().upload(client)
        client.state["page"].add_(10)
        return sent


@pytest.mark.filterwarnings("ignore:method .notebook.")  # it never descends
def test_what_a_client_remembers_and_when(images):
    """In `client.state` before `start_round`, in place of what was sent under its name, as `upload` left it."""
    feddure.register_method("notebook", Notebook)
    federation = tiny.finished(tiny.experiment(method="notebook", clients_per_round=4), images)
    assert federation.server.program.method.found == 4 * [(0.0, 7.0)] + 4 * [(11.0, 11.0)]
    assert {memory["page"].item() for memory in federation.server.memories.values()} == {22.0}


def test_the_timeline_tells_who_worked_when(images):
    tasks = many_tasks(images)
    lanes = Lanes(torch.device("cpu"), 2)
    lanes.timeline = []
    lanes.run(tasks)
    assert sorted(span.client for span in lanes.timeline) == sorted(task.client for task in tasks)
    assert {span.lane for span in lanes.timeline} == {0, 1}
    assert all(0 <= span.start <= span.end for span in lanes.timeline)


def test_engines_do_not_mix_up_data_sets():
    """A data set that nobody else holds must not lend its identity to the next one."""
    engine = Engine(tiny.experiment().engine)
    for seed in range(20):
        fresh = tiny.dataset(size=8 + 4 * seed)
        assert len(engine.images(fresh).labels) == 8 + 4 * seed
        del fresh


def test_out_of_memory_goes_on_with_fewer_lanes(images, monkeypatch):
    tasks = many_tasks(images, "fedavg-matched")
    expected = Lanes(torch.device("cpu"), 1).run(tasks)
    engine = Engine(tiny.experiment({"engine.lanes": 4}).engine)
    really = Lanes.run

    def crowded(self, tasks, meanwhile):
        if self.limit > 1:
            raise torch.cuda.OutOfMemoryError("too many lanes")
        return really(self, tasks, meanwhile)

    monkeypatch.setattr(Lanes, "run", crowded)
    with pytest.warns(FeddureWarning) as notes:
        found = engine.run(tasks)
    assert [str(note.message) for note in notes] == [
        "out of GPU memory: going on with 2 lanes",
        "out of GPU memory: going on with 1 lanes",
    ]
    assert_same_results(found, expected)


def test_out_of_memory_with_one_lane_is_the_users_to_solve(images, monkeypatch):
    def full(self, tasks, meanwhile):
        raise torch.cuda.OutOfMemoryError("even one is too many")

    monkeypatch.setattr(Lanes, "run", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Engine(tiny.experiment().engine).run([])
