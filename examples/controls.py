"""The controls that a sceptic asks for, where options do not suffice: methods and data sets of controls.yaml.

Both data sets fix which 5,000 images carry a label, 500 of each class: as many as the paper's.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import Tensor

import feddure
from feddure import rng
from feddure.methods.fedavg import FedAvgMatched
from feddure.methods.fedtutor import FedTutor

LABELLED = 500
"""Labelled images of each class."""

NOISE = 0.2
"""Share of wrong labels."""


class TrueLabels(FedTutor):
    """FedTutor's pass with the true classes of the unlabelled images in the tutor's place: the ceiling."""

    needs = feddure.Needs(strong=True)
    source = "global"  # nothing but the model is sent

    def before_steps(self, client: feddure.Client, batches: feddure.Batch) -> dict[str, Tensor]:
        return {"unlabelled": F.one_hot(batches.truth, client.classes).to(client.theta.dtype)}


class StrongLabels(FedAvgMatched):
    """Labels only, with the strong view T_s of the labelled images in place of the weak one."""

    needs = feddure.Needs(labelled="strong")


def noisy_labels(data_dir: Path) -> feddure.Dataset:
    """CIFAR-10 with a wrong class on a fifth of its labelled images; the unlabelled and the test images are as ever."""
    data = feddure.load_dataset("cifar10", data_dir)
    labelled = _first_of_each_class(data, LABELLED)
    wrong = labelled[rng.sample(len(labelled), round(NOISE * len(labelled)), "noisy labels")]
    labels, classes = data.labels.copy(), len(data.classes)
    labels[wrong] = (labels[wrong] + 1 + rng.integers(classes - 1, len(wrong), "noisy classes")) % classes
    marked = np.zeros(len(labels), dtype=bool)
    marked[labelled] = True
    return replace(data, name="cifar10-noisy", labels=labels, labelled=marked)


def fashion_unlabelled(data_dir: Path) -> feddure.Dataset:
    """CIFAR-10's labelled images, and as many of Fashion-MNIST as CIFAR-10 has others, in three channels.

    Images of unknown class would be dealt by a single Dirichlet draw, as if they were one class: some clients would own
    thousands, most a handful. So these keep the numbers of their own ten classes, and every client gets exactly as
    many as it gets of CIFAR-10. No method sees the numbers, but `pseudo_accuracy` means nothing here.
    """
    data, fashion = (feddure.load_dataset(name, data_dir) for name in ("cifar10", "fashion-mnist"))
    labelled = _first_of_each_class(data, LABELLED)
    others = _first_of_each_class(fashion, len(data.labels) // len(data.classes) - LABELLED)
    margin = (data.shape[0] - fashion.shape[0]) // 2
    padded = np.pad(fashion.images[others], ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    return replace(
        data,
        name="cifar10-fashion",
        images=np.concatenate([data.images[labelled], padded.repeat(data.shape[2], axis=3)]),
        labels=np.concatenate([data.labels[labelled], fashion.labels[others]]),
        labelled=np.arange(len(labelled) + len(others)) < len(labelled),
    )


def _first_of_each_class(data: feddure.Dataset, number: int) -> np.ndarray:
    return np.concatenate([np.flatnonzero(data.labels == label)[:number] for label in range(len(data.classes))])
