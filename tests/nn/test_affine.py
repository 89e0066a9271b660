"""Batch norms as affine maps compute what the network computes in evaluation mode, in float64."""

import pytest
import torch
from torch import nn

from feddure import nn as networks
from feddure.nn.affine import Affine, AffineNorms
from feddure.nn.network import Network


class Shared(nn.Module):
    """A batch norm that is used twice, one without scale and shift, one of vectors, one without running statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = self.again = nn.BatchNorm2d(4, eps=1e-2)
        self.bare = nn.BatchNorm2d(4, affine=False)
        self.vectors = nn.BatchNorm1d(4)
        self.untracked = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x):
        x = self.bare(self.again(self.norm(self.first(x)).relu()))
        return self.untracked(self.vectors(x.mean((2, 3))))


def run(module, norms):
    """Logits of the module and of its affine twin, with weights and statistics that are nothing special."""
    network = Network(module, torch.device("cpu"), "fp64")
    theta, statistics = network.take(module)
    generator = torch.Generator().manual_seed(0)
    theta += 0.1 * torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
    statistics += torch.rand(statistics.shape, generator=generator, dtype=theta.dtype)
    images = torch.randn(6, 3, 16, 16, generator=generator, dtype=theta.dtype)
    found = AffineNorms(network._evaluating)
    assert sum(isinstance(layer, Affine) for layer in found.module.modules()) == norms
    state = found.state(network._whole(theta, statistics))
    assert not any("running" in name for name in state if "untracked" not in name)
    return network.evaluate(theta, statistics, images), torch.func.functional_call(found.module, state, (images,))


@pytest.mark.parametrize(
    ("name", "norm", "norms"), [("cnn", "batch", 3), ("resnet9-slim", "batch", 8), ("resnet8", "batch", 9),
                                ("cnn", "group", 0)]
)  # fmt: skip
def test_built_in_networks(name, norm, norms):
    expected, found = run(networks.make(name, 3, 4, norm, seed=1), norms)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_norms_of_ones_own():
    expected, found = run(Shared(), 3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
