"""The built-in networks: ResNet-9, the network of the paper, ResNet-8, that of SAGE, and a small one for CPUs."""

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


class ResNet8(nn.Sequential):
    """The network of SAGE (CVPR 2025): a stem of 64, then one basic block each of 64, 128 and 256, halving the image.

    No convolution biases, ReLU after the sum, an average pool. 1,227,594 parameters at 3 channels and 10 classes.
    """

    def __init__(self, channels: int, classes: int, norm: str = "batch"):
        super().__init__(
            *_convolution(channels, 64, norm),
            nn.ReLU(),
            *_basic_block(64, 64, norm, stride=1),
            *_basic_block(64, 128, norm, stride=2),
            *_basic_block(128, 256, norm, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(256, classes),
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


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
    return nn.Sequential(conv, _norm(outputs, norm), nn.ReLU())


def _basic_block(inputs: int, outputs: int, norm: str, stride: int) -> tuple[nn.Module, nn.Module]:
    inner = nn.Sequential(
        *_convolution(inputs, outputs, norm, stride=stride), nn.ReLU(), *_convolution(outputs, outputs, norm)
    )
    same = inputs == outputs and stride == 1
    shortcut = None if same else nn.Sequential(*_convolution(inputs, outputs, norm, kernel=1, stride=stride))
    return Residual(inner, shortcut), nn.ReLU()


def _convolution(inputs: int, outputs: int, norm: str, kernel: int = 3, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return conv, _norm(outputs, norm)


def _norm(channels: int, norm: str) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(max(groups for groups in (1, 2, 4, 8) if channels % groups == 0), channels)
