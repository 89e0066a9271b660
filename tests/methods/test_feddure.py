"""FedDure on the engine against its textbook twin, in float64, and against twins with one thing wrong."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import tiny
from feddure.nn import register
from oracle.feddure_twin import FedDure, Regulated
from oracle.pairing import (
    assert_same,
    assert_same_round,
    client_of,
    distance,
    experiment_of,
    f_reg_of,
    federation_of,
    state_of,
    toy_dataset,
    twin_of,
    twin_round,
    twin_step,
    w_of,
)


def one_step(twin_class=None, steps=1, **changes):
    """The engine's state and record after `steps` local steps, and the twin's."""
    federation = federation_of(experiment_of("feddure", **changes))
    task = federation.tasks()[0]
    client, twin = client_of(federation, task), twin_of(federation, task, twin=twin_class)
    for index in range(steps):
        record = federation.server.method.step(client, task.batches.step(index))
        expected = twin_step(twin, task, index)
    found = {"theta": client.theta, "statistics": client.statistics, **client.state}
    found |= {"d": record["d"], "m": record["weight"]}
    return found, {**state_of(federation, twin), **expected}


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_equal_the_twin(norm, steps):
    found, expected = one_step(norm=norm, steps=steps)
    assert {"theta", "statistics", "phi", "w", "d", "m"} <= expected.keys()
    assert_same(found, expected)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("clients", "lanes"), [(1, 1), (4, 3)])
def test_a_round_equals_the_twins(norm, clients, lanes):
    federation = federation_of(experiment_of("feddure", norm=norm, clients_per_round=clients, engine__lanes=lanes))
    assert_same_round(federation)


@pytest.mark.parametrize(
    "switch",
    [
        {"feddure__h_gradient": "detached"},
        {"feddure__f_reg_input": "logits"},
        {"feddure__h_gradient": "detached", "feddure__f_reg_input": "logits"},
        {"feddure__d_clip": 1e-3},
        {"feddure__reward": "rise"},
        {"proximal": 0.5},
        {"optimizer__learning_rate": 0.02},
    ],
    ids=lambda switch: " ".join(f"{key}={value}" for key, value in switch.items()),
)
def test_switches_equal_the_twin_and_matter(switch):
    found, expected = one_step(steps=2, **switch)
    assert_same(found, expected)
    usual, _ = one_step(steps=2)
    assert distance(found["theta"], usual["theta"]) > 1e-7


def test_grey_images_and_the_residual_network_equal_the_twin():
    experiment = experiment_of("feddure", model="resnet9-slim", local_steps=1)
    assert_same_round(federation_of(experiment, toy_dataset(side=14, channels=1)))


# --- F-reg's gradient -----------------------------------------------------------------------------------
def smooth_network(channels: int, classes: int) -> nn.Module:
    """Layers without a hand-written derivative, so that PyTorch's forward mode has to do."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(150, 16),
        nn.Tanh(),
        nn.Linear(16, classes),
    )


def network_that_shares_a_layer(channels: int, classes: int) -> nn.Module:
    """One ReLU object in two places, as people write it."""
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, stride=2), relu, nn.Conv2d(6, 6, 3), relu, nn.Flatten(), nn.Linear(54, classes)
    )


register("smooth", smooth_network)
register("shares-a-layer", network_that_shares_a_layer)


def f_reg_gradients(**changes) -> tuple[Tensor, Tensor]:
    """Adam's first mean, a tenth of the first gradient, on the engine and by double backward."""
    federation = federation_of(experiment_of("feddure", **changes))
    task = federation.tasks()[0]
    client, twin = client_of(federation, task), twin_of(federation, task)
    federation.server.method.step(client, task.batches.step(0))
    twin_step(twin, task, 0)
    expected = torch.cat([twin.f_reg_adam.state[p]["exp_avg"].reshape(-1) for p in twin.f_reg.parameters()])
    return client.optimizers["w"].mean, expected


@pytest.mark.parametrize(
    ("h_gradient", "f_reg_input"), [("full", "softmax"), ("full", "logits"), ("detached", "softmax")]
)
@pytest.mark.parametrize(
    ("model", "norm"), [("cnn", "batch"), ("cnn", "group"), ("smooth", "batch"), ("shares-a-layer", "batch")]
)
def test_f_reg_gradient_equals_double_backward(model, norm, h_gradient, f_reg_input):
    found, expected = f_reg_gradients(
        model=model, norm=norm, feddure__h_gradient=h_gradient, feddure__f_reg_input=f_reg_input
    )
    assert expected.abs().max() > 0
    assert distance(found, expected) < 1e-12


