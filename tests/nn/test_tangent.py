"""The forward-mode derivative of a network, against reverse mode applied twice."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from feddure import nn as networks
from feddure.errors import FeddureWarning
from feddure.nn import tangent
from feddure.nn.network import Network

CPU = torch.device("cpu")


def direction_like(leaves):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]


def by_double_backward(function, leaves, direction):
    """The derivative of `function(leaves)` along `direction`, from the gradient of a gradient."""
    outputs = function(leaves)
    dummy = torch.zeros_like(outputs, requires_grad=True)
    gradients = torch.autograd.grad(outputs, leaves, dummy, create_graph=True, materialize_grads=True)
    product = sum((gradient * along).sum() for gradient, along in zip(gradients, direction, strict=True))
    return torch.autograd.grad(product, dummy)[0]


def assert_tangent_is_exact(module, images, explicit):
    """`explicit` says whether every layer has a rule, or PyTorch's own forward mode takes over."""
    module = module.double()
    network = Network(module, CPU, "fp64")
    assert tangent.supports(network._probing) is explicit
    weights = network.weights(network.take(module)[0])
    direction = direction_like(weights.leaves)

    def logits(leaves):
        named = dict(zip(weights.trained, leaves, strict=True))
        scratch = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return functional_call(module.train(), {**weights.named, **named, **scratch}, (images,))

    found_logits, found = network.tangent(weights, direction, images)
    expected = by_double_backward(logits, weights.leaves, direction)
    assert expected.abs().max() > 1e-3, "a derivative of nothing would prove nothing"
    torch.testing.assert_close(found_logits, logits(weights.leaves), rtol=1e-12, atol=1e-12)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def pixels(channels=3, side=12, count=5):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["cnn", "resnet9-slim", "resnet8"])
def test_built_in_networks(name, norm):
    assert_tangent_is_exact(networks.make(name, 3, 4, norm, seed=0), pixels(), explicit=True)


class Plain(nn.Sequential):
    """A sequence of layers and nothing more."""


LAYERS = {
    "a subclass that only lists layers": Plain(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4)),
    "strides, dilation and groups": nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=2, groups=3),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, padding="same", dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(4 * 49, 4),
    ),
    "batch norm without scale": nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(400, 4)
    ),
    "batch norm of features": nn.Sequential(
        nn.Flatten(), nn.Linear(432, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4, bias=False)
    ),
    "average and overlapping pools": nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        nn.AvgPool2d(2),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(36, 4),
    ),
    "a residual around batch norm": nn.Sequential(
        nn.Conv2d(3, 4, 3),
        tangent.Residual(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))),
        tangent.GlobalMaxPool(),
        nn.Linear(4, 4),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_with_a_rule(name):
    torch.manual_seed(0)
    assert_tangent_is_exact(LAYERS[name], pixels(), explicit=True)


class Skip(nn.Sequential):
    """Looks like a sequence, but adds its input."""

    def forward(self, x):
        return x + super().forward(x)


class Doubled(tangent.Residual):
    """Looks like a residual, but is another."""

    def forward(self, x):
        return 2 * x + self.inner(x)


OTHERS = {
    "an activation without a rule": nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(400, 4)),
    "layer norm": nn.Sequential(nn.Flatten(), nn.LayerNorm(432), nn.Linear(432, 4)),
    "a sequence with a forward of its own": nn.Sequential(
        nn.Conv2d(3, 4, 3), Skip(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), nn.Flatten(), nn.Linear(400, 4)
    ),
    "a residual with a forward of its own": nn.Sequential(
        nn.Conv2d(3, 4, 3), Doubled(nn.Conv2d(4, 4, 1)), nn.Flatten(), nn.Linear(400, 4)
    ),
    "reflecting padding": nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(576, 4)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_fall_back_to_forward_mode(name):
    torch.manual_seed(0)
    assert_tangent_is_exact(OTHERS[name], pixels(), explicit=False)


@pytest.mark.parametrize(
    "frozen", [["0.weight"], ["0.bias"], ["0.weight", "0.bias"], ["2.weight"], ["2.bias"], ["4.weight"]], ids=str
)
def test_frozen_parameters_have_no_part_in_it(frozen):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 4))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    assert_tangent_is_exact(module, pixels(), explicit=True)


class Cube(torch.autograd.Function):
    """x³ with a backward, but without forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Cubed(nn.Module):
    def forward(self, x):
        return Cube.apply(x)


def test_a_layer_without_forward_mode_falls_back_to_double_backward():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), Cubed(), nn.Flatten(), nn.Linear(400, 4))
    with pytest.warns(FeddureWarning, match="double backpropagation"):
        assert_tangent_is_exact(module, pixels(), explicit=False)


def test_layers_with_hooks_are_left_to_pytorch():
    module = networks.make("cnn", 3, 4, "batch", seed=0)
    module[0].register_forward_hook(lambda layer, given, output: 2 * output)
    assert_tangent_is_exact(module, pixels(), explicit=False)
