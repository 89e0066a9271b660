"""Rounds in rough weather: updates that are not finite, clients with nothing, images nobody knows."""

import json

import numpy as np
import pytest
import torch

import feddure
import tiny
from feddure.data.dataset import UNKNOWN
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods import METHODS
from feddure.methods.fedavg import FedAvg

BUILT_IN = tuple(METHODS)  # other tests register methods of their own


class Broken(FedAvg):
    """Sends NaN from the clients in `options.broken`."""

    def upload(self, client):
        broken = client.key[2] in client.experiment.options["broken"]
        sent = super().upload(client)
        return sent | {"theta": sent["theta"] * float("nan")} if broken else sent


@pytest.fixture(autouse=True)
def _broken():
    feddure.register_method("broken", Broken)


def broken(*clients, **changes):
    return tiny.experiment({"method": "broken", "options.broken": list(clients), "clients_per_round": 4} | changes)


def played(federation):
    """The records of all rounds."""
    return [federation.train_round() for _ in range(federation.experiment.rounds)]


def test_an_update_that_is_not_finite_is_left_out(images):
    federation = tiny.federation(broken(1, 2, rounds=1), images)
    with pytest.warns(FeddureWarning, match=r"round 1: the updates of clients \[1, 2\] are not finite"):
        (record,) = played(federation)
    assert record["left_out"] == [1, 2]
    assert sorted(record["clients"]) == [0, 1, 2, 3]

    healthy = tiny.federation(broken(rounds=1), images)
    tasks = healthy.tasks()
    results = healthy.engine.run(tasks)
    kept = [(task, result) for task, result in zip(tasks, results, strict=True) if task.client in (0, 3)]
    healthy.finish_round(*zip(*kept, strict=True))
    tiny.assert_equal(federation.server.state, healthy.server.state)


def test_a_round_with_nobody_left_keeps_the_global_model(images):
    federation = tiny.federation(broken(0, 1, 2, 3, rounds=2), images)
    before = {name: tensor.clone() for name, tensor in federation.server.state.items()}
    with pytest.warns(FeddureWarning):
        records = played(federation)
    tiny.assert_equal(federation.server.state, before)
    assert [record["left_out"] for record in records] == [[0, 1, 2, 3]] * 2
    assert records[0]["train"] == {}
    assert 0 <= records[0]["test"]["accuracy"] <= 1


def test_memory_of_a_client_that_was_left_out_is_not_kept(images):
    class Forgetful(Broken):
        memory = ("seen",)

        def allocate(self, client):
            client.state["seen"] = torch.zeros(1, dtype=client.theta.dtype)

        def start_round(self, client, received):
            client.state["seen"].add_(1)

    feddure.register_method("forgetful", Forgetful)
    federation = tiny.federation(broken(2, method="forgetful"), images)
    with pytest.warns(FeddureWarning):
        played(federation)
    seen = {client: memory["seen"].item() for client, memory in federation.server.memories.items()}
    assert seen == {0: 2, 1: 2, 3: 2}


def site_dataset():
    """Site a has both kinds of images, b only labelled ones, c only unlabelled ones of unknown class."""
    known = tiny.dataset(size=60)
    labels = known.labels.copy()
    site = np.repeat(np.arange(3), 20)
    labels[site == 2] = UNKNOWN
    labels[:8] = UNKNOWN
    return tiny.dataset(size=60, labels=labels, labelled=labels != UNKNOWN, sites=("a", "b", "c"), site=site)


SITES = {"partition.setting": "sites", "partition.labels_per_class": None, "clients_per_round": 3}


