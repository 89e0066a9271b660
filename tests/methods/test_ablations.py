"""The ablations of Table 2, FixMatch and UDA on the engine against their textbook twins, in float64."""

from itertools import combinations

import pytest
import torch

from feddure.methods import METHODS
from oracle.client import confident, cross_entropy
from oracle.feddure_twin import CReg, FReg, RunningMean
from oracle.pairing import (
    TWINS,
    assert_same,
    assert_same_round,
    client_of,
    distance,
    experiment_of,
    federation_of,
    fresh_w,
    state_of,
    twin_of,
    twin_round,
    twin_step,
    upload_of,
)

REGULATED = ["f-reg", "c-reg", "avg-f-reg", "avg-c-reg"]
OTHERS = [name for name in TWINS if name != "feddure"]


def after_steps(method, steps=1, twin_class=None, **changes):
    """The engine's client and the twin's state after `steps` local steps, and the last records of both."""
    federation = federation_of(experiment_of(method, **changes))
    task = federation.tasks()[0]
    client, twin = client_of(federation, task), twin_of(federation, task, twin=twin_class)
    for index in range(steps):
        record = federation.server.method.step(client, task.batches.step(index))
        expected = twin_step(twin, task, index)
    found = {"theta": client.theta, "statistics": client.statistics, **client.state, **record}
    expected = {"weight" if name in ("m", "mask") else name: value for name, value in expected.items()}
    return found, {**state_of(federation, twin), **expected}


def global_model_after_a_round(method, **changes):
    federation = federation_of(experiment_of(method, clients_per_round=2, **changes))
    tasks = federation.tasks()
    federation.finish_round(tasks, federation.engine.run(tasks))
    return federation.server.state["theta"]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("method", OTHERS)
def test_a_step_equals_the_twin(method, norm):
    found, expected = after_steps(method, norm=norm)
    assert_same(found, expected)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("method", OTHERS)
def test_a_round_of_one_client_equals_the_twin(method, norm):
    assert_same_round(federation_of(experiment_of(method, norm=norm, local_steps=4)))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("method", OTHERS)
def test_a_round_of_four_clients_equals_the_twins(method, norm):
    experiment = experiment_of(method, norm=norm, clients_per_round=4, local_steps=2, engine__lanes=3)
    assert_same_round(federation_of(experiment))


