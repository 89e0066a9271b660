"""ResNet-9, the network of the paper, and slimmer ones.

conv-norm-ReLU blocks 3×3: prep → 64, 64 → 128 + pool, residual(128), 128 → 256 + pool, 256 → 512 + pool,
residual(512), a max pool over what is left of the image, one linear layer. The residual sum has no ReLU of
its own. 6,575,370 parameters at 3×32×32 and 10 classes.
"""

from torch import nn

from feddure.nn.layers import conv_norm
from feddure.nn.tangent import GlobalMaxPool, Residual


class ResNet9(nn.Sequential):
    """The paper's network; `width` is the number of channels of its first block."""

    def __init__(self, channels: int, classes: int, norm: str = "batch", width: int = 64):
        super().__init__(
            conv_norm(channels, width, norm),
            conv_norm(width, 2 * width, norm),
            nn.MaxPool2d(2),
            Residual(_two_blocks(2 * width, norm)),
            conv_norm(2 * width, 4 * width, norm),
            nn.MaxPool2d(2),
            conv_norm(4 * width, 8 * width, norm),
            nn.MaxPool2d(2),
            Residual(_two_blocks(8 * width, norm)),
            GlobalMaxPool(),
            nn.Linear(8 * width, classes),
        )


def _two_blocks(channels: int, norm: str) -> nn.Sequential:
    return nn.Sequential(conv_norm(channels, channels, norm), conv_norm(channels, channels, norm))
