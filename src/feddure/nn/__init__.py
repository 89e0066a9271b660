"""Networks: the built-in ones by name, a user's own by import path."""

from collections.abc import Callable

import torch
from torch import nn

from feddure import plugins
from feddure.errors import ConfigError
from feddure.nn import normalisation
from feddure.nn.cnn import SmallCNN
from feddure.nn.resnet import ResNet9

_REGISTERED: dict[str, Callable[..., nn.Module]] = {}


def _resnet9_slim(channels: int, classes: int, norm: str) -> nn.Module:
    return ResNet9(channels, classes, norm, width=16)


NETWORKS: dict[str, Callable[..., nn.Module]] = {"resnet9": ResNet9, "resnet9-slim": _resnet9_slim, "cnn": SmallCNN}


def register(name: str, maker: Callable[..., nn.Module]) -> None:
    """Make `model: name` mean `maker(channels=…, classes=…)`."""
    _REGISTERED[name] = maker


def make(name: str, channels: int, classes: int, norm: str, seed: int) -> nn.Module:
    """A freshly initialised network; the same seed gives the same weights on every device.

    `norm: none` takes normalisation layers and biases out of any network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in NETWORKS:
            module = NETWORKS[name](channels, classes, norm)
        else:
            maker = _REGISTERED.get(name) or plugins.find(name, "model", [*NETWORKS, *_REGISTERED], ConfigError)
            module = maker(channels=channels, classes=classes)
        return normalisation.remove(module) if norm == "none" else module
