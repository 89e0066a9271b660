import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from feddure.data.dataset import UNKNOWN
from feddure.simulation.diagnostics import auroc, diagnose, probe_drift


def client(weight, pseudo, **further):
    """What a client's steps recorded: rows are steps, columns the images of a batch."""
    arrays = {"weight": weight, "pseudo": pseudo, "loss": [1.0] * len(weight), "loss_unlabelled": [2.0] * len(weight)}
    return {name: np.array(values, dtype=np.float64) for name, values in (arrays | further).items()}


def truth(*steps):
    return np.array(steps, dtype=np.int64)


def counted(score, positive):
    """AUROC by asking every pair."""
    won = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high, right in zip(score, positive, strict=True)
        for low, also_right in zip(score, positive, strict=True)
        if right and not also_right
    ]
    return sum(won) / len(won) if won else None


# Few different scores make many ties.
pairs = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=25)


@settings(deadline=None, max_examples=100)
@given(pairs)
def test_auroc_is_the_share_of_pairs_in_the_right_order(scored):
    score = np.array([value / 7 for value, _ in scored])
    positive = np.array([right for _, right in scored], dtype=bool)
    expected = counted(score, positive)
    assert auroc(score, positive) == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_weights_are_described_by_their_percentiles_over_all_clients():
    weights = np.arange(101) / 100
    clients = [client([weights[:60]], [[0] * 60]), client([weights[60:]], [[0] * 41])]
    found = diagnose(clients, [np.zeros((1, 60), dtype=np.int64), np.zeros((1, 41), dtype=np.int64)], classes=2)
    shown = [found[f"weight_{name}"] for name in ("mean", "p10", "p50", "p90")]
    assert shown == pytest.approx([0.5, 0.1, 0.5, 0.9])


def test_accuracy_counts_images_and_can_be_weighted():
    clients = [client([[1.0, 0.5, 0.5]], [[0, 1, 1]]), client([[0.0], [1.0]], [[2], [2]])]
    found = diagnose(clients, [truth([0, 1, 0]), truth([0], [2])], classes=3)
    assert found["pseudo_accuracy"] == pytest.approx(3 / 5)
    assert found["pseudo_accuracy_weighted"] == pytest.approx(2.5 / 3.0)
    assert found["weight_auroc"] == pytest.approx(counted([1.0, 0.5, 0.5, 0.0, 1.0], [True, True, False, False, True]))


def test_accuracy_weighted_by_nothing_is_not_known():
    found = diagnose([client([[0.0, 0.0]], [[0, 1]])], [truth([0, 0])], classes=2)
    assert found["pseudo_accuracy"] == 0.5
    assert found["pseudo_accuracy_weighted"] is None
    assert found["weight_auroc"] == 0.5


def test_accuracy_and_coverage_go_by_the_true_class():
    steps = client([[0.2, 0.4], [1.0, 0.0]], [[0, 1], [1, 0]])
    found = diagnose([steps], [truth([0, 0], [1, 1])], classes=3)
    assert found["pseudo_accuracy_per_class"] == [0.5, 0.5, None]
    assert found["coverage_per_class"] == pytest.approx([0.3, 0.5, None])


def test_images_of_unknown_class_count_for_weights_alone():
    steps = client([[0.2, 0.6, 1.0]], [[0, 1, 1]])
    found = diagnose([steps], [truth([0, UNKNOWN, 0])], classes=2)
    assert found["weight_mean"] == pytest.approx(0.6)
    assert found["pseudo_accuracy"] == 0.5
    assert found["pseudo_accuracy_weighted"] == pytest.approx(0.2 / 1.2)
    assert found["pseudo_accuracy_per_class"] == [0.5, None]
    assert found["clients"][0]["pseudo_accuracy"] == 0.5


def test_without_any_known_class_there_is_no_accuracy():
    found = diagnose([client([[0.2, 0.6]], [[0, 1]], d=[0.1])], [truth([UNKNOWN, UNKNOWN])], classes=2)
    assert not [name for name in found if "pseudo" in name or "auroc" in name or "class" in name]
    assert found["d_mean"] == pytest.approx(0.1)
    assert found["clients"][0]["pseudo_accuracy"] is None
    assert found["clients"][0]["weight_auroc"] is None


def test_steps_whose_mean_weight_and_reward_are_negative_are_ascent():
    first = client([[0.4, 0.6], [0.4, 0.6]], [[0, 0], [0, 0]], d=[-0.6, -0.4])
    second = client([[1.0, 0.0], [0.0, 0.0]], [[0, 0], [0, 0]], d=[-0.5, 0.3])  # the third sum is 0: no ascent
    found = diagnose([first, second], [truth([0, 0], [0, 0])] * 2, classes=2)
    assert found["ascent_share"] == 0.25
    assert (found["d_lowest"], found["d_highest"]) == (-0.6, 0.3)
    assert found["d_mean"] == pytest.approx(-0.3)
    assert [of_client["d"] for of_client in found["clients"]] == pytest.approx([-0.5, -0.1])


def test_a_reward_on_some_images_turns_the_step_round_later():
    arrays = client([[1.0, 0.0], [1.0, 0.0]], [[0, 0], [0, 0]], d=[-0.9, -1.1])
    found = diagnose([arrays | {"reach": np.array([0.5, 0.5])}], [truth([0, 0], [0, 0])], classes=2)
    assert found["ascent_share"] == 0.5  # 0.5 − 0.45 and 0.5 − 0.55
    assert found["reach"] == 0.5
    assert diagnose([arrays], [truth([0, 0], [0, 0])], classes=2)["ascent_share"] == 1.0


