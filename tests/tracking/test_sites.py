"""Accuracy under a client's own class mix, against a sum by hand over its own images."""

import numpy as np
import pytest

import tiny
from feddure.data import partition
from feddure.tracking import schema
from feddure.tracking.sites import mean_own_mix, site_accuracies

PARTITION = {"labelled": [[1, 1, 0], [0, 0, 2], [0, 0, 0]], "unlabelled": [[3, 1, 0], [0, 2, 0], [0, 0, 0]]}
CONFUSION = [[10, 0, 0], [0, 10, 0], [0, 0, 10]]


def evaluated(number, accuracy, per_class, **more):
    return {
        "round": number,
        "test": {"accuracy": accuracy, "per_class": per_class, "confusion": CONFUSION} | more,
    }


def test_shares_weigh_the_classes():
    metrics = [evaluated(1, 0.5, [1.0, 0.5, 0.0]), {"round": 2}, evaluated(3, 0.7, [0.5, 0.5, 1.0])]
    first, second, nothing = site_accuracies(metrics, PARTITION)
    assert first == (0, pytest.approx(4 / 6 * 0.75 + 2 / 6 * 0.5), pytest.approx(0.6))
    assert second == (1, pytest.approx(0.5 * 0.5 + 0.5 * 0.5), pytest.approx(0.6))
    assert nothing.own_mix is None
    assert mean_own_mix(metrics, PARTITION) == pytest.approx((first.own_mix + second.own_mix) / 2)
    assert site_accuracies(metrics, PARTITION, "test_ema") == []
    assert site_accuracies(metrics, {"classes": ["a"]}) == []


def test_the_last_ten_evaluations_count_and_classes_that_are_tested():
    metrics = [evaluated(n, 0.1 * (n > 2), [0.1 * (n > 2), 0.0, 0.0]) for n in range(1, 13)]
    for record in metrics:
        record["test"]["confusion"] = [[5, 5, 0], [0, 0, 0], [0, 0, 10]]
    assert site_accuracies(metrics, PARTITION)[0] == (0, pytest.approx(0.1), pytest.approx(0.1))


def test_alone_each_client_has_its_own_model_and_what_it_misses_is_left_out():
    metrics = [
        evaluated(1, 0.4, [0.4] * 3, by_client={"0": 0.4}, per_class_by_client={"0": [1.0, 0.0, 0.0]}),
        evaluated(
            2,
            0.5,
            [0.5] * 3,
            by_client={"0": 0.6, "1": 0.2},
            per_class_by_client={"0": [0.0] * 3, "1": [0.0, 0.0, 1.0]},
        ),
    ]
    assert site_accuracies(metrics, PARTITION) == [
        (0, pytest.approx(4 / 6 * 0.5), pytest.approx(0.5)),
        (1, pytest.approx(0.5), pytest.approx(0.2)),
    ]


@pytest.mark.parametrize(
    "strange",
    [
        {"accuracy": 0.5},
        {"accuracy": None, "per_class": [0.5] * 3, "confusion": CONFUSION},
        {"accuracy": 0.5, "per_class": [0.5, None, 0.5], "confusion": CONFUSION},
        {"accuracy": 0.5, "per_class": [0.5] * 2, "confusion": [[1, 1]] * 2},
        {"accuracy": 0.5, "per_class": [0.5] * 3, "by_client": {"9": 0.1}, "per_class_by_client": {"9": [0.1] * 3}},
    ],
)
def test_evaluations_of_strangers_that_say_too_little_do_not_count(strange):
    assert not schema.problem(strange, schema.Evaluation)
    good = evaluated(1, 0.5, [1.0, 0.5, 0.0])
    assert site_accuracies([good, {"round": 2, "test": strange}], PARTITION) == site_accuracies([good], PARTITION)
    assert site_accuracies([{"round": 2, "test": strange}], PARTITION) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"by_client": 5},
        {"by_client": {"0": None}},
        {"per_class_by_client": {"0": [0.1] * 3}},
        {"per_class_by_client": {"0": [0.1] * 2}, "by_client": {"0": 0.1}},
        {"per_class_by_client": {"0": [0.1, None, 0.1]}, "by_client": {"0": 0.1}},
    ],
)
def test_what_no_run_writes_of_clients_is_refused(wrong):
    assert schema.problem({"accuracy": 0.5, "per_class": [0.5] * 3} | wrong, schema.Evaluation)


@pytest.mark.parametrize("method", ["local", "fedavg-matched"])
def test_a_run_records_what_is_needed(method):
    """Σ_c s_c a_c is the accuracy on test images drawn with the client's own mix."""
    images = tiny.dataset()
    federation = tiny.federation(tiny.experiment({"method": method, "clients_per_round": 4, "rounds": 2}), images)
    metrics = [federation.train_round() for _ in range(2)]
    found = site_accuracies(metrics[1:], partition.summarise(federation.partition, images))
    assert [site.client for site in found] == [0, 1, 2, 3]
    server = federation.server
    models = server.method.client_models(server.memories) or dict.fromkeys(
        range(4), server.method.global_model(server.state)
    )
    pixels, labels = next(federation.images.test_batches(1000))
    for site in found:
        right = (server.program.network.evaluate(*models[site.client], pixels).argmax(1) == labels).double()
        owned = np.concatenate(
            [federation.partition.labelled[site.client], federation.partition.unlabelled[site.client]]
        )
        classes = images.labels[owned]
        by_image = [right[labels == label].mean().item() for label in classes]
        assert site.own_mix == pytest.approx(np.mean(by_image))
        assert site.common == pytest.approx(right.mean().item())