@pytest.mark.parametrize("method", ["fedavg", "fedavg-matched", "fedavg-fixmatch", "feddure"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_clients_without_labelled_or_without_unlabelled_images(method, norm):
    experiment = tiny.experiment({"method": method, "norm": norm, **SITES})
    federation = tiny.federation(experiment, site_dataset())
    assert [len(part) for part in federation.partition.labelled] == [12, 20, 0]
    assert [len(part) for part in federation.partition.unlabelled] == [8, 0, 20]
    records = played(federation)
    learners = [0, 1] if method in ("fedavg", "fedavg-matched") else [0, 1, 2]
    for record in records:
        assert sorted(record["clients"]) == learners
        assert record["left_out"] == []
        json.dumps(record, allow_nan=False)
    assert torch.isfinite(federation.server.state["theta"]).all()


def test_labels_alone_are_learned_only_where_there_are_some():
    experiment = tiny.experiment({**SITES, "clients_per_round": 1, "rounds": 12})
    records = played(tiny.federation(experiment, site_dataset()))
    assert {tuple(record["clients"]) for record in records} == {(0,), (1,)}


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_method_trains_where_some_clients_have_no_labels(images, method):
    changes = {"method": method, "partition.labelled_clients": 0.5, "clients_per_round": 4, "rounds": 1}
    federation = tiny.federation(tiny.experiment(changes), images)
    holders = {client for client, part in enumerate(federation.partition.labelled) if len(part)}
    assert len(holders) == 2
    (record,) = played(federation)
    needs = federation.server.method.needs
    assert set(record["clients"]) == ({0, 1, 2, 3} if needs.unlabelled or needs.every_label else holders)
    assert record["left_out"] == []
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("setting", ["dir-dir", "pairs"])
def test_full_supervision_takes_an_image_once_a_pass(images, setting):
    """Where labelled images are unlabelled ones too; a client's weight still has both."""
    wanted = {"partition.setting": setting, "partition.labelled_as_unlabelled": True, "method": "fedavg-sl"}
    federation = tiny.federation(tiny.experiment({**wanted, "labelled_batch": 1, "clients_per_round": 4}), images)
    for task in federation.tasks():
        mine, others = federation.partition.labelled[task.client], federation.partition.unlabelled[task.client]
        assert task.steps == len(np.union1d(mine, others)) < len(mine) + len(others)
        assert int(task.class_counts.sum()) == task.steps
        assert federation.server._weight(task.client) == len(mine) + len(others)


@pytest.mark.parametrize("method", ["fedavg-sl", "fedprox-sl"])
def test_full_supervision_needs_every_label(method):
    experiment = tiny.experiment({**SITES, "method": method})
    with pytest.raises(ConfigError, match=r"28 of 60 images .* class that is not known"):
        tiny.federation(experiment, site_dataset())


def test_more_clients_per_round_than_sites_draws_all_of_them():
    experiment = tiny.experiment({**SITES, "method": "feddure", "clients_per_round": 40})
    federation = tiny.federation(experiment, site_dataset())
    assert sorted(federation.server.sample(1)) == [0, 1, 2]


def test_clients_are_drawn_without_replacement_and_anew_each_round(images):
    federation = tiny.federation(tiny.experiment({"partition.clients": 8, "clients_per_round": 5, "seed": 3}), images)
    drawn = [federation.server.sample(number) for number in range(1, 40)]
    assert all(len(set(clients)) == 5 for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 30
    assert {client for clients in drawn for client in clients} == set(range(8))


def test_a_fifth_of_the_mean_clients_unlabelled_images_where_nobody_says(images):
    federation = tiny.federation(tiny.experiment(unlabelled_batch="auto"), images)
    assert federation.server.unlabelled_batch == round((160 - 4 * 4 * 3) / 4 / 5)


def test_a_method_must_take_a_step(images):
    class Idle(FedAvg):
        def steps(self, labelled, unlabelled, unlabelled_batch):
            return 0

    feddure.register_method("idle", Idle)
    with pytest.raises(ConfigError, match=r"method 'idle'.* 0 .*1 or more"):
        tiny.federation(tiny.experiment(method="idle"), images).tasks()


def test_evaluation_comes_when_it_is_due(images):
    records = played(tiny.federation(tiny.experiment(rounds=5, evaluate_every=2), images))
    assert [record["round"] for record in records if "test" in record] == [2, 4, 5]


def test_another_seed_gives_another_model(images):
    one, other = (tiny.finished(tiny.experiment({"seed": seed, "partition.seed": 0}), images) for seed in (0, 1))
    assert one.partition.sha256 == other.partition.sha256
    assert not torch.equal(one.server.state["theta"], other.server.state["theta"])
