"""What a method of one's own can get: the examples of docs/extending.md at work."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import nn

import feddure
import folders
import tiny
from feddure import methods
from feddure.methods.fedtutor import FedTutor

IMAGES = tiny.dataset(size=80, tests=8, side=8)
PAGE = {"feddure": feddure, "torch": torch, "Field": Field}
for code in re.findall(
    r"```python\n(class \w+\(feddure.Method\).*?)```",
    (Path(__file__).parents[2] / "docs/extending.md").read_text(),
    re.S,
):
    exec(code, PAGE)


def after_a_round(monkeypatch, method, **changes):
    """A federation after its first round with this method."""
    monkeypatch.setitem(methods.METHODS, "mine", method)
    federation = tiny.federation(tiny.experiment({"method": "mine", "local_steps": 3, **changes}), IMAGES)
    tiny.play_round(federation)
    return federation


def watched(name, *seen):
    """The page's method of this name, whose steps also record what these functions find."""

    class Watched(PAGE[name]):
        def step(self, client, batch):
            found = {f"seen.{number}": look(client, batch) for number, look in enumerate(seen)}
            super().step(client, batch)
            return found

    return Watched


def round_of(monkeypatch, method, **changes):
    """A federation before its first round with this method, its tasks and their results."""
    monkeypatch.setitem(methods.METHODS, "mine", method)
    federation = tiny.federation(tiny.experiment({"method": "mine", "local_steps": 3, **changes}), IMAGES)
    tasks = federation.tasks()
    return federation, list(zip(tasks, federation.engine.run(tasks), strict=True))


def test_a_client_knows_its_class_counts(monkeypatch):
    method = watched("Balanced", lambda client, batch: client.class_counts.clone())
    federation, pairs = round_of(monkeypatch, method)
    for task, result in pairs:
        owned = IMAGES.labels[federation.partition.labelled[task.client]]
        assert result.records["seen.0"][0].tolist() == np.bincount(owned, minlength=len(IMAGES.classes)).tolist()


def test_several_views_of_known_images(monkeypatch):
    federation = after_a_round(monkeypatch, PAGE["Agreement"])
    assert federation.server.memories
    for client, memory in federation.server.memories.items():
        assert memory["visits"].sum() == 3 * federation.server.unlabelled_batch
        seen = memory["visits"].nonzero().flatten().tolist()
        assert set(seen) <= set(federation.partition.unlabelled[client].tolist())
    task = federation.tasks()[0]
    assert task.program.cost(task.batches) == 5 + 2 * 6 + 30


def test_what_is_frozen_is_computed_once_from_the_received_model(monkeypatch):
    method = watched("NearRows", lambda client, batch: batch.made["pseudo"])
    federation, pairs = round_of(monkeypatch, method)
    network = federation.server.program.network
    for task, result in pairs:
        for step, found in enumerate(result.records["seen.0"]):
            logits = network.evaluate(task.received["theta"], task.received["statistics"], task.batches.weak[step])
            assert torch.equal(found.long(), logits.argmax(1))


def test_heads_and_rows_learn_and_travel(monkeypatch):
    federation, pairs = round_of(monkeypatch, PAGE["NearRows"])
    layout = federation.server.program.network.parameters
    before = layout.views(federation.server.state["theta"])
    assert before["head:space.weight"].shape == (32, 64)
    for _, result in pairs:
        after = layout.views(result.upload["theta"])
        assert all((after[name] != before[name]).any() for name in ("head:space.weight", "6.weight"))


def test_heads_are_initialised_by_the_seed(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "mine", PAGE["NearRows"])
    made = tiny.federation(tiny.experiment({"method": "mine"}), IMAGES)
    plain, other, again = (
        tiny.federation(tiny.experiment({"method": name, "seed": seed}), IMAGES, made.engine).server
        for name, seed in (("fedavg", 0), ("mine", 1), ("mine", 0))
    )
    states = [layout_of(server)["head:space.weight"] for server in (made.server, other, again)]
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])
    assert torch.equal(layout_of(plain)["0.0.weight"], layout_of(made.server)["0.0.weight"])
    assert plain.program.network is not made.server.program.network is other.program.network


