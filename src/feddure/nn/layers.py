"""The block all built-in networks are made of."""

from torch import nn


def conv_norm(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    """3×3 convolution with bias, normalisation, ReLU.

    In front of batch norm the bias has a gradient of exactly zero, which Adam would turn into noise of up to
    one learning rate a step. It stays in the state, at zero, and is not trained.
    """
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    if norm == "batch":
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        conv.bias.requires_grad_(False)  # type: ignore[union-attr]
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())
    return nn.Sequential(conv, nn.GroupNorm(_groups(outputs), outputs), nn.ReLU())


def _groups(channels: int) -> int:
    return max(groups for groups in (1, 2, 4, 8) if channels % groups == 0)