@pytest.mark.parametrize(
    ("method", "switch"),
    [
        ("f-reg", {"feddure__h_gradient": "detached"}),
        ("f-reg", {"feddure__f_reg_input": "logits"}),
        ("avg-f-reg", {"feddure__f_reg_input": "logits"}),
        ("c-reg", {"feddure__threshold": 0.3}),
        ("c-reg", {"feddure__d_clip": 1e-3}),
        ("avg-c-reg", {"feddure__d_clip": 1e-3}),
        ("c-reg", {"feddure__reward": "rise"}),
        ("avg-c-reg", {"feddure__reward": "rise"}),
        ("c-reg", {"feddure__reward_on": "confident"}),
        ("avg-c-reg", {"feddure__reward_on": "confident"}),
        ("baseline+maml", {"feddure__maml_order": 1}),
        ("baseline+maml", {"fixmatch__threshold": 0.3}),
        ("baseline+maml", {"fixmatch__weight": 0.5}),
        ("baseline+maml", {"proximal": 0.5}),
        ("c-reg", {"proximal": 0.5}),
        ("fedavg-fixmatch", {"fixmatch__threshold": 0.3}),
        ("fedavg-fixmatch", {"fixmatch__weight": 0.5}),
        ("fedavg-uda", {"uda__threshold": 0.3}),
        ("fedavg-uda", {"uda__temperature": 0.9}),
        ("fedavg-uda", {"uda__weight": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_switches_equal_the_twin_and_matter(method, switch):
    found, expected = after_steps(method, steps=2, **switch)
    assert_same(found, expected)
    usual, _ = after_steps(method, steps=2)
    assert distance(found["theta"], usual["theta"]) > 1e-8


def test_the_masks_of_these_tests_let_some_through_and_not_all():
    for norm in ("batch", "group"):
        found, _ = after_steps("c-reg", norm=norm)
        assert 0 < found["weight"].sum() < len(found["weight"])


def test_methods_differ_pairwise_after_one_round():
    names = ["feddure", *REGULATED, "baseline+maml", "fedavg-fixmatch", "fedavg-uda"]
    models = {name: global_model_after_a_round(name) for name in names}
    models["baseline+maml, first order"] = global_model_after_a_round("baseline+maml", feddure__maml_order=1)
    for one, other in combinations(models, 2):
        assert distance(models[one], models[other]) > 1e-8, (one, other)


def test_avg_c_reg_parts_from_c_reg_in_the_second_step():
    """Before any upload φ̄ is the global model, so the first step of the first round is the same."""
    for steps, same in ((1, True), (2, False)):
        plain, _ = after_steps("c-reg", steps=steps)
        averaged, _ = after_steps("avg-c-reg", steps=steps)
        assert torch.equal(plain["d"], averaged["d"]) == same


@pytest.mark.parametrize(("method", "parts"), [("f-reg", {"w"}), ("c-reg", {"phi"})])
def test_an_ablation_keeps_only_its_regulator(method, parts):
    federation = federation_of(experiment_of(method))
    task = federation.tasks()[0]
    client = client_of(federation, task)
    record = federation.server.method.step(client, task.batches.step(0))
    assert set(client.state) == parts
    assert set(client.optimizers) == parts
    assert ("d" in record) == ("phi" in parts)


@pytest.mark.parametrize("method", ["c-reg", "avg-c-reg", "avg-f-reg"])
def test_f_reg_memory_changes_nothing_where_no_f_reg_is_the_clients_own(method):
    states = []
    for memory in ("none", "client"):
        federation = federation_of(
            experiment_of(method, feddure__f_reg_memory=memory, clients_per_round=4, local_steps=1)
        )
        for _ in range(2):
            tasks = federation.tasks()
            federation.finish_round(tasks, federation.engine.run(tasks))
        states.append(federation.server.state["theta"])
    assert torch.equal(*states)


def test_f_reg_alone_remembers_too():
    federation = federation_of(
        experiment_of("f-reg", feddure__f_reg_memory="client", clients_per_round=4, local_steps=2)
    )
    tasks = federation.tasks()
    results = federation.engine.run(tasks)
    federation.finish_round(tasks, results)
    assert_same_round(
        federation, {task.client: result.memory["w"] for task, result in zip(tasks, results, strict=True)}
    )


# --- the means of earlier rounds ------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "part"), [("avg-f-reg", "w"), ("avg-c-reg", "phi")])
def test_the_server_sends_the_mean_of_all_earlier_uploads(method, part):
    federation = federation_of(experiment_of(method, clients_per_round=3, local_steps=2))
    start = fresh_w(federation, (0, 0, 0)) if part == "w" else federation.server.state["theta"].clone()
    mean = RunningMean(start)
    for _ in range(3):
        tasks = federation.tasks()
        results = federation.engine.run(tasks)
        received = mean.value()
        for task, result in zip(tasks, results, strict=True):
            assert_same(task.received, {part: received})
            twin = twin_of(federation, task, received)
            twin_round(twin, task)
            upload = upload_of(federation, twin)
            assert_same(result.upload, upload)
            assert distance(upload[part], received) > 1e-6  # it learns
            mean.add(upload[part])
        federation.finish_round(tasks, results)
    assert mean.count == 9


@pytest.mark.parametrize("method", ["avg-f-reg", "avg-c-reg"])
def test_a_received_mean_stays_as_it_is_during_the_round(method):
    federation = federation_of(experiment_of(method))
    task = federation.tasks()[0]
    sent = {name: value.clone() for name, value in task.received.items()}
    federation.engine.run([task])
    assert all(torch.equal(task.received[name], value) for name, value in sent.items())


# --- the comparison can fail: twins with one thing wrong ---------------------------------------------------------
class MaskedReward(CReg):
    """g_d masked as well."""

    def step(self, x, y, weak, strong):
        on_x, on_weak, on_strong = self.predict(x, weak, strong)
        pseudo, mask = on_weak.argmax(1), confident(on_weak, self.settings.threshold)
        d = self.train_c_reg(mask, x, y, strong, pseudo)
        masked = (mask * cross_entropy(pseudo, on_strong)).mean()
        self.descend(cross_entropy(y, on_x).mean() + (1 + d) * masked)
        return {"d": d}


class PhiSeesOnlyTheConfident(CReg):
    """The images that the mask leaves out are missing from φ's batch statistics too."""

    def masked_step(self, phi, adam, mask, strong, pseudo):
        keep = mask.bool()
        super().masked_step(phi, adam, mask[keep], strong[keep], pseudo[keep])


class VirtualPassTouchesStatistics(FReg):
    """The virtual step's pass moves θ's running statistics."""

    def pass_of_regulator(self, model, parameters, images):
        return torch.func.functional_call(model, {**parameters, **dict(model.named_buffers())}, (images,))


@pytest.mark.parametrize(
    ("method", "mutant", "shows_in"),
    [
        ("c-reg", MaskedReward, {"theta"}),
        ("c-reg", PhiSeesOnlyTheConfident, {"phi", "d", "theta"}),
        ("f-reg", VirtualPassTouchesStatistics, {"statistics"}),
    ],
)
def test_a_twin_with_one_thing_wrong_is_told_apart(method, mutant, shows_in):
    found, expected = after_steps(method, twin_class=mutant)
    apart = {name: distance(found[name], expected[name]) for name in shows_in}
    assert all(value > 1e-7 for value in apart.values()), apart


def test_every_ablation_and_baseline_has_a_twin():
    assert set(TWINS) <= set(METHODS)
