"""The built-in networks: ResNet-9, the network of the paper, and a small one for CPUs."""

import torch
from torch import nn

from feddure.nn.tangent import GlobalMaxPool, Residual

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Normalisation layers."""


class ResNet9(nn.Sequential):
    """Blocks of 3×3 convolution, normalisation and ReLU; `width` is the number of channels of the first.

    prep → 64, 64 → 128 + pool, residual(128), 128 → 256 + pool, 256 → 512 + pool, residual(512), a max pool over
    what is left of the image, one linear layer. The residual sum has no ReLU of its own. 6,575,370 parameters at
    3×32×32 and 10 classes.
    """

    def __init__(self, channels: int, classes: int, norm: str = "batch", width: int = 64):
        super().__init__(
            _block(channels, width, norm),
            _block(width, 2 * width, norm),
            nn.MaxPool2d(2),
            Residual(nn.Sequential(*(_block(2 * width, 2 * width, norm) for _ in range(2)))),
            _block(2 * width, 4 * width, norm),
            nn.MaxPool2d(2),
            _block(4 * width, 8 * width, norm),
            nn.MaxPool2d(2),
            Residual(nn.Sequential(*(_block(8 * width, 8 * width, norm) for _ in range(2)))),
            GlobalMaxPool(),
            nn.Linear(8 * width, classes),
        )


class SmallCNN(nn.Sequential):
    """Three convolution blocks, pooled, and a linear layer: seconds a round on a CPU."""

    def __init__(self, channels: int, classes: int, norm: str = "batch", width: int = 16):
        super().__init__(
            _block(channels, width, norm),
            nn.MaxPool2d(2),
            _block(width, 2 * width, norm),
            nn.MaxPool2d(2),
            _block(2 * width, 4 * width, norm),
            GlobalMaxPool(),
            nn.Linear(4 * width, classes),
        )


def without_norms(module: nn.Module) -> nn.Module:
    """Take normalisation layers and biases out of a module, in place.

    Biases stay in the state, at zero, and are not trained. Nothing else now keeps the signal from fading from layer
    to layer, so that weights are drawn anew with variance 1 / fan-in.
    """
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, NORMS):
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, nn.Identity())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.rpartition(".")[2] == "bias":
                parameter.zero_().requires_grad_(False)
            elif parameter.dim() >= 2:
                nn.init.kaiming_normal_(parameter, nonlinearity="linear")
    return module


def _block(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    """3×3 convolution with bias, normalisation, ReLU.

    In front of batch norm the bias has a gradient of exactly zero, which Adam would turn into noise of up to
    one learning rate a step. It stays in the state, at zero, and is not trained.
    """
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    if norm == "batch":
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        conv.bias.requires_grad_(False)  # type: ignore[union-attr]
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())
    groups = max(groups for groups in (1, 2, 4, 8) if outputs % groups == 0)
    return nn.Sequential(conv, nn.GroupNorm(groups, outputs), nn.ReLU())
