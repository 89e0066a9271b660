"""A network of your own: any `nn.Module` that takes images and gives logits.

    python examples/own_network.py

Nothing has to be registered and no layer is forbidden. FedDure needs the network's forward-mode derivative; where a
layer has no rule of its own in this package (GELU here), PyTorch's general one is used.
"""

import argparse

from torch import nn

import feddure


class Patches(nn.Module):
    """Patches of 4 × 4 pixels, mixed by a depthwise and a pointwise convolution with GELU and batch norm."""

    def __init__(self, channels: int, classes: int, width: int = 48):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 4, stride=4),
            nn.GELU(),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.GELU(),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, width, 1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
        )
        self.head = nn.Linear(9 * width, classes)

    def forward(self, images):
        return self.head(self.features(images))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    run = feddure.run("demo", method="feddure", model=Patches, setting="iid-iid", rounds=rounds)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"{parameters:,} parameters, accuracy {run.summary.accuracy_last:.3f}, report in {run.folder}")
