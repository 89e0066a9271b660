"""Methods of somebody's own: what goes wrong is said in words, and what is right is left alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import feddure
import tiny
from feddure.data.batches import Needs
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods.fedavg import FedAvg
from feddure.methods.fixmatch import FedAvgFixMatch
from feddure.simulation import lanes


def federation_of(method, images, owned=None, **changes):
    feddure.register_method("mine", method)
    return tiny.federation(tiny.experiment(changes, method="mine"), images, owned=owned)


def finish(method, images, owned=None, **changes):
    """A federation under this method after its last round, and its records."""
    federation = federation_of(method, images, owned, **changes)
    records = []
    while federation.round < federation.experiment.rounds:
        tasks = federation.tasks()
        records.append(federation.finish_round(tasks, federation.engine.run(tasks)))
    return federation, records


def without_unlabelled(images):
    """A partition in which client 0 has labelled images alone."""
    owned = tiny.partition(tiny.experiment(), images)
    return replace(owned, unlabelled=[np.empty(0, dtype=np.int64), *owned.unlabelled[1:]])


# --- views ---------------------------------------------------------------------------------------------


class Forgotten(FedAvgFixMatch):
    """FixMatch without the line that asks for its views."""

    needs = Needs()


class HalfForgotten(FedAvgFixMatch):
    """FixMatch with half the line that asks for its views."""

    needs = Needs(weak=True)


@pytest.mark.parametrize(
    ("method", "used", "line"),
    [
        (Forgotten, "batch.weak", "needs = feddure.Needs(weak=True)"),
        (HalfForgotten, "batch.strong", "needs = feddure.Needs(weak=True, strong=True)"),
    ],
)
def test_a_view_that_was_not_asked_for_is_no_empty_view(images, method, used, line):
    with pytest.raises(ConfigError) as caught:
        finish(method, images)
    assert str(caught.value) == f"method 'mine' uses {used}, which is not among its needs: add {line} to its class"


def test_every_view_is_guarded(images):
    for view in ("plain", "weak", "strong"):

        class Looks(FedAvg):
            def step(self, client, batch, view=view):
                getattr(batch, view)
                return super().step(client, batch)

        with pytest.raises(ConfigError, match=rf"batch\.{view}.*Needs\({view}=True\)"):
            finish(Looks, images)


def test_a_client_without_unlabelled_images_has_views_of_none(images):
    seen = set()

    class Counts(FedAvgFixMatch):
        def step(self, client, batch):
            seen.add((client.key[2], len(batch.weak), len(batch.strong)))
            return super().step(client, batch)

    finish(Counts, images, without_unlabelled(images), clients_per_round=4)
    assert seen == {(0, 0, 0), (1, 6, 6), (2, 6, 6), (3, 6, 6)}


def test_a_batch_can_be_changed_before_it_is_handed_on(images):
    class Brighter(FedAvg):
        def step(self, client, batch):
            return super().step(client, replace(batch, labelled=batch.labelled + 1))

    bright, _ = finish(Brighter, images)
    plain, _ = finish(FedAvg, images)
    assert not torch.equal(bright.server.state["theta"], plain.server.state["theta"])


def test_a_batch_says_what_it_has(images):
    class Mistaken(FedAvg):
        def step(self, client, batch):
            return batch.images

    with pytest.raises(AttributeError, match="no 'images'; it has labelled, labels, plain, weak, strong, truth"):
        finish(Mistaken, images)


# --- what a class says ---------------------------------------------------------------------------------


class Stepless(feddure.Method):
    """Has no step."""


class WordForMemory(FedAvg):
    memory = "status"


class NumberInMemory(FedAvg):
    memory = (1,)


class WordForNeeds(FedAvg):
    needs = "weak"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Stepless, r"method 'mine' has no step; write `def step\(self, client, batch\)`"),
        (WordForMemory, r"memory is 'status', expected a tuple .*write memory = \(\"status\",\)"),
        (NumberInMemory, r"memory is \(1,\), expected a tuple of names"),
        (WordForNeeds, r"needs is 'weak', expected a feddure\.Needs"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_the_first_round(images, method, message):
    with pytest.raises(ConfigError, match=message):
        federation_of(method, images)


def test_a_step_may_be_put_in_when_the_method_is_made(images):
    class Late(feddure.Method):
        def __init__(self, experiment):
            super().__init__(experiment)
            self.step = FedAvg(experiment).step

    finish(Late, images)


def test_memory_of_what_nobody_made(images):
    class Absent(FedAvg):
        memory = ("foo",)

        def allocate(self, client):
            client.state["bar"] = torch.zeros(1)

    with pytest.raises(ConfigError, match=r"memory names 'foo', but allocate made 'bar'.*client\.state\[\"foo\"\]"):
        finish(Absent, images)


# --- what a step does ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": 0.3}, r"step returned 'loss' as a float, expected a tensor; return loss\.detach\(\)"),
        (0.3, "step returned a float, expected a dictionary of tensors"),
        (torch.zeros(()), "step returned a Tensor, expected a dictionary of tensors"),
    ],
)
def test_what_a_step_returns(images, returned, message):
    class Returns(FedAvg):
        def step(self, client, batch):
            super().step(client, batch)
            return returned

    with pytest.raises(ConfigError, match=f"method 'mine': {message}"):
        finish(Returns, images)


class Twice(FedAvg):
    """Descends on two losses of one pass."""

    again = False

    def step(self, client, batch):
        for first in (True, False):
            if first or self.again:
                (logits,) = client.model(batch.labelled)
            client.descend(feddure.mean(feddure.cross_entropy(logits, batch.labels)))


class TwiceWithTwoPasses(Twice):
    again = True


def test_one_pass_is_good_for_one_descent(images):
    with pytest.raises(
        ConfigError, match=r"method 'mine'.*call client\.model again before each further client\.descend"
    ):
        finish(Twice, images)
    finish(TwiceWithTwoPasses, images)


def test_a_mistake_is_not_taken_for_a_step_that_no_graph_can_hold(images, monkeypatch, recwarn):
    """Where steps are captured and networks compiled, a mistake of the method's is raised, not worked around."""

    class WarmUp:
        def __init__(self, lane, batch):
            lane.program.attempt(lambda: lane.program.step(lane.client, batch))

    monkeypatch.setattr(lanes, "_StepGraph", WarmUp)
    federation = federation_of(Forgotten, images)
    federation.server.program.captures = federation.server.program.network.compiled = True
    with pytest.raises(ConfigError, match="not among its needs"):
        federation.engine.run(federation.tasks())
    assert not [warning for warning in recwarn if warning.category is FeddureWarning]