def test_clients_are_described_one_by_one():
    clients = [client([[0.2, 0.4]], [[0, 1]]), client([[0.6], [0.8]], [[1], [1]])]
    found = diagnose(clients, [truth([0, 0]), truth([1], [1])], classes=2)["clients"]
    assert [of_client["weight"] for of_client in found] == pytest.approx([0.3, 0.7])
    assert [of_client["pseudo_accuracy"] for of_client in found] == [0.5, 1.0]
    assert [of_client["weight_auroc"] for of_client in found] == [0.0, None]
    assert [(of_client["loss"], of_client["loss_unlabelled"]) for of_client in found] == [(1.0, 2.0)] * 2


def test_clients_without_unlabelled_images_do_not_count():
    empty = client(np.empty((2, 0)), np.empty((2, 0)), d=[0.0, 0.0])
    nothing = np.empty((2, 0), dtype=np.int64)
    other = client([[0.5, 0.5]], [[0, 1]], d=[-1.0])
    assert diagnose([empty], [nothing], classes=2) == {}
    assert diagnose([empty, other], [nothing, truth([0, 1])], 2) == diagnose([other], [truth([0, 1])], 2)


def test_a_round_without_clients_or_pseudo_labels_has_no_diagnostics():
    assert diagnose([], [], classes=2) == {}
    assert diagnose([{"loss": np.array([1.0])}], [truth([0, 1])], classes=2) == {}


def test_a_method_of_ones_own_may_record_less_or_mean_something_else():
    bare = {"weight": np.array([[0.5, 1.0]]), "pseudo": np.array([[0.0, 1.0]]), "d": np.array([[0.1, 0.2]])}
    found = diagnose([bare], [truth([0, 1])], classes=2)
    assert found["pseudo_accuracy"] == 1.0
    assert "d_mean" not in found
    assert "loss" not in found["clients"][0]
    assert diagnose([{"weight": np.array([0.3]), "pseudo": np.array([[0.0, 1.0]])}], [truth([0, 1])], classes=2) == {}


@pytest.mark.parametrize(("method", "rewarded"), [("feddure", True), ("fedavg-fixmatch", False), ("fedavg", None)])
def test_rounds_carry_the_diagnostics_their_method_has(images, method, rewarded):
    record = tiny.federation(tiny.experiment(method=method, rounds=1), images).train_round()
    assert ("diagnostics" in record) == (rewarded is not None)
    if rewarded is not None:
        found = record["diagnostics"]
        assert ("ascent_share" in found) == rewarded
        assert 0 <= found["weight_p10"] <= found["weight_p50"] <= found["weight_p90"] <= 1
        assert len(found["coverage_per_class"]) == len(images.classes)
        assert len(found["clients"]) == 3
        json.dumps(found)


# --- probes: the round's clients before aggregation ------------------------------------------------------


def test_drift_is_relative_and_directions_are_compared_in_pairs():
    start = torch.tensor([3.0, 4.0])
    ends = [start + torch.tensor(move) for move in ([1.0, 0.0], [2.0, 0.0], [0.0, 3.0])]
    found = probe_drift(start, ends)
    assert found == pytest.approx({"drift": (1 + 2 + 3) / 3 / 5, "cosine": 1 / 3})
    assert probe_drift(start, ends[:1])["cosine"] is None


QUANTITIES = ("accuracy", "confidence", "calibration_error")


@pytest.mark.parametrize("method", ["fedavg-matched", "fedavg-fixmatch", "feddure", "fedtutor", "sage"])
def test_probing_changes_nothing_else(images, method):
    changes = {"method": method, "rounds": 3, "server.ema": 0.9}
    plain, probed = (tiny.federation(tiny.experiment(changes, probe_every=every), images) for every in (0, 2))
    records = [[made.train_round() for _ in range(3)] for made in (plain, probed)]
    found = [record.pop("probe", None) for record in records[1]]
    assert records[0] == records[1]
    tiny.assert_equal(probed.server.state, plain.server.state)
    assert (found[0], found[2]) == (None, None)
    names = {f"{who}_{what}" for who in ("global", "averaged", "own") for what in QUANTITIES}
    assert found[1].keys() == names | {"drift", "cosine", "test_received", "test_clients", "test_aggregated"}
    assert found[1]["drift"] > 0
    assert found[1]["test_received"] == records[1][0]["test"]["accuracy"]  # few enough images to take them all
    assert found[1]["test_aggregated"] == records[1][1]["test"]["accuracy"]
    json.dumps(found)


@pytest.mark.parametrize("tutor", ["averaged", "global"])
def test_the_tutor_is_probed_on_the_images_it_labelled(images, tutor):
    changes = {"method": "fedtutor", "fedtutor.tutor": tutor.replace("averaged", "average"), "server.ema": 0.9}
    changes |= {"partition.setting": "iid-iid"}  # every client has images enough for all steps
    made = tiny.federation(tiny.experiment(changes, rounds=3, probe_every=1), images)
    for record in [made.train_round() for _ in range(3)]:
        assert record["probe"][f"{tutor}_accuracy"] == pytest.approx(record["diagnostics"]["pseudo_accuracy"])


def test_probes_leave_out_what_is_not_there():
    def probed(method, known):
        mask = np.arange(160) < known
        data = tiny.dataset(labels=np.where(mask, np.arange(160) % 4, UNKNOWN), labelled=mask)
        return tiny.federation(tiny.experiment(method=method, rounds=1, probe_every=1), data).train_round().get("probe")

    assert probed("local", 160) is None  # sends nothing
    assert probed("fedmatch", 160) is None  # sends its model in parts
    assert 0 <= probed("fedtutor", 120)["averaged_accuracy"] <= 1
    assert probed("fedtutor", 48).keys() == {"drift", "cosine", "test_received", "test_clients", "test_aggregated"}
