"""The built-in networks, by name, and a user's own."""

import pytest
import torch
from torch import nn

import tiny
from feddure import nn as networks
from feddure import plugins
from feddure.errors import ConfigError
from feddure.nn.networks import ResNet9, without_norms


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_papers_network_has_the_papers_size():
    assert parameters(ResNet9(3, 10)) == 6_575_370
    assert parameters(networks.make("resnet9", 3, 10, "group", 0)) == 6_575_370


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("side", "channels"), [(28, 1), (16, 3)])
@pytest.mark.parametrize("name", ["resnet9-slim", "resnet8", "cnn"])
def test_any_size_of_image(name, side, channels, norm):
    module = networks.make(name, channels, 7, norm, seed=0)
    with torch.no_grad():
        assert module(torch.zeros(2, channels, side, side)).shape == (2, 7)


def test_resnet8_is_that_of_sage():
    module = networks.make("resnet8", 3, 10, "batch", seed=0)
    assert sum(parameter.numel() for parameter in module.parameters()) == 1_227_594
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert [conv.stride[0] for conv in convolutions] == [1, 1, 1, 2, 1, 2, 2, 1, 2]
    assert all(conv.bias is None for conv in convolutions)
    last = max(convolutions, key=lambda conv: conv.weight.numel())
    assert last.weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)


def test_any_network_can_do_without_normalisation():
    shared = nn.BatchNorm2d(4)
    inner = nn.Sequential(nn.Conv2d(4, 4, 3), shared, nn.GroupNorm(2, 4))
    module = without_norms(nn.Sequential(nn.Conv2d(2, 4, 3), shared, inner, nn.Flatten(), nn.LayerNorm(36)))
    kept = {name: (p != 0).any().item() for name, p in module.named_parameters()}
    assert kept == {"0.weight": True, "0.bias": False, "2.0.weight": True, "2.0.bias": False}
    assert {name for name, p in module.named_parameters() if p.requires_grad} == {"0.weight", "2.0.weight"}
    assert not dict(module.named_buffers())


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other, third = (networks.make("cnn", 1, 4, "batch", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    tiny.assert_equal(one.state_dict(), other.state_dict())
    assert not torch.equal(one[-1].weight, third[-1].weight)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["cnn", "resnet9-slim"])
def test_convolution_biases_learn_under_group_norm_and_stay_zero_under_batch_norm(images, name, norm):
    federation = tiny.federation(tiny.experiment(model=name, norm=norm, rounds=1, clients_per_round=1), images)
    before = federation.server.model_state()
    tiny.play_round(federation)
    after = federation.server.model_state()
    layers = networks.make(name, 1, 4, norm, 0).named_modules()
    biases = [f"{place}.bias" for place, layer in layers if isinstance(layer, nn.Conv2d)]
    assert biases
    for bias in biases:
        assert (after[bias] == before[bias]).all() == (after[bias] == 0).all() == (norm == "batch")


class Perceptron(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(144 * channels, classes))

    def forward(self, x):
        return self.layers(x)


def test_a_network_of_ones_own(images):
    networks.register("perceptron", Perceptron)
    before = tiny.federation(tiny.experiment(model="perceptron"), images)
    after = tiny.finished(tiny.experiment(model="perceptron"), images)
    assert not torch.equal(before.server.state["theta"], after.server.state["theta"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet99", "resnet99.* resnet9, resnet9-slim, resnet8, cnn"),
        ("feddure.nn.networks:LargeCNN", r"feddure\.nn\.networks.* has no .*LargeCNN"),
    ],
)
def test_an_unknown_network_is_named(name, message):
    plugins.allow(name)
    with pytest.raises(ConfigError, match=message):
        networks.make(name, 1, 4, "batch", 0)


class FirstPixels(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4]


def test_a_network_without_anything_to_train_is_refused(images):
    networks.register("nothing", lambda channels, classes: FirstPixels())
    with pytest.raises(ConfigError, match="no parameter that can be trained"):
        tiny.federation(tiny.experiment(model="nothing"), images)


class OfTorchvision(nn.Module):
    """Its argument has the name that torchvision's and timm's networks have."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.last = nn.Linear(12, num_classes)

    def forward(self, images):
        return self.last(images.flatten(1))


def test_a_network_with_num_classes_is_taken_as_it_is(monkeypatch):
    monkeypatch.setitem(networks._REGISTERED, "vision", OfTorchvision)
    made = [networks.make("vision", 3, 7, "batch", seed) for seed in (4, 4, 5)]
    assert made[0](torch.zeros(2, 3, 2, 2)).shape == (2, 7)
    assert torch.equal(made[0].last.weight, made[1].last.weight)
    assert not torch.equal(made[0].last.weight, made[2].last.weight)


def swallows(*, weights=None, **others):
    """As torchvision's mobilenet_v3_small: what it does not know disappears."""
    return OfTorchvision(others.get("num_classes", 1000))


def passes_on(pretrained=False, **others):
    """As timm's."""
    return nn.Sequential(nn.Conv2d(others.pop("in_chans"), 3, 1), OfTorchvision(**others))


class OfOurs(nn.Linear):
    def __init__(self, classes, **others):
        super().__init__(others["channels"], classes)


@pytest.mark.parametrize(("maker", "channels"), [(swallows, 3), (passes_on, 1), (lambda **given: OfOurs(**given), 4)])
def test_a_network_that_passes_arguments_on_gets_those_it_knows(monkeypatch, maker, channels):
    monkeypatch.setitem(networks._REGISTERED, "passed", maker)
    made = networks.make("passed", channels, 7, "batch", 0)
    assert made(torch.zeros(2, channels) if channels == 4 else torch.zeros(2, channels, 2, 2)).shape == (2, 7)


def test_an_error_inside_a_network_is_its_own(monkeypatch):
    monkeypatch.setitem(networks._REGISTERED, "broken", lambda num_classes: nn.Linear(3, num_classes) + 1)
    with pytest.raises(TypeError, match="unsupported operand"):
        networks.make("broken", 3, 7, "batch", 0)


def test_a_network_that_takes_neither_is_refused(monkeypatch):
    monkeypatch.setitem(networks._REGISTERED, "odd", lambda width: nn.Linear(width, 2))
    with pytest.raises(ConfigError, match="num_classes"):
        networks.make("odd", 3, 7, "batch", 0)
