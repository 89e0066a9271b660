"""The built-in networks, by name, and a user's own."""

import pytest
import torch
from torch import nn

import tiny
from feddure import nn as networks
from feddure.errors import ConfigError
from feddure.nn.resnet import ResNet9


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_papers_network_has_the_papers_size():
    assert parameters(ResNet9(3, 10)) == 6_575_370
    assert parameters(networks.make("resnet9", 3, 10, "group", 0)) == 6_575_370


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3), (12, 1), (16, 3)])
@pytest.mark.parametrize("name", ["resnet9", "resnet9-slim", "cnn"])
def test_any_size_of_image(name, side, channels, norm):
    module = networks.make(name, channels, 7, norm, seed=0)
    with torch.no_grad():
        assert module(torch.zeros(2, channels, side, side)).shape == (2, 7)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other, third = (networks.make("cnn", 1, 4, "batch", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    tiny.assert_equal(one.state_dict(), other.state_dict())
    assert not torch.equal(one[-1].weight, third[-1].weight)


@pytest.mark.parametrize("name", ["cnn", "resnet9-slim"])
def test_convolution_biases_stay_zero_under_batch_norm(images, name):
    federation = tiny.finished(tiny.experiment(model=name, rounds=1), images)
    biases = convolution_biases(federation)
    assert biases
    assert all(bias.abs().max() == 0 for bias in biases.values())


@pytest.mark.parametrize("name", ["cnn", "resnet9-slim"])
def test_convolution_biases_learn_under_group_norm(images, name):
    experiment = tiny.experiment(model=name, norm="group", rounds=1)
    before = convolution_biases(tiny.federation(experiment, images))
    after = convolution_biases(tiny.finished(experiment, images))
    assert all((after[name] != before[name]).any() for name in before)


def convolution_biases(federation):
    module = networks.make(federation.experiment.model, 1, 4, federation.experiment.norm, 0)
    names = {f"{name}.bias" for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d)}
    return {name: tensor for name, tensor in federation.server.model_state().items() if name in names}


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


def test_a_network_by_import_path():
    module = networks.make("feddure.nn.cnn:SmallCNN", 1, 4, "batch", 0)
    assert isinstance(module, networks.SmallCNN)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet99", "resnet99.* resnet9, resnet9-slim, cnn"),
        ("no.such.place:Net", r"no\.such\.place"),
        ("feddure.nn.cnn:LargeCNN", r"feddure\.nn\.cnn.* has no .*LargeCNN"),
    ],
)
def test_an_unknown_network_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        networks.make(name, 1, 4, "batch", 0)


class FirstPixels(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4]


def test_a_network_without_anything_to_train_is_refused(images):
    networks.register("nothing", lambda channels, classes: FirstPixels())
    with pytest.raises(ConfigError, match="no parameter that can be trained"):
        tiny.federation(tiny.experiment(model="nothing"), images)