# --- what the server keeps -----------------------------------------------------------------------------


def test_a_server_starts_with_theta(images):
    class Parts(FedAvg):
        def start(self, theta, statistics, classes, seed):
            return {"model": theta, "statistics": statistics}

    with pytest.raises(ConfigError, match="start returned 'model', 'statistics', expected also 'theta'"):
        federation_of(Parts, images)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "aggregate returned nothing, expected also 'theta'"),
        (None, "aggregate returned nothing, expected a dictionary of tensors"),
    ],
)
def test_a_server_goes_on_with_theta(images, returned, message):
    class Loses(FedAvg):
        def aggregate(self, *arguments):
            return returned

    with pytest.raises(ConfigError, match=message):
        finish(Loses, images)


# --- what fits -----------------------------------------------------------------------------------------


class MeanTeacher(feddure.Method):
    """An average of θ over steps teaches θ; clients keep it between their rounds."""

    needs = Needs(weak=True, strong=True)
    memory = ("teacher",)

    def allocate(self, client):
        client.state["teacher"] = torch.zeros_like(client.theta)

    def start_round(self, client, received):
        client.state["teacher"].copy_(received.get("teacher", received["theta"]))

    def step(self, client, batch):
        labelled, strong = client.model(batch.labelled, batch.strong)
        with torch.no_grad():
            teacher = client.network.probe(client.network.weights(client.state["teacher"]), batch.weak)
        pseudo = teacher.argmax(1)
        losses = feddure.cross_entropy(strong, pseudo)
        supervised = feddure.mean(feddure.cross_entropy(labelled, batch.labels))
        gradient = client.network.gradient(supervised + feddure.mean(losses), client.weights)
        client.descend_along(gradient)
        client.state["teacher"].lerp_(client.theta, 0.1)
        return feddure.record(supervised, losses, teacher.softmax(1).max(1).values, pseudo)


def test_a_mean_teacher_in_a_few_lines(images):
    federation, records = finish(MeanTeacher, images, clients_per_round=4)
    assert sorted(federation.server.memories) == [0, 1, 2, 3]
    assert not torch.equal(federation.server.memories[0]["teacher"], federation.server.state["theta"])
    assert records[-1]["diagnostics"]["weight_mean"] > 0.25
    assert 0 <= records[-1]["diagnostics"]["pseudo_accuracy"] <= 1
    assert {"loss", "loss_unlabelled"} <= records[-1]["train"].keys()
