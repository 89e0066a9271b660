"""A small convolutional network: seconds a round on a CPU."""

from torch import nn

from feddure.nn.layers import conv_norm
from feddure.nn.tangent import GlobalMaxPool


class SmallCNN(nn.Sequential):
    """Three convolution blocks, pooled, and a linear layer."""

    def __init__(self, channels: int, classes: int, norm: str = "batch", width: int = 16):
        super().__init__(
            conv_norm(channels, width, norm),
            nn.MaxPool2d(2),
            conv_norm(width, 2 * width, norm),
            nn.MaxPool2d(2),
            conv_norm(2 * width, 4 * width, norm),
            GlobalMaxPool(),
            nn.Linear(4 * width, classes),
        )