def test_the_twins_f_reg_gradient_is_the_slope_of_the_labelled_loss():
    federation = federation_of(experiment_of("feddure", model="smooth"))
    task = federation.tasks()[0]
    twin = twin_of(federation, task)
    batch = task.batches.step(0)
    pseudo = twin.predict(batch.weak)[0].argmax(1)

    def labelled_loss_after(w: Tensor) -> Tensor:
        """L_s(φ⁻(w)), with φ⁻ written out once more."""
        parameters = {name: p.detach().requires_grad_() for name, p in twin.phi.named_parameters()}
        loss = twin.weighted_loss(f_reg_of(w), twin.phi, parameters, batch.strong, pseudo)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        moved = {name: p - 5e-4 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        return twin.labelled_loss(twin.phi, moved, batch.labelled, batch.labels).detach()

    w = w_of(twin.f_reg)
    twin.train_f_reg(twin.f_reg, twin.f_reg_adam, twin.phi, batch.labelled, batch.labels, batch.strong, pseudo)
    gradient = torch.cat([p.grad.reshape(-1) for p in twin.f_reg.parameters()])
    along = gradient / gradient.norm()
    slope = (labelled_loss_after(w + 1e-2 * along) - labelled_loss_after(w - 1e-2 * along)) / 2e-2
    assert slope.item() == pytest.approx(gradient.norm().item(), rel=1e-3)


# --- what is kept and what is sent ------------------------------------------------------------------------
def test_only_the_model_and_its_statistics_are_sent():
    federation = federation_of(experiment_of("feddure", local_steps=1))
    (result,) = federation.engine.run(federation.tasks())
    assert set(result.upload) == {"theta", "statistics"}
    assert not result.memory


def test_every_round_starts_from_the_received_model_and_a_fresh_f_reg():
    federation = federation_of(experiment_of("feddure", local_steps=2, clients_per_round=4))
    for _ in range(2):
        tiny.play_round(federation)
    for task in federation.tasks():
        client = client_of(federation, task)
        assert torch.equal(client.state["phi"], federation.server.state["theta"])
        assert_same({"w": client.state["w"]}, {"w": w_of(twin_of(federation, task).f_reg)}, 1e-15)
    assert_same_round(federation)


def test_client_memory_carries_f_reg_from_round_to_round():
    federation = federation_of(
        experiment_of("feddure", feddure__f_reg_memory="client", clients_per_round=2, local_steps=2)
    )
    remembered: dict[int, Tensor] = {}
    came_back = False
    for _ in range(4):
        tasks = federation.tasks()
        results = federation.engine.run(tasks)
        for task, result in zip(tasks, results, strict=True):
            came_back |= task.client in remembered
            twin = twin_of(federation, task, remembered.get(task.client))
            twin_round(twin, task)
            remembered[task.client] = w_of(twin.f_reg)
            assert_same(result.upload, {"theta": state_of(federation, twin)["theta"]})
            assert_same(result.memory, {"w": w_of(twin.f_reg)})
        federation.finish_round(tasks, results)
    assert came_back


# --- clients that lack something ----------------------------------------------------------------------------
def without(batch, *names):
    return replace(batch, **{name: getattr(batch, name)[:0] for name in names})


def test_a_client_without_unlabelled_images_learns_from_its_labels_alone():
    federation = federation_of(experiment_of("feddure"))
    supervised = federation_of(experiment_of("fedavg"))
    task = federation.tasks()[0]
    batch = without(task.batches.step(0), "weak", "strong", "truth")
    client, plain = client_of(federation, task), client_of(supervised, task)
    record = federation.server.method.step(client, batch)
    supervised.server.method.step(plain, batch)
    assert record["d"] == 0
    assert torch.equal(client.theta, plain.theta)
    assert torch.equal(client.statistics, plain.statistics)


def test_a_client_without_labels_still_weighs_and_learns():
    federation = federation_of(experiment_of("feddure"))
    task = federation.tasks()[0]
    client = client_of(federation, task)
    w, theta = client.state["w"].clone(), client.theta.clone()
    record = federation.server.method.step(client, without(task.batches.step(0), "labelled", "labels"))
    assert record["d"] == 0
    assert torch.equal(client.state["w"], w)
    assert not torch.equal(client.theta, theta)
    assert torch.isfinite(client.theta).all()


# --- the comparison can fail: twins with one thing wrong ------------------------------------------------------
class SignOfDFlipped(FedDure):
    def reward(self, before, after):
        return super().reward(after, before)


class HDetached(FedDure):
    def weights_in_u(self, f_reg, logits):
        return super().weights_in_u(f_reg, logits.detach())


class RemembersOldW(FedDure):
    def train_f_reg(self, f_reg, *rest):
        self.old_f_reg = copy.deepcopy(f_reg)
        super().train_f_reg(f_reg, *rest)


class OldWInEquation2(RemembersOldW):
    def train_c_reg(self, *batch):
        new, self.f_reg = self.f_reg, self.old_f_reg
        d = super().train_c_reg(*batch)
        self.f_reg = new
        return d


class OldWInEquation6(RemembersOldW):
    def sample_weights(self, on_strong):
        return self.weigh(self.old_f_reg, on_strong).detach()


class PhiTouchesStatistics(FedDure):
    def pass_of_regulator(self, model, parameters, images):
        return functional_call(model, {**parameters, **dict(self.theta.named_buffers())}, (images,))


class SeparatePasses(FedDure):
    def predict(self, *groups):
        return tuple(self.theta(group) for group in groups)


class FixedFReg(FedDure):
    def train_f_reg(self, *arguments):
        pass


class VirtualStepFromTheta(FedDure):
    def train_f_reg(self, f_reg, adam, model, *batch):
        Regulated.train_f_reg(self, f_reg, adam, self.theta, *batch)


@pytest.mark.parametrize(
    ("mutant", "shows_in", "steps"),
    [
        (SignOfDFlipped, {"d", "theta"}, 1),
        (HDetached, {"w", "phi", "d", "m", "theta"}, 1),
        (OldWInEquation2, {"phi", "d", "theta"}, 1),
        (OldWInEquation6, {"m", "theta"}, 1),
        (PhiTouchesStatistics, {"statistics"}, 1),
        (SeparatePasses, {"statistics", "theta"}, 1),
        (FixedFReg, {"w", "phi", "d", "m", "theta"}, 1),
        (VirtualStepFromTheta, {"w", "phi", "d", "m", "theta"}, 2),  # θ and φ are equal in the first step
    ],
)
def test_a_twin_with_one_thing_wrong_is_told_apart(mutant, shows_in, steps):
    found, expected = one_step(mutant, steps=steps)
    apart = {name: distance(found[name], expected[name]) for name in shows_in}
    assert all(value > 1e-7 for value in apart.values()), apart
