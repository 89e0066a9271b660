"""A module as pure functions: the same logits, gradients and statistics as the module itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from feddure import nn as networks
from feddure.config import OptimizerOptions
from feddure.errors import FeddureWarning
from feddure.nn import optimizers
from feddure.nn.network import Network

CPU = torch.device("cpu")
CASES = [("cnn", "batch"), ("cnn", "group"), ("resnet9-slim", "batch"), ("resnet9-slim", "group")]


def made(name="cnn", norm="batch"):
    """A network with random statistics, its flat state, its module in double precision, and images."""
    module = networks.make(name, 3, 4, norm, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype))
    network = Network(module, CPU, "fp64")
    images = torch.randn(6, 3, 12, 12, generator=generator, dtype=torch.float64)
    return network, *network.take(module), copy.deepcopy(module), images


def statistics_of(module):
    return {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_training_pass(name, norm):
    network, theta, statistics, module, images = made(name, norm)
    module.train()
    for batch in images.split(3):
        torch.testing.assert_close(network.forward(network.weights(theta), statistics, batch), module(batch))
    tiny.assert_near(network.statistics.views(statistics), statistics_of(module), 1e-12)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_evaluation_pass_and_state_dict(name, norm):
    network, theta, statistics, module, images = made(name, norm)
    before = statistics.clone()
    logits = network.evaluate(theta, statistics, images)
    assert torch.equal(network.evaluator(theta, statistics)(images), logits)
    plain = networks.make(name, 3, 4, norm, seed=77).double()
    found = plain.load_state_dict(network.state_dict(theta, statistics), strict=False)
    assert not found.unexpected_keys
    assert all(key.endswith("num_batches_tracked") for key in found.missing_keys)
    with torch.no_grad():
        torch.testing.assert_close(logits, plain.eval()(images), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(logits, module.eval()(images), rtol=1e-13, atol=1e-13)
    assert torch.equal(statistics, before)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_probing_pass_touches_nothing(name, norm):
    network, theta, statistics, module, images = made(name, norm)
    before = theta.clone(), statistics.clone()
    torch.testing.assert_close(network.probe(network.weights(theta), images), module.train()(images))
    assert torch.equal(theta, before[0])
    assert torch.equal(statistics, before[1])


def test_layers_that_share_their_weights():
    shared = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    last = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    last.weight = shared.weight
    norm = nn.BatchNorm2d(3)
    module = nn.Sequential(shared, norm, shared, norm, last, nn.Flatten(), nn.Linear(48, 4)).double()
    network = Network(module, CPU, "fp64")
    theta, statistics = network.take(module)
    images = torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = network.weights(2 * theta)
    found = network.leaf_gradients(network.forward(weights, statistics, images).square().sum(), weights)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(network.evaluate(2 * theta, network.take(module)[1], images), module.eval()(images))
    expected = torch.autograd.grad(module.train()(images).square().sum(), list(module.parameters()))
    named = dict(zip((name for name, _ in module.named_parameters()), expected, strict=True))
    tiny.assert_near(dict(zip(weights.trained, found, strict=True)), named, 1e-9)
    tiny.assert_near(network.statistics.views(statistics), statistics_of(module), 1e-12)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_gradient(name, norm):
    network, theta, statistics, module, images = made(name, norm)
    labels = torch.arange(6) % 4
    weights = network.weights(theta)
    loss = F.cross_entropy(network.forward(weights, statistics, images), labels)
    flat = torch.zeros_like(theta)
    for place, values in network.gradient(loss, weights):
        flat[place] = values
    F.cross_entropy(module.train()(images), labels).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    tiny.assert_near(network.parameters.views(flat), expected, 1e-10)
    assert flat[network.parameters.trained :].abs().sum() == 0


def test_measured_statistics_are_the_mean_over_batches():
    network, theta, statistics, module, images = made()
    found = network.measure_statistics(theta, statistics, list(images.split(2)))
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    for batch in images.split(2):
        module(batch)
    tiny.assert_near(network.statistics.views(found), statistics_of(module), 1e-12)
    again = network.measure_statistics(theta, torch.zeros_like(statistics), list(images.split(2)))
    assert torch.equal(again, found)
    network.forward(network.weights(theta), statistics, images)  # and the momentum is back where it was
    _, _, expected, module, images = made()
    network.forward(network.weights(theta), expected, images)
    assert torch.equal(statistics, expected)


class Odd(nn.Module):
    """Tied weights, a scalar, an integer buffer, a constant, and batch norm without scale or without memory."""

    def __init__(self, channels, classes):
        super().__init__()
        self.first = nn.Conv2d(channels, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.third = nn.Conv2d(4, 4, 3)
        self.third.weight = self.second.weight
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.forgetful = nn.BatchNorm2d(4, track_running_stats=False)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(4, classes)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3, 0.4]), persistent=False)

    def forward(self, x):
        x = self.forgetful(self.second(torch.relu(self.norm(self.first(x)))))
        x = self.third(torch.tanh(x))[:, self.order].mean((2, 3)) + self.shift
        return self.head(x) * self.temperature


def test_networks_with_odd_parts(images):
    networks.register("odd", Odd)
    module = networks.make("odd", 1, 4, "batch", 0).double()
    network = Network(module, CPU, "fp64")
    theta, statistics = network.take(module)
    assert network.parameters.size == sum(parameter.numel() for parameter in module.parameters())
    pixels = torch.randn(5, 1, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(network.forward(network.weights(theta), statistics, pixels), module.train()(pixels))
    torch.testing.assert_close(network.evaluate(theta, statistics, pixels), module.eval()(pixels).detach())
    federation = tiny.finished(tiny.experiment(model="odd", method="feddure"), images)
    assert torch.isfinite(federation.server.state["theta"]).all()


def test_cumulative_batch_norm_is_run_with_a_momentum_and_says_so():
    with pytest.warns(FeddureWarning, match="momentum"):
        Network(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None)), CPU, "fp64")


def test_the_module_given_is_left_alone():
    module = networks.make("cnn", 1, 4, "batch", 0)
    before = copy.deepcopy(module.state_dict())
    network = Network(module, CPU, "fp64")
    theta, statistics = network.take(module)
    network.forward(network.weights(theta), statistics, torch.randn(4, 1, 12, 12, dtype=torch.float64))
    tiny.assert_equal(module.state_dict(), before)
    assert module.training


def test_single_and_half_precision_keep_full_precision_weights():
    module = networks.make("cnn", 1, 4, "batch", 0)
    for precision, compute in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        network = Network(module, CPU, precision)
        theta, statistics = network.take(module)
        weights = network.weights(theta)
        assert theta.dtype == statistics.dtype == torch.float32
        assert weights.named["0.0.weight"].dtype == compute
        assert weights.named["0.1.weight"].dtype == torch.float32
        logits = network.forward(weights, statistics, torch.randn(4, 1, 12, 12).to(compute))
        assert logits.dtype == torch.float32
        for _, values in network.gradient(logits.sum(), weights):
            assert values.dtype in (compute, torch.float32)


def with_heads(name="cnn", norm="batch", precision="fp64", compiled=False):
    """A network with a head, its module, its flat state, and images."""
    module = networks.make(name, 3, 4, norm, seed=1)
    heads = {"space": nn.Linear(module[-1].in_features, 5)}
    network = Network(module, CPU, precision, compiled, str(len(module) - 1), heads)
    return network, module, heads["space"], *network.take(module, heads)


@pytest.mark.parametrize(("name", "norm"), [*CASES, ("resnet8", "batch")])
def test_features_rows_and_heads(name, norm):
    network, module, head, theta, statistics = with_heads(name, norm)
    module, head = module.double(), head.double()
    images = torch.randn(6, 3, 12, 12, dtype=torch.float64)
    logits, features = network.features(network.weights(theta), statistics, images)
    torch.testing.assert_close(logits, module.train()(images))
    tiny.assert_near(network.statistics.views(statistics), statistics_of(module), 1e-12)
    weights = network.weights(theta)
    rows = network.rows(weights.named)
    torch.testing.assert_close(features @ rows.T + module[-1].bias, logits)
    torch.testing.assert_close(network.head("space", weights, features), head(features))
    # Gradients reach the rows through the head, and the head itself.
    found = network.leaf_gradients(network.head("space", weights, rows).sum(), weights)
    gradients = dict(zip(weights.trained, found, strict=True))
    torch.testing.assert_close(gradients[f"{network.classifier}.weight"], head.weight.sum(0).expand_as(rows))
    torch.testing.assert_close(gradients["head:space.bias"], torch.full((5,), 4.0, dtype=torch.float64))


def test_heads_change_nothing_else():
    network, module, _, theta, statistics = with_heads()
    plain = Network(module, CPU, "fp64")
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    assert torch.equal(network.evaluate(theta, statistics, images), plain.evaluate(*plain.take(module), images))
    assert network.state_dict(theta, statistics).keys() == plain.state_dict(*plain.take(module)).keys()
    weights = network.weights(theta)
    direction = [torch.ones_like(leaf) for leaf in weights.leaves]
    bare = plain.weights(plain.take(module)[0])
    found, expected = (
        each.tangent(w, [torch.ones_like(leaf) for leaf in w.leaves], images)
        for each, w in ((network, weights), (plain, bare))
    )
    assert torch.equal(found[1], expected[1])
    network._explicit = False
    torch.testing.assert_close(network.tangent(weights, direction, images)[1], expected[1])


def test_features_in_half_precision_are_single():
    network, _, _, theta, statistics = with_heads(precision="bf16")
    weights = network.weights(theta)
    logits, features = network.features(weights, statistics, torch.randn(4, 3, 12, 12).bfloat16())
    assert logits.dtype == features.dtype == network.head("space", weights, features).dtype == torch.float32


def test_features_compile(monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiler(function, backend="eager", fullgraph=True)
    )
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    (one, _, _, *state), (other, *_) = with_heads(compiled=True), with_heads()
    found, expected = (each.features(each.weights(state[0]), state[1].clone(), images) for each in (one, other))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Centred(nn.Module):
    """Takes a buffer of its own away, and counts on in two others: one in place, and one put anew."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("centre", torch.randn(3, 1, 1, generator=generator))
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.passes += 1
            self.again = self.again + 1
        return x - self.centre


