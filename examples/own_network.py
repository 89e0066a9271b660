"""A network of your own: any `nn.Module` that takes images and gives logits.

    python examples/own_network.py

Nothing has to be registered and no layer is forbidden. FedDure needs the network's forward-mode derivative; where a
layer has no rule of its own in this package (GELU here), PyTorch's general one is used.
"""

import argparse

from torch import nn

import feddure


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with GELU and batch norm."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(16, 16, 5, padding=2, groups=16),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 48, 1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * 48, classes)

    def forward(self, images):
        return self.head(self.features(images))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    run = feddure.run("demo", method="feddure", model=Separable, rounds=rounds)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"{parameters:,} parameters, accuracy {run.summary.accuracy_last:.3f}, report in {run.folder}")
