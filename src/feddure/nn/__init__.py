"""Networks: the built-in ones by name, a user's own by import path."""

import inspect
import re
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

ARGUMENTS = (("channels", "classes"), ("in_chans", "num_classes"), ("in_channels", "num_classes"), ("num_classes",))
"""What networks of users are called with: ours, or what torchvision and timm call the same."""

_REGISTERED: dict[str, Callable[..., nn.Module]] = {}


def register(name: str, maker: Callable[..., nn.Module]) -> None:
    """Make `model: name` mean `maker(channels=…, classes=…)`, or with the names of `ARGUMENTS` that it has."""
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
            module = _call(maker, name, channels, classes, seed)
        return without_norms(module) if norm == "none" else module


def _call(maker: Callable[..., nn.Module], name: str, channels: int, classes: int, seed: int) -> nn.Module:
    """A network of the user's own, by whichever of `ARGUMENTS` it takes."""
    sizes = {"channels": channels, "in_channels": channels, "in_chans": channels}
    sizes |= {"classes": classes, "num_classes": classes}
    taken = inspect.signature(maker)
    passes_on = any(one.kind is one.VAR_KEYWORD for one in taken.parameters.values())
    # What passes any argument on may also swallow those that it does not know, and then has 1000 classes.
    unnamed = passes_on and not {"channels", "classes"} <= taken.parameters.keys()
    for names in (*ARGUMENTS[1:], ARGUMENTS[0]) if unnamed else ARGUMENTS:
        given = {argument: sizes[argument] for argument in names}
        try:
            taken.bind(**given)
        except TypeError:
            continue
        torch.manual_seed(seed)
        try:
            return maker(**given)
        except TypeError as error:
            if not passes_on or not re.search(r"unexpected keyword argument|missing \d+ required", str(error)):
                raise  # a mistake inside, which its own lines tell best
    raise ConfigError(
        f"model '{name}' takes ({', '.join(map(str, taken.parameters.values()))}), expected a class or function with "
        "the arguments channels and classes, or num_classes as in torchvision and timm"
    )
