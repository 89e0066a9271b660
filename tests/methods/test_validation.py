"""Methods of somebody's own: what goes wrong is said in words, and what is right is left alone."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import feddure
import tiny
from feddure import methods
from feddure.data.batches import Needs
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods.fedavg import FedAvg
from feddure.methods.fixmatch import FedAvgFixMatch
from feddure.simulation import lanes
from feddure.simulation.engine import Engine


def federation_of(method, images, owned=None, **changes):
    feddure.register_method("mine", method)
    return tiny.federation(tiny.experiment(changes, method="mine"), images, owned=owned)


def finish(method, images, owned=None, **changes):
    """A federation under this method after its last round, and its records."""
    federation = federation_of(method, images, owned, **changes)
    return federation, [tiny.play_round(federation) for _ in range(federation.experiment.rounds)]


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


class Plain(FedAvg):
    """Looks at what it does not need."""

    def step(self, client, batch):
        return batch.plain


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Forgotten, r"'mine' uses batch\.weak.* needs = feddure\.Needs\(weak=True\)"),
        (HalfForgotten, r"batch\.strong.*Needs\(weak=True, strong=True\)"),
        (Plain, r"batch\.plain.*Needs\(plain=True\)"),
    ],
)
def test_a_view_that_was_not_asked_for_is_no_empty_view(images, method, message):
    with pytest.raises(ConfigError, match=message):
        finish(method, images)


def test_a_client_without_unlabelled_images_has_views_of_none(images):
    seen = set()

    class Counts(FedAvgFixMatch):
        def step(self, client, batch):
            seen.add((client.key[2], len(batch.weak), len(batch.strong)))
            return super().step(client, batch)

    finish(Counts, images, without_unlabelled(images), clients_per_round=4)
    assert seen == {(0, 0, 0), (1, 6, 6), (2, 6, 6), (3, 6, 6)}


# --- what a class says ---------------------------------------------------------------------------------


def of(base=FedAvg, **attributes):
    """A method with these attributes; a function is a hook."""
    return type("Mine", (base,), attributes)


def step_that_returns(value):
    def step(self, client, batch):
        FedAvg.step(self, client, batch)
        return value

    return step


def allocate_bar(self, client):
    client.state["bar"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (of(feddure.Method), r"method 'mine' has no step; write `def step\(self, client, batch\)`"),
        (of(step=lambda self, client: {}), r"step takes \(client\), expected \(client, batch\)"),
        (of(upload=lambda self: {}), r"upload takes \(\), expected \(client\)"),
        (of(memory="status"), r"memory is 'status', expected a tuple .*write memory = \(\"status\",\)"),
        (of(memory=(1,)), r"memory is \(1,\), expected a tuple of names"),
        (of(needs="weak"), r"needs is 'weak', expected a feddure\.Needs"),
        (
            of(start=lambda self, theta, statistics, classes, seed: {"model": theta, "statistics": statistics}),
            "start returned 'model', 'statistics', expected also 'theta'",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_the_first_round(images, method, message):
    with pytest.raises(ConfigError, match=message):
        federation_of(method, images)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (of(memory=("foo",), allocate=allocate_bar), r"memory names 'foo', but allocate made 'bar'.*state\[\"foo\"\]"),
        (of(step=step_that_returns({"loss": 0.3})), r"step returned 'loss' as a float, .* return loss\.detach\(\)"),
        (of(step=step_that_returns(0.3)), "step returned a float, expected a dictionary of tensors"),
        (of(step=step_that_returns(torch.zeros(()))), "step returned a Tensor, expected a dictionary of tensors"),
        (of(aggregate=lambda *_: {}), "aggregate returned nothing, expected also 'theta'"),
        (of(aggregate=lambda *_: None), "aggregate returned nothing, expected a dictionary of tensors"),
    ],
)
def test_a_hook_that_does_what_it_must_not_is_named(images, method, message):
    with pytest.raises(ConfigError, match=message):
        finish(method, images)


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


# --- what would go on in silence -----------------------------------------------------------------------


class Idle(FedAvg):
    """Forgets to descend."""

    def step(self, client, batch):
        client.model(batch.labelled)
        return {}


def test_a_method_that_moves_nothing_is_told_so(images):
    federation = federation_of(Idle, images)
    with pytest.warns(FeddureWarning, match="client.descend"):
        tiny.play_round(federation)
    tiny.play_round(federation)  # once is enough


class Dropping(torch.nn.Sequential):
    def __init__(self, channels, classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(144 * channels, classes))


def test_a_network_that_draws_random_numbers_is_told_of(images):
    feddure.register_network("dropping", Dropping)
    with pytest.warns(FeddureWarning, match="cannot be repeated"):
        tiny.federation(tiny.experiment(model="dropping"), images)


def test_a_round_that_cannot_fit_into_memory_is_refused_before_it(images, monkeypatch):
    changes = {"labelled_batch": 2**16, "local_steps": 100, "method": "fedavg-matched"}
    monkeypatch.setattr(Engine, "free_memory", lambda engine: 2**33)
    with pytest.raises(ConfigError, match="labelled_batch"):
        tiny.federation(tiny.experiment(changes), images)


def test_a_hook_that_is_misspelt_is_noted():
    class Rare(feddure.Method):
        def start_rond(self, client, received):
            pass

        def step(self, client, batch):
            pass

    feddure.register_method("rare", Rare)
    with pytest.warns(FeddureWarning, match="nothing calls start_rond; did you mean start_round"):
        methods.make(tiny.experiment(method="rare"))


class Keeping(FedAvg):
    """Keeps something on itself, in place or not, as `options.how` says; or draws random numbers."""

    def __init__(self, experiment):
        super().__init__(experiment)
        self.calls, self.losses, self.total = 0, [], torch.zeros(1)

    def step(self, client, batch):
        found = super().step(client, batch)
        how = client.experiment.options["how"]
        if how == "calls":
            self.calls += 1
        elif how == "losses":
            self.losses.append(found["loss"])
        elif how == "total":
            self.total += found["loss"]
        elif how == "torch":
            torch.rand(1)
        elif how == "numpy":
            np.random.rand()
        return found


def told(images, how, **changes):
    feddure.register_method("keeping", Keeping)
    changes = {"method": "keeping", "options.how": how, "engine.lanes": 1} | changes
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", FeddureWarning)
        tiny.federation(tiny.experiment(changes), images).train_round()
    return [str(one.message) for one in found if issubclass(one.category, FeddureWarning)]


@pytest.mark.parametrize("how", ["calls", "losses", "total"])
def test_a_step_that_keeps_something_on_its_method_is_noted_once(images, how):
    (message,) = told(images, how)
    assert f"its step changes self.{how}" in message
    assert "client.state" in message


@pytest.mark.parametrize("how", ["torch", "numpy"])
def test_a_step_that_draws_random_numbers_is_noted_once(images, how):
    (message,) = told(images, how)
    assert "its step draws random numbers" in message
    assert "feddure.rng" in message


def test_other_steps_are_not_noted(images):
    assert told(images, "nothing") == []


def test_dropout_is_the_networks_fault_and_not_the_methods(images):
    feddure.register_network("dropping", Dropping)
    (message,) = told(images, "nothing", model="dropping")
    assert "model 'dropping' draws random numbers" in message
