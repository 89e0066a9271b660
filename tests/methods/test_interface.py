"""What a method of one's own can get, each shown by a short example."""

import numpy as np
import pytest
import torch
from pydantic import Field

import feddure
import tiny
from feddure import methods

IMAGES = tiny.dataset(size=80, tests=8, side=8)


def after_a_round(monkeypatch, method, **changes):
    """A federation after its first round with this method."""
    monkeypatch.setitem(methods.METHODS, "mine", method)
    federation = tiny.federation(tiny.experiment({"method": "mine", "local_steps": 3, **changes}), IMAGES)
    tiny.play_round(federation)
    return federation


class CountsVisits(feddure.Method):
    """Remembers for each image how often it was seen: `batch.index` says which image a row is."""

    needs = feddure.Needs(weak=True)
    memory = ("visits",)

    def allocate(self, client):
        client.state["visits"] = client.theta.new_zeros(len(IMAGES.labels))

    def step(self, client, batch):
        labelled, _ = client.model(batch.labelled, batch.weak)
        client.descend(feddure.mean(feddure.cross_entropy(labelled, batch.labels)))
        client.state["visits"].index_add_(0, batch.index, torch.ones_like(batch.index, dtype=client.theta.dtype))


def test_a_row_of_a_batch_is_a_known_image(monkeypatch):
    federation = after_a_round(monkeypatch, CountsVisits)
    assert federation.server.memories
    for client, memory in federation.server.memories.items():
        assert memory["visits"].sum() == 3 * federation.server.unlabelled_batch
        seen = memory["visits"].nonzero().flatten().tolist()
        assert set(seen) <= set(federation.partition.unlabelled[client].tolist())


class Balanced(feddure.Method):
    """Cross entropy with rare classes counting more: `client.class_counts` are those of its labelled images."""

    class Options(feddure.Options):
        power: float = Field(1.0, ge=0, description="How much more.")

    def step(self, client, batch):
        (logits,) = client.model(batch.labelled)
        weights = (client.class_counts + 1).pow(-self.options.power)
        client.descend(feddure.mean(weights[batch.labels] * feddure.cross_entropy(logits, batch.labels)))
        return {"counts": client.class_counts.clone()}


def test_a_client_knows_its_class_counts(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "mine", Balanced)
    federation = tiny.federation(tiny.experiment({"method": "mine", "options.power": 0.5}), IMAGES)
    tasks = federation.tasks()
    for task, result in zip(tasks, federation.engine.run(tasks), strict=True):
        owned = IMAGES.labels[federation.partition.labelled[task.client]]
        assert result.records["counts"][0].tolist() == np.bincount(owned, minlength=len(IMAGES.classes)).tolist()


class Distilled(feddure.Method):
    """Stays near the received model's predictions, made once a round: `before_steps`, `client.frozen`."""

    needs = feddure.Needs(weak=True)

    def before_steps(self, client, batches):
        return {"teacher": client.frozen("global", batches.weak).softmax(-1)}

    def step(self, client, batch):
        labelled, weak = client.model(batch.labelled, batch.weak)
        distance = -(batch.made["teacher"] * weak.log_softmax(1)).sum(1)
        client.descend(feddure.mean(feddure.cross_entropy(labelled, batch.labels)) + feddure.mean(distance))
        return {"teacher": batch.made["teacher"]}


def test_what_is_frozen_is_computed_once_from_the_received_model(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "mine", Distilled)
    federation = tiny.federation(tiny.experiment({"method": "mine", "local_steps": 3}), IMAGES)
    network, tasks = federation.server.program.network, federation.tasks()
    for task, result in zip(tasks, federation.engine.run(tasks), strict=True):
        for step, found in enumerate(result.records["teacher"]):
            logits = network.evaluate(task.received["theta"], task.received["statistics"], task.batches.weak[step])
            torch.testing.assert_close(found, logits.softmax(1))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_second_optimiser_follows_the_schedule(monkeypatch, optimizer):
    rates = []

    class Two(Balanced):
        def allocate(self, client):
            client.state["other"] = torch.zeros_like(client.theta)
            client.optimizers["other"] = client.new_optimizer(client.state["other"])

        def start_round(self, client, received):
            rates.append((client.optimizer.rate.item(), client.optimizers["other"].rate.item()))

    changes = {"optimizer.name": optimizer, "optimizer.schedule": "cosine", "optimizer.learning_rate": 0.5, "rounds": 4}
    federation = after_a_round(monkeypatch, Two, **changes)
    assert set(rates) == {(0.5, 0.5)}
    rates.clear()
    tiny.play_round(federation)
    assert all(one == other and 0 < one < 0.5 for one, other in rates)


def test_a_model_that_was_not_sent_is_an_error(monkeypatch):
    class Mistaken(Distilled):
        def before_steps(self, client, batches):
            return {"teacher": client.frozen("techer", batches.weak)}

    with pytest.raises(feddure.FeddureError, match="'techer', but the server sent theta, statistics"):
        after_a_round(monkeypatch, Mistaken)
