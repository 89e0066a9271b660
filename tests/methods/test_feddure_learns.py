"""What the regulators are for: d tells right pseudo labels from wrong ones, F-reg learns which to distrust.

The images are noisy copies of one pattern a class, and the model is warmed up on them just so far that it is usually
right and still has something to learn. Wrong pseudo labels are planted by exchanging rows of θ's last layer.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from feddure.data.batches import Batch
from feddure.simulation.federation import Federation
from feddure.simulation.lanes import Task
from oracle.pairing import CLASSES, client_of, experiment_of, federation_of, flat_of, module_of


def images_of(labels: Tensor, noise: float, seed: int) -> Tensor:
    """A pattern for each class, and noise that the seed decides."""
    patterns = torch.randn(CLASSES, 3, 6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    flat = labels.reshape(-1)
    images = patterns[flat] + noise * torch.randn(len(flat), 3, 6, 6, generator=generator, dtype=torch.float64)
    return images.unflatten(0, labels.shape)


def batch_of(labels: Tensor, classes: Tensor, seed: int) -> Batch:
    """A batch (or, with one more dimension, a round's batches) of these labelled and unlabelled classes."""
    weak, strong = images_of(classes, 0.5, seed + 1), images_of(classes, 0.5, seed + 2)
    return Batch(
        images_of(labels, 1.0, seed), labels, plain=weak, weak=weak, strong=strong, truth=classes, index=classes
    )


def warmed_up(federation: Federation, task: Task, exchange: list[int] | None = None) -> dict[str, Tensor]:
    """The received model after some training; class c is then called exchange[c]."""
    model = module_of(federation, task.received["theta"], task.received["statistics"])
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    labels = torch.arange(64) % CLASSES
    for step in range(14):
        adam.zero_grad()
        F.cross_entropy(model(images_of(labels, 1.0, step)), labels).backward()
        adam.step()
    last = model[-1]
    if exchange is not None:
        with torch.no_grad():
            last.weight[exchange] = last.weight.clone()
            last.bias[exchange] = last.bias.clone()
    theta, statistics = flat_of(federation, model)
    return {"theta": theta, "statistics": statistics}


@pytest.mark.parametrize("method", ["feddure", "c-reg", "avg-c-reg"])
def test_d_is_positive_for_right_pseudo_labels_and_negative_for_wrong_ones(method):
    federation = federation_of(experiment_of(method, norm="group"))
    task = federation.tasks()[0]
    good = warmed_up(federation, task)
    wrong = warmed_up(federation, task, exchange=[1, 2, 3, 0])
    task = replace(task, received={**task.received, **good, "phi": good["theta"]})
    for seed in range(0, 40, 10):
        batch = batch_of(torch.arange(8) % CLASSES, torch.arange(16) % CLASSES, 100 + seed)
        found = {}
        for name, theta in (("right", good["theta"]), ("wrong", wrong["theta"])):
            client = client_of(federation, task)  # φ is good, whatever θ says
            client.theta.copy_(theta)
            found[name] = federation.server.method.step(client, batch)
        assert torch.equal(found["right"]["pseudo"], batch.truth)
        assert torch.equal(found["wrong"]["pseudo"], (batch.truth + 1) % CLASSES)
        assert found["right"]["d"] > 0
        assert found["wrong"]["d"] < 0


def weights_over_rounds(exchange: list[int] | None, rounds: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """F-reg's weights in the first step of the first and of the last round, and which pseudo labels are right.

    The client has unlabelled images of classes 0, 1 and 3 only, labelled ones of all four, and F-reg remembers.
    """
    experiment = experiment_of("feddure", norm="group", feddure__f_reg_memory="client", optimizer__learning_rate=5e-3)
    federation = federation_of(experiment)
    task = federation.tasks()[0]
    received = warmed_up(federation, task, exchange)
    labels, classes = (torch.arange(8) % 4).repeat(3, 1), torch.tensor([0, 1, 3]).repeat(3, 5)
    memory: dict[str, Tensor] = {}
    weights = []
    for number in range(rounds):
        batches = batch_of(labels, classes, 1000 + 10 * number)
        (result,) = federation.engine.run([replace(task, batches=batches, received=received, memory=memory)])
        memory = result.memory
        weights.append(result.records["weight"][0])
    return weights[0], weights[-1], result.records["pseudo"][0] == classes[0]


def test_f_reg_learns_to_distrust_the_class_whose_pseudo_labels_are_wrong():
    first, last, right = weights_over_rounds(exchange=[0, 1, 3, 2])  # class 3 is called 2, always wrongly
    assert right.tolist() == [True, True, False] * 5
    assert last[~right].max() < first[~right].min() - 0.1
    assert last[right].mean() > last[~right].mean() + 0.3


def test_f_reg_learns_to_trust_the_same_images_when_their_pseudo_labels_are_right():
    first, last, right = weights_over_rounds(exchange=None)
    assert right.all()
    assert last.min() > first.max() + 0.1
