"""Evaluation against a direct loop over test images with an ordinary module."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny
from feddure import nn as networks
from feddure.data.batches import DeviceImages
from feddure.data.dataset import check
from feddure.errors import FeddureWarning
from feddure.simulation import evaluate as evaluation
from feddure.simulation.evaluate import evaluate, to_record
from oracle import metrics_twin


def plain_module(federation):
    experiment, dataset = federation.experiment, federation.dataset
    made = networks.make(experiment.model, dataset.shape[2], len(dataset.classes), experiment.norm, 99).double()
    missing, unexpected = made.load_state_dict(federation.server.model_state(), strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return made.eval()


def by_hand(module, dataset):
    """The same quantities, one image at a time."""
    classes = len(dataset.classes)
    confusion = [[0] * classes for _ in range(classes)]
    loss = 0.0
    feed = DeviceImages(dataset, torch.device("cpu"), torch.float64)
    for image, label in feed.test_batches(1):
        with torch.no_grad():
            logits = module(image)
        loss += F.cross_entropy(logits, label).item()
        confusion[label.item()][logits.argmax(1).item()] += 1
    right = [confusion[number][number] for number in range(classes)]
    return {
        "accuracy": sum(right) / len(dataset.test_labels),
        "loss": loss / len(dataset.test_labels),
        "per_class": [count / max(sum(row), 1) for count, row in zip(right, confusion, strict=True)],
        "confusion": confusion,
    }


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_evaluation_equals_a_direct_loop(images, norm):
    federation = tiny.finished(
        tiny.experiment({"norm": norm, "method": "fedavg-sl", "optimizer.learning_rate": 0.01}), images
    )
    found, expected = federation.server.test()["test"], by_hand(plain_module(federation), images)
    assert found["confusion"] == expected["confusion"]
    assert found["accuracy"] == expected["accuracy"]
    assert found["per_class"] == pytest.approx(expected["per_class"], rel=1e-15)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert len({row.index(max(row)) for row in found["confusion"]}) > 1, "the model predicts one class alone"


def test_a_test_set_larger_than_one_piece():
    many = tiny.dataset(tests=1203)
    federation = tiny.federation(tiny.experiment(), many)
    found = federation.server.test()["test"]
    assert sum(map(sum, found["confusion"])) == 1203
    assert found["loss"] == pytest.approx(by_hand(plain_module(federation), many)["loss"], rel=1e-12)


def test_a_class_without_test_images_counts_as_never_right(images):
    kept = images.test_labels != 2
    few = tiny.dataset(test_images=images.test_images[kept], test_labels=images.test_labels[kept])
    found = tiny.federation(tiny.experiment(), few).server.test()["test"]
    assert found["per_class"][2] == 0.0
    assert found["confusion"][2] == [0, 0, 0, 0]


def test_static_statistics_are_those_of_the_clients_images(images):
    """They are measured with the global model on plain images of the round's clients; nothing is averaged."""
    experiment = tiny.experiment(batch_norm="static", clients_per_round=4)
    federation = tiny.finished(experiment, images)
    module = plain_module(federation).train()
    norms = [layer for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    expected = {name: buffer.clone() for name, buffer in module.named_buffers() if buffer.dim()}
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over batches
    with torch.no_grad():
        feed = DeviceImages(images, torch.device("cpu"), torch.float64)
        module(feed.plain(range(len(images.images))))  # all four clients own all images: one batch, any order
    found = {name: buffer for name, buffer in module.named_buffers() if buffer.dim()}
    tiny.assert_near(found, expected, 1e-9)


def test_static_statistics_change_evaluation_alone(images):
    averaged = tiny.finished(tiny.experiment(), images)
    static = tiny.finished(tiny.experiment(batch_norm="static"), images)
    tiny.assert_equal(static.server.state, averaged.server.state)
    assert static.server.test()["test"]["loss"] != averaged.server.test()["test"]["loss"]


def test_static_statistics_without_batch_norm_change_nothing(images):
    averaged = tiny.finished(tiny.experiment(norm="group"), images)
    static = tiny.finished(tiny.experiment(norm="group", batch_norm="static"), images)
    assert static.server.test() == averaged.server.test()


def test_a_network_that_compiles_for_training_alone_is_evaluated_as_it_is(images):
    def refuse(state, pixels):
        raise RuntimeError("no compiler for this")

    federation = tiny.federation(tiny.experiment(), images)
    expected = federation.server.test()
    network = federation.server.program.network
    network.compiled, network._evaluate = True, refuse
    with pytest.warns(FeddureWarning, match="does not compile and runs uncompiled .*no compiler for this"):
        assert federation.server.test() == expected
    assert not network.compiled
    assert federation.server.test() == expected


def test_a_compiled_network_is_evaluated_in_pieces_of_one_size(images):
    federation = tiny.federation(tiny.experiment(), images)
    expected, seen = federation.server.test(), []
    network = federation.server.program.network
    run = network._evaluate

    def compiled(state, pixels):
        seen.append((pixels.shape, pixels.stride()))
        return run(state, pixels)

    network.compiled, network._evaluate, network.piece = True, compiled, 16
    found = federation.server.test()["test"]
    assert found["loss"] == pytest.approx(expected["test"]["loss"])
    assert found["confusion"] == expected["test"]["confusion"]
    model = federation.server.method.global_model(federation.server.state)
    network.evaluate_many(*model, torch.zeros(2, *seen[0][0][1:], dtype=network.compute))
    assert len(images.test_labels) == 60
    assert len(seen) == 4 + 1
    assert len(set(seen)) == 1


def test_a_network_that_does_not_compile_trains_as_it_is(images):
    def refuse(*arguments):
        raise RuntimeError("no compiler for this")

    federation, plain = (tiny.federation(tiny.experiment(method="fedavg-matched"), images) for _ in range(2))
    network = federation.server.program.network
    assert network is not plain.server.program.network
    network.compiled, network._forward = True, refuse
    with pytest.warns(FeddureWarning, match="does not compile and runs uncompiled"):
        tiny.play_round(federation)
    tiny.play_round(plain)
    tiny.assert_equal(federation.server.state, plain.server.state)


def test_a_lack_of_memory_is_not_taken_for_a_network_that_does_not_compile(images):
    def refuse(state, pixels):
        raise torch.cuda.OutOfMemoryError("no memory left")

    federation = tiny.federation(tiny.experiment(), images)
    network = federation.server.program.network
    network.compiled, network._evaluate = True, refuse
    with pytest.raises(torch.cuda.OutOfMemoryError):
        federation.server.test()
    assert network.compiled


# --- metrics -----------------------------------------------------------------------------------------------


def evaluated(logits, labels):
    """What `evaluate` says of a network that gives these logits."""
    network = SimpleNamespace(evaluator=lambda theta, statistics: lambda pixels: pixels, piece=7)
    pieces = [(logits[:7], labels[:7]), (logits[7:], labels[7:])]
    images = SimpleNamespace(device=logits.device, test_batches=lambda size: pieces, test_site=None)
    return evaluate(network, None, None, images, logits.shape[1])


@pytest.mark.parametrize(("images", "classes", "absent"), [(60, 4, None), (41, 3, 1), (30, 2, None), (9, 5, 0)])
def test_metrics_equal_those_of_single_images(monkeypatch, images, classes, absent):
    """Small whole logits make ties; classes without images are left out of the means."""
    random = torch.Generator().manual_seed(images)
    logits = torch.randint(0, 4, (images, classes), generator=random).double()
    labels = torch.randint(0, classes, (images,), generator=random)
    labels[labels == absent] = classes - 1
    monkeypatch.setattr(evaluation, "_MOST_SCORES", 2 * images)  # classes in parts of two
    found = to_record(evaluated(logits, labels), classes)
    expected = metrics_twin.metrics(logits.softmax(1).tolist(), labels.tolist())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert sum(found["calibration"]["images"]) == images


def test_metrics_are_those_of_scikit_learn():
    """Numbers of scikit-learn 1.9 for the same predictions; specificity is its recall of all other classes as one."""
    logits = [
        [2, 1, 0],
        [0, 2, 1],
        [1, 1, 3],
        [3, 0, 0],
        [1, 2, 0],
        [0, 1, 1],
        [2, 0, 2],
        [1, 0, 0],
        [0, 3, 1],
        [0, 0, 1],
    ]
    labels = [0, 1, 2, 0, 0, 1, 2, 1, 1, 2]
    found = to_record(evaluated(torch.tensor(logits).float(), torch.tensor(labels)), 3)
    names = ("accuracy", "balanced_accuracy", "macro_f1", "auroc")
    expected = (0.7, 0.6944444444444443, 0.7071428571428572, 0.9126984126984127)
    assert [found[name] for name in names] == pytest.approx(expected)
    assert found["per_class"] == pytest.approx([2 / 3, 0.75, 2 / 3])
    assert found["specificity"] == pytest.approx([0.7142857142857143, 0.8333333333333334, 1.0])


def test_what_no_image_tells_is_none():
    logits, labels = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(12, dtype=torch.long)
    found = to_record(evaluated(logits, labels), 3)
    assert found["auroc"] is None
    assert found["specificity"][0] is None
    assert found["balanced_accuracy"] == found["accuracy"] == found["per_class"][0]
    logits[3] = torch.nan
    labels[0] = 1
    found = to_record(evaluated(logits, labels), 3)
    assert found["auroc"] is found["ece"] is None
    assert sum(map(sum, found["confusion"])) == 12


def test_evaluating_waits_for_no_number():
    """Tensors without data cannot be read: whatever fetched a value would fail."""
    logits, labels = torch.empty(12, 3, device="meta"), torch.empty(12, dtype=torch.long, device="meta")
    assert evaluated(logits, labels).device.type == "meta"


def test_the_averaged_model_and_validation_images_have_every_metric(images):
    federation = tiny.federation(tiny.experiment({"server.ema": 0.5, "validation": 0.25}), images)
    found = federation.train_round()
    every = {"accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece", "specificity", "calibration"}
    for name in ("test", "test_ema", "validation", "validation_ema"):
        assert every <= found[name].keys()


def test_each_site_has_the_accuracy_on_its_own_test_images(images):
    own = np.array([0, 1, -1, 0, 3] * 12)
    sites = {"sites": ("n", "e", "s", "w"), "site": np.arange(len(images.labels)) % 4, "test_site": own}
    with_sites = check(dataclasses.replace(images, **sites), "here")
    found = tiny.federation(tiny.experiment(), with_sites).server.test()["test"]
    for site, name in enumerate(("n", "e", "w")):
        number = {"w": 3}.get(name, site)
        kept = own == number
        few = dataclasses.replace(images, test_images=images.test_images[kept], test_labels=images.test_labels[kept])
        alone = tiny.federation(tiny.experiment(), few).server.test()["test"]
        assert found["by_site"][name] == {"images": kept.sum(), "accuracy": alone["accuracy"]}
    assert "s" not in found["by_site"]
    assert found["accuracy"] == tiny.federation(tiny.experiment(), images).server.test()["test"]["accuracy"]