def centred(seed=0):
    return nn.Sequential(
        Centred(seed), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4)
    )


class Swapping(nn.Module):
    """Puts one buffer in another's place, and keeps what a batch was like."""

    def __init__(self):
        super().__init__()
        for name in ("now", "before", "a", "z"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("last", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.a = self.z = self.before = self.now
            self.now = self.now + 1
            self.last = x.mean((2, 3))
        return x


def test_buffers_that_take_each_others_place():
    network = Network(nn.Sequential(Swapping(), *centred()[1:]), CPU, "fp32")
    statistics = torch.zeros(network.statistics.size)
    weights = network.weights(torch.zeros(network.parameters.size))
    for _ in range(4):
        network.forward(weights, statistics, torch.randn(2, 3, 12, 12))
    named = network.statistics.views(statistics)
    assert [named[f"0.{name}"].item() for name in ("now", "before", "a", "z")] == [4, 3, 3, 3]


@pytest.mark.parametrize(("precision", "compiled"), [("fp64", False), ("bf16", False), ("fp32", True)])
def test_buffers_of_a_users_own_layers(precision, compiled):
    torch.manual_seed(0)
    network = Network(centred(), CPU, precision, compiled)
    module = centred(seed=1)  # of another experiment that shares the network
    theta, statistics = network.take(module)
    images = torch.randn(4, 3, 12, 12).to(network.compute)
    expected = module.train()(images.float())
    tolerance = {"rtol": 0, "atol": 0.1} if precision == "bf16" else {"rtol": 0, "atol": 1e-5}
    weights = network.weights(theta)
    for _ in range(2):
        torch.testing.assert_close(network.forward(weights, statistics, images).float(), expected, **tolerance)
    named = network.statistics.views(statistics)
    assert named["0.passes"] == named["0.again"] == 2
    network.probe_with(statistics)
    for _ in range(2):
        torch.testing.assert_close(network.probe(weights, images).float(), expected, **tolerance)
    kept = [network._probing.get_buffer(f"0.{name}") for name in ("passes", "again")]  # all lanes share them
    assert named["0.passes"] == named["0.again"] == 2
    assert kept == [2, 2]
    assert network.evaluate(theta, statistics, images).isfinite().all()


def test_frozen_batch_norm_and_heads_keep_full_precision():
    module = networks.make("cnn", 3, 4, "batch", seed=0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.requires_grad_(False)
    heads = {"space": nn.Linear(module[-1].in_features, 5).requires_grad_(False)}
    network = Network(module, CPU, "bf16", False, str(len(module) - 1), heads)
    theta, statistics = network.take(module, heads)
    weights = network.weights(theta)
    _, features = network.features(weights, statistics, torch.randn(4, 3, 12, 12).bfloat16())
    assert network.head("space", weights, features).dtype == torch.float32
    assert {weights.named["0.1.weight"].dtype, weights.named["0.0.weight"].dtype} == {torch.float32, torch.bfloat16}


def test_an_error_while_statistics_are_measured_leaves_batch_norm_as_it_was():
    module = networks.make("cnn", 1, 4, "batch", 0)
    network = Network(module, CPU, "fp64")
    theta, statistics = network.take(module)
    images = torch.randn(4, 1, 12, 12, dtype=torch.float64)
    momenta = [layer.momentum for layer in network._training.modules() if isinstance(layer, nn.BatchNorm2d)]
    with pytest.raises(RuntimeError):
        network.measure_statistics(theta, statistics, [images, images, images[:, :, :1, :1]])
    assert momenta == [layer.momentum for layer in network._training.modules() if isinstance(layer, nn.BatchNorm2d)]


def test_what_does_not_compile_is_not_compiled_later(monkeypatch):
    def broken(function, **options):
        def call(*arguments):
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    network = Network(networks.make("cnn", 1, 4, "batch", 0), CPU, "fp64", compiled=True)
    parameters = torch.zeros(4, dtype=torch.float64)
    adam = optimizers.make(OptimizerOptions(), parameters, network.fuse)
    gradient = [(slice(0, 4), torch.ones(4, dtype=torch.float64))]
    with pytest.raises(RuntimeError, match="no compiler"):
        adam.step(parameters, gradient)
    network.stop_compiling()
    adam.step(parameters, gradient)
    assert (parameters < 0).all()
