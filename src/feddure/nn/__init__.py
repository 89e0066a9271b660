"""Networks: the built-in ones by name, a user's own by import path."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
            maker = _REGISTERED.get(name) or import_by_path(name, "model", [*NETWORKS, *_REGISTERED])
            module = maker(channels=channels, classes=classes)
        return normalisation.remove(module) if norm == "none" else module


def import_by_path(path: str, field: str, known: list[str]) -> Any:
    """The object that `package.module:name` names, or an error that says what the field accepts."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"{field}: '{path}' is not known; use one of {', '.join(known)}, or package.module:Name")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{field}: '{module}' cannot be imported ({error})") from None
    except AttributeError:
        raise ConfigError(f"{field}: module '{module}' has no '{name}'") from None
