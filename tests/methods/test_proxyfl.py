"""ProxyFL on the engine against its textbook twin, in float64: clients, the average of class counts, the tuned rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny
from feddure import experiments
from feddure.data.batches import cycle
from feddure.methods.proxyfl import contrast, tune
from feddure.methods.teacher import either_is_sure
from feddure.simulation.server import Answer
from oracle import proxyfl_twin
from oracle.pairing import (
    assert_same,
    experiment_of,
    federation_of,
    flat_of,
    headed_of,
    records_of,
    settings_of,
    twin_round,
)

ROUNDS = 2


def federation(**changes):
    usual = {"threshold": 0.4, "local_epochs": 2, "tuning_epochs": 10, "momentum": 0.6}
    options = {f"proxyfl__{name}": value for name, value in (usual | changes.pop("proxyfl", {})).items()}
    return federation_of(experiment_of("proxyfl", clients_per_round=2, rounds=ROUNDS, **options, **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "group"}, {"proxyfl": {"most_margin": 0.01}}, {"proxyfl": {"threshold": 0.9, "local_epochs": 3}}],
    ids=str,
)
def test_two_rounds_equal_the_twins(changes):
    made = federation(**changes)
    told = experiments.options(made.experiment, "proxyfl")
    settings = replace(settings_of(made.experiment, 0.0), threshold=told.threshold)
    theta, statistics = made.server.state["theta"], made.server.state["statistics"]
    prior = torch.full((4,), 0.25, dtype=torch.float64)
    for number in range(1, ROUNDS + 1):
        tasks = made.tasks()
        results = made.engine.run(tasks)
        sent, counts = [], []
        for task, result in zip(tasks, results, strict=True):
            twin = proxyfl_twin.ProxyFL(headed_of(made, theta, statistics), settings, prior)
            assert_same(result.records, records_of(twin_round(twin, task)))
            sent.append(flat_of(made, twin.theta))
            last = max(1, task.steps // told.local_epochs)
            counts.append(twin.count_classes(last))
            expected = {"theta": sent[-1][0], "statistics": sent[-1][1], "counts": counts[-1]}
            assert set(result.upload) == set(expected)
            assert_same(result.upload, expected)
        sizes = [made.server.image_counts[task.client].total for task in tasks]
        theta, statistics = (
            sum(size * part for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
            for parts in zip(*sent, strict=True)
        )
        prior = told.momentum * prior + (1 - told.momentum) * sum(counts) / sum(counts).sum()
        rows, *uploaded = (rows_of(made, flat) for flat in (theta, *(one for one, _ in sent)))
        before = rows.clone()
        epochs = told.tuning_epochs // ROUNDS
        order = cycle(np.arange(8), 8 * epochs, made.experiment.seed, "proxyfl", number).reshape(epochs, 8)
        rows.copy_(proxyfl_twin.tune(rows, uploaded, order.tolist(), told.tuning_rate, told.most_margin))
        assert (rows - before).abs().max() > 1e-4
        made.finish_round(tasks, results)
        assert_same(made.server.state, {"theta": theta, "statistics": statistics, "prior": prior})


def test_images_that_point_away_from_each_other_are_not_pushed():
    """In a young network all similarities are positive; here half are not."""
    generator = torch.Generator().manual_seed(1)
    z, proxies = (F.normalize(torch.randn(n, 6, generator=generator, dtype=torch.float64)) for n in (20, 4))
    q = (2 * torch.randn(20, 4, generator=generator, dtype=torch.float64)).softmax(1)
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    counted = torch.arange(20) % 3 == 0
    expected = proxyfl_twin.contrast(z, proxies, q, counted.tolist(), prior)
    found = contrast(z, proxies, q, counted, prior, 12)
    torch.testing.assert_close(found, torch.stack(expected[:12]), rtol=1e-12, atol=1e-12)


def rows_of(made, flat):
    network = made.server.program.network
    return network.rows(network.parameters.views(flat))


def test_clients_without_labelled_or_without_unlabelled_images():
    made = federation(norm="group")
    made.server.experiment = made.server.experiment.model_copy(update={"clients_per_round": 4})
    empty, part = np.empty(0, dtype=np.int64), made.partition
    made.partition = replace(
        part, labelled=(empty, *part.labelled[1:]), unlabelled=(part.unlabelled[0], empty, *part.unlabelled[2:])
    )
    tasks = made.tasks()
    assert len(tasks) == 4
    results = made.engine.run(tasks)
    assert not any(result.upload["theta"].isnan().any() for result in results)
    made.finish_round(tasks, results)
    assert made.server.state["prior"].sum().item() == pytest.approx(1)


def test_class_counts_below_zero_are_none():
    server = tiny.federation(tiny.experiment({"method": "proxyfl", "server.norm_bound": 3.0}), tiny.dataset()).server
    answers = [Answer(a.client, 1, server.broadcast(a), {}) for a in server.assignments()]
    for answer in answers:
        sent = answer.received
        counts = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=sent["theta"].dtype)
        answer.upload.update(theta=sent["theta"] + 0.01, statistics=sent["statistics"] + 0.01, counts=counts)
    answers[0].upload["counts"] = torch.tensor([1e30, -1e30, 1.0, 0.0], dtype=torch.float64)
    server.finish_round(answers)
    prior = server.state["prior"]
    assert (prior >= 0).all()
    assert prior.sum() == pytest.approx(1)


def test_one_client_alone_and_no_tuning():
    """One client's rows are the mean's: distances of 0, whose gradient is 0."""
    untuned = federation(proxyfl={"tuning_epochs": 0}).server.method
    rows = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(untuned.tune(rows, rows.repeat(2, 1), 1), rows)
    alone = federation()
    (task, *_) = alone.tasks()
    alone.finish_round([task], alone.engine.run([task]))
    assert alone.server.state["theta"].isfinite().all()


def test_the_order_of_rows_is_a_function_of_seed_and_round():
    rows, uploaded = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    one, again = (federation().server.method.tune(rows, uploaded, 1) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, federation().server.method.tune(rows, uploaded, 2))
    assert not torch.equal(one, federation(seed=5).server.method.tune(rows, uploaded, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("classes", "features", "clients"), [(10, 256, 8), (7, 100, 3), (100, 512, 2)])
def test_the_tuning_on_a_gpu_equals_that_on_a_cpu(classes, features, clients):
    generator = torch.Generator().manual_seed(0)
    rows, uploaded = (torch.randn(n, features, generator=generator).double() for n in (classes, clients * classes))
    orders = torch.stack([torch.randperm(len(uploaded), generator=generator) for _ in range(20)])
    given = rows, uploaded, torch.tensor(0.7, dtype=torch.float64), orders
    expected = tune(*given, 0.05)
    assert (expected - rows).abs().max() > 1e-3
    torch.testing.assert_close(tune(*(tensor.cuda() for tensor in given), 0.05).cpu(), expected, rtol=1e-9, atol=1e-9)
    single = (tensor.cuda() if tensor is orders else tensor.float().cuda() for tensor in given)
    torch.testing.assert_close(tune(*single, 0.05).cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu(images):
    changes = {"method": "proxyfl", "proxyfl.threshold": 0.35, "proxyfl.tuning_epochs": 20, "engine.precision": "fp32"}
    changes["optimizer.epsilon"] = 1e-2
    states = [
        tiny.finished(tiny.experiment(changes | {"engine.device": device}), images).server.state
        for device in ("cpu", "cuda")
    ]
    tiny.assert_near(states[1], states[0], 1e-3)


def test_the_papers_constants():
    told = experiments.options(experiments.build({"method": "proxyfl"}), "proxyfl")
    assert (told.threshold, told.momentum, told.local_epochs) == (0.95, 0.99, 5)
    assert (told.tuning_rate, told.tuning_epochs, told.most_margin) == (0.005, 30_000, 100)


def test_a_confidence_of_exactly_the_threshold_is_sure():
    p, q = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])
    assert either_is_sure(p, q, 0.75).tolist() == [1, 1, 0]
