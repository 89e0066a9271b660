"""Lanes: results depend neither on how many there are, nor on the order of tasks, nor on what ran before."""

import threading
from unittest import mock

import psutil
import pytest
import torch

import feddure
import tiny
from feddure import environment
from feddure.errors import FeddureWarning
from feddure.methods.base import Method
from feddure.simulation import lanes as simulation_lanes
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Lane, Lanes, Stopped

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


@pytest.mark.parametrize("count", [1, 2])
def test_a_lane_that_was_stopped_in_the_middle_starts_clean(images, count, monkeypatch):
    tasks = many_tasks(images)
    lanes, step = Lanes(torch.device("cpu"), count), Lane.step
    begun, asked = threading.Event(), threading.Event()

    def slow(self, index):
        step(self, index)
        if index == 1:
            begun.set()
            asked.wait(30 if count == 2 else 0)

    def stop():
        if begun.is_set():
            asked.set()
        return asked.is_set()

    monkeypatch.setattr(Lane, "step", slow)
    lanes.stop = stop
    with pytest.raises(Stopped):
        lanes.run(tasks)
    monkeypatch.undo()
    lanes.stop = lambda: False
    assert_same_results(lanes.run(tasks), Lanes(torch.device("cpu"), 1).run(tasks))


class Counting(Method):
    """Says how many threads its step has; a client may fail."""

    failing = None

    def step(self, client, batch):
        if client.key[2] == self.failing:
            raise ValueError(f"client {self.failing} fails")
        client.descend(client.model(batch.labelled)[0].sum())
        return {"threads": client.theta.new_tensor(torch.get_num_threads())}


def test_lanes_on_a_cpu_share_its_cores(images):
    feddure.register_method("counting", Counting)
    tasks = many_tasks(images, "counting")
    cores = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for wanted, threads in ((1, 4), (2, 2), ("auto", 1)):
            results = Lanes(torch.device("cpu"), wanted).run(tasks)
            assert {value for result in results for value in result.records["threads"].tolist()} == {threads}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(cores)


class Forward(Counting):
    """Asks for a derivative in forward mode, which is for one thread at a time."""

    def step(self, client, batch):
        _, slope = torch.func.jvp(torch.sin, (client.class_counts,), (client.class_counts.cos(),))
        return {**super().step(client, batch), "slope": slope}


def test_a_step_in_forward_mode_has_one_lane(images):
    feddure.register_method("forward", Forward)
    tasks = many_tasks(images, "forward")
    expected = Lanes(torch.device("cpu"), 1).run(tasks)
    assert all((result.records["slope"] != 0).any() for result in expected)
    assert tasks[0].program.threads
    for _ in range(2):
        assert_same_results(Lanes(torch.device("cpu"), 3).run(tasks), expected)
    assert not tasks[0].program.threads


def test_an_error_on_one_lane_ends_all(images, monkeypatch):
    feddure.register_method("counting", Counting)
    tasks = many_tasks(images, "counting")
    monkeypatch.setattr(Counting, "failing", tasks[2].client)
    with pytest.raises(ValueError, match=f"client {tasks[2].client} fails"):
        Lanes(torch.device("cpu"), 3).run(tasks)


def lanes_used(tasks):
    used, begin = set(), Lane.begin

    def noted(lane, task):
        used.add(lane.number)
        begin(lane, task)

    with mock.patch.object(Lane, "begin", noted):
        Lanes(torch.device("cpu"), 3).run(tasks)
    return len(used)


@pytest.mark.parametrize("whose", ["machine", "container"])
def test_no_more_lanes_than_fit_into_memory(images, monkeypatch, tmp_path, whose):
    tasks = many_tasks(images, "fedavg-matched")
    assert lanes_used(tasks) == 3
    total = 5 * max(map(simulation_lanes._bytes, tasks))
    if whose == "machine":
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": total}))
    else:
        limits = tmp_path / "max", tmp_path / "bytes", tmp_path / "missing"
        limits[0].write_text("max\n")
        limits[1].write_text(f"{total}\n")
        monkeypatch.setattr(environment, "_MEMORY_LIMITS", limits)
    assert lanes_used(tasks) == 2


def test_networks_of_unknown_layers_have_one_lane(images):
    """They may keep something of a pass to themselves, and PyTorch's forward mode is for one thread at a time."""
    feddure.register_network("smooth", lambda channels, classes: Smooth(channels, classes))
    tasks = many_tasks(images, model="smooth")
    assert lanes_used(tasks) == 1
    assert_same_results(Lanes(torch.device("cpu"), 3).run(tasks), Lanes(torch.device("cpu"), 1).run(tasks))


class Smooth(torch.nn.Sequential):
    """With a layer that has no rule of its own."""

    def __init__(self, channels, classes):
        flat = torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
        super().__init__(torch.nn.Conv2d(channels, 4, 3), torch.nn.GELU(), *flat, torch.nn.Linear(16, classes))


def test_a_copy_for_a_thread_shares_the_parameters(images):
    network = many_tasks(images)[0].program.network
    other = network.for_thread()
    assert other._training is not network._training
    pairs = zip(other._training.parameters(), network._training.parameters(), strict=True)
    assert all(one is another for one, another in pairs)


def test_one_thread_runs_what_was_compiled(images, monkeypatch):
    tasks = many_tasks(images, "fedavg-matched")
    network = tasks[0].program.network
    monkeypatch.setattr(network, "fuse", lambda function: function)  # compiling takes seconds
    network.compiled = True
    assert lanes_used(tasks) == 1


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
