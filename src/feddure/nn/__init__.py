"""Networks: the built-in ones by name, a user's own by import path."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from feddure import plugins
from feddure.errors import ConfigError
from feddure.nn.networks import ResNet8, ResNet9, SmallCNN, without_norms

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet9": ResNet9,
    "resnet9-slim": partial(ResNet9, width=16),
    "resnet8": ResNet8,
    "cnn": SmallCNN,
}
TITLES = {"resnet9": "ResNet-9", "resnet9-slim": "ResNet-9 slim", "resnet8": "ResNet-8", "cnn": "CNN"}
"""Networks as people write their names."""

_REGISTERED: dict[str, Callable[..., nn.Module]] = {}


def register(name: str, maker: Callable[..., nn.Module]) -> None:
    """Make `model: name` mean `maker(channels=…, classes=…)`."""
    _REGISTERED[name] = maker
    plugins.allow(name)


def make(name: str, channels: int, classes: int, norm: str, seed: int) -> nn.Module:
    """A freshly initialised network; the same seed gives the same weights on every device.

    `norm: none` takes normalisation layers and biases out of any network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in NETWORKS:
            module = NETWORKS[name](channels, classes, norm=norm)
        else:
            maker = _REGISTERED.get(name) or plugins.find(name, "model", [*NETWORKS, *_REGISTERED], ConfigError)
            module = maker(channels=channels, classes=classes)
        return without_norms(module) if norm == "none" else module