def layout_of(server):
    return server.program.network.parameters.views(server.state["theta"])


def test_a_model_with_heads_is_exported_without_them(monkeypatch, tmp_path, quiet):
    """Loaded from the run, or from a file, averaged or last: the bare network."""
    run = folders.execute(tmp_path / "run", method="proxyfl", **{"proxyfl.tuning_epochs": 2, "server.ema": 0.5})
    pixels = IMAGES.test_images[:5]
    for which in ("averaged", "last"):
        expected = feddure.load_model(run.folder, model=which)(pixels)
        for kind in ("safetensors", "onnx"):
            file = feddure.export(run.folder, tmp_path / f"{which}-{kind}", format=kind, model=which)
            assert np.allclose(feddure.load_model(file)(pixels), expected, atol=1e-5)
    assert not any(name.startswith("head:") for name in load_file(run.folder / "model.safetensors"))


class Scaled(nn.Module):
    """Its logits are not what its last layer returns."""

    def __init__(self, channels, classes):
        super().__init__()
        self.last = nn.Linear(channels * 64, classes)

    def forward(self, images):
        return 2 * self.last(images.flatten(1))


class Backwards(nn.Module):
    """Its classifier is not the layer that comes last in the list."""

    def __init__(self, channels, classes):
        super().__init__()
        self.classify, self.first = nn.Linear(classes, classes), nn.Linear(channels * 64, classes)

    def forward(self, images):
        return self.classify(self.first(images.flatten(1)).relu())


def test_features_of_somebodys_own_network(monkeypatch):
    feddure.register_network("scaled", Scaled)
    feddure.register_network("backwards", Backwards)
    assert (
        after_a_round(monkeypatch, PAGE["NearRows"], model="backwards").server.program.network.classifier == "classify"
    )
    for method in (PAGE["Balanced"], FedTutor):
        after_a_round(monkeypatch, method, model="scaled")
    with pytest.raises(feddure.FeddureError, match=r"not what an nn\.Linear layer returns"):
        after_a_round(monkeypatch, PAGE["NearRows"], model="scaled")


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (nn.Linear(2, 2), "expected torch.nn.Modules by name"),
        ({"a": 3}, "expected torch.nn.Modules by name"),
        ({"a": nn.BatchNorm1d(2)}, "head 'a' has statistics of its own"),
    ],
)
def test_heads_that_cannot_travel(monkeypatch, heads, message):
    class Mistaken(PAGE["NearRows"]):
        def heads(self, features, classes):
            return heads

    with pytest.raises(feddure.FeddureError, match=message):
        after_a_round(monkeypatch, Mistaken)


def test_a_head_that_is_not_there(monkeypatch):
    class Mistaken(PAGE["NearRows"]):
        def heads(self, features, classes):
            return {"spaces": nn.Linear(features, 3)}

    with pytest.raises(feddure.FeddureError, match=r"no head 'space' \(heads: spaces\)"):
        after_a_round(monkeypatch, Mistaken)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_second_optimiser_follows_the_schedule(monkeypatch, optimizer):
    rates = []

    class Two(PAGE["Balanced"]):
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
    class Mistaken(PAGE["NearRows"]):
        def before_steps(self, client, batches):
            return {"pseudo": client.frozen("techer", batches.weak)}

    with pytest.raises(feddure.FeddureError, match="'techer', but the server sent theta, statistics"):
        after_a_round(monkeypatch, Mistaken)


def test_an_option_that_is_misspelt_is_answered_with_what_was_meant(monkeypatch):
    class Rare(feddure.Method):
        class Options(feddure.Options):
            threshold: float = 0.5

    monkeypatch.setitem(methods.METHODS, "mine", Rare)
    with pytest.raises(feddure.errors.ConfigError, match=r"unknown field 'options.treshold'; did you mean 'threshold'"):
        methods.make(tiny.experiment({"method": "mine", "options.treshold": 0.7}))
    with pytest.raises(feddure.errors.ConfigError, match=r"'options.zeal'; there are: threshold"):
        methods.make(tiny.experiment({"method": "mine", "options.zeal": 0.7}))
