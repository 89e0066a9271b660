"""Rounds in rough weather: updates that are not finite, clients with nothing, images nobody knows."""

import collections
import json
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import feddure
import tiny
from feddure.data.dataset import UNKNOWN
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods import METHODS
from feddure.methods.fedavg import FedAvg
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, TrainedRound, run
from feddure.simulation.lanes import Lanes, Stopped
from feddure.tracking.observer import Observer

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
    with pytest.warns(FeddureWarning, match=r"round 1: .*the update is not finite, of clients \[1, 2\]"):
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


def test_a_step_may_record_only_what_it_has():
    class Sparing(METHODS["fedavg-fixmatch"]):
        def step(self, client, batch):
            found = super().step(client, batch)
            return found if len(batch.weak) else {"loss": found["loss"]}

    feddure.register_method("sparing", Sparing)
    for record in played(tiny.federation(tiny.experiment({"method": "sparing", **SITES}), site_dataset())):
        assert record["train"].keys() == {"loss", "loss_unlabelled"}


def test_a_method_that_changes_what_it_aggregates_in_place_changes_no_state_that_is_not_taken(images):
    class InPlace(FedAvg):
        def aggregate(self, server, *arguments):
            server["theta"] = super().aggregate(server, *arguments)["theta"] * float("inf")
            return server

    feddure.register_method("in-place", InPlace)
    federation = tiny.federation(tiny.experiment({"method": "in-place", "rounds": 1}), images)
    with pytest.warns(FeddureWarning, match="makes the model not finite"):
        played(federation)
    assert torch.isfinite(federation.server.state["theta"]).all()


def test_probes_without_test_images():
    bare = tiny.dataset(tests=0)
    experiment = tiny.experiment({"method": "fedtutor", "validation": 0.3, "probe_every": 1, "rounds": 1})
    (record,) = played(tiny.federation(experiment, bare))
    assert 0 <= record["probe"]["own_accuracy"] <= 1


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


def test_whoever_starts_a_run_is_told_of_clients_without_labels(images):
    def note(**changes):
        wanted = {"method": "fedtutor", "partition.labelled_clients": 0.5} | changes
        return tiny.federation(tiny.experiment(wanted), images).server.note()

    assert note().startswith("2 of 4 clients have no labelled image")
    assert note(**{"server.weight": "labelled"}) == ""
    assert note(method="fedavg-matched") == ""
    assert note(**{"partition.labelled_clients": 1.0}) == ""


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


@pytest.mark.parametrize(
    "method",
    [
        *("fedtutor", "sage", "fedavg-uda", "fedmatch", "f-reg", "avg-f-reg", "c-reg", "avg-c-reg", "baseline+maml"),
        *("fedprox-fixmatch", "local"),
    ],
)
def test_a_site_without_labels_trains_wherever_there_are_pseudo_labels(method):
    """Validation images come from the sites that have labels."""
    changes = {"method": method, "rounds": 3, "validation": 0.25, "fedtutor.calibrate": "both"}
    federation = tiny.federation(tiny.experiment({**SITES, **changes}), site_dataset())
    tasks = {task.client: task for task in federation.tasks()}
    assert sorted(tasks) == ([0, 1] if method == "local" else [0, 1, 2])
    if 2 in tasks:
        assert tasks[2].class_counts.tolist() == [0, 0, 0, 0]
    for record in played(federation):
        assert record["left_out"] == []
        json.dumps(record, allow_nan=False)
        assert np.sum(record["validation"]["confusion"]) == 8 * (2 if method == "local" else 1)
    assert set(federation.server.memories) <= set(tasks)


@pytest.mark.parametrize("method", ["fedavg-matched", "fedavg-sl", "fedtutor", "local"])
def test_validation_images_are_tested_on_and_never_trained_on(images, method):
    wanted = tiny.experiment({"method": method, "validation": 0.2, "rounds": 6, "batch_norm": "static"})
    federation = tiny.federation(wanted, images)
    held = federation.partition.validation
    assert len(held) == 32
    seen = set()
    for _ in range(6):
        for assignment in federation.server.assignments():
            seen.update(*map(np.ravel, federation._plan(assignment).pools()))
        record = federation.train_round()
    assert seen
    assert not seen & set(held.tolist())
    classes = np.bincount(images.labels[held], minlength=4)
    clients = len(federation.server.memories) or 1
    for name in (
        ("test", "validation") if method != "fedtutor" else ("test", "test_ema", "validation", "validation_ema")
    ):
        counts = np.array(record[name]["confusion"])
        assert record[name]["accuracy"] == pytest.approx(np.trace(counts) / counts.sum())
        expected = classes if name.startswith("validation") else np.bincount(images.test_labels)
        assert counts.sum(axis=1).tolist() == (clients * expected).tolist()


def test_the_validation_accuracy_is_that_of_the_global_model(images):
    federation = tiny.federation(tiny.experiment({"validation": 0.2, "rounds": 3}), images)
    record = played(federation)[-1]
    held = federation.partition.validation
    server = federation.server
    network = server.program.network
    logits = network.evaluate(server.state["theta"], server.state["statistics"], federation.images.plain(held))
    right = (logits.argmax(1).numpy() == images.labels[held]).mean()
    assert record["validation"]["accuracy"] == pytest.approx(right)


def test_without_test_images_validation_takes_their_place():
    images = tiny.dataset(tests=0)
    with pytest.raises(ConfigError, match=r"no test images: .* validation=0\.2"):
        tiny.federation(tiny.experiment(), images)
    record = played(tiny.federation(tiny.experiment({"validation": 0.2, "server.ema": 0.5}), images))[-1]
    assert {"validation", "validation_ema"} <= record.keys()
    assert "test" not in record


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


class Witness(Observer):
    """Keeps what it is told, and the model that belongs to it."""

    def __init__(self, fails_at=0):
        self.told, self.rounds, self.models, self.fails_at = [], [], [], fails_at

    def round_done(self, federation, record, seconds):
        if record["round"] == self.fails_at:
            raise OSError("no space left")
        self.told.append(record)
        self.rounds.append(federation.round)
        self.models.append(federation.server.state["theta"].clone())


def watched(images, overlaps, witness, stop=lambda: False, changes=None):
    changes = changes or {"method": "feddure", "feddure.f_reg_memory": "client", "rounds": 4, "evaluate_every": 2}
    federation = tiny.federation(tiny.experiment(changes), images)
    federation.engine.lanes.overlaps = overlaps
    run(federation, [witness], stop)
    return federation


def test_a_round_that_is_told_while_the_next_one_trains_is_the_same_round(images):
    """As on a GPU: records come a round later, each with the model that it is about."""
    one, other = Witness(), Witness()
    watched(images, False, one)
    watched(images, True, other)
    assert other.rounds == [1, 2, 3, 4]
    assert json.dumps(one.told) == json.dumps(other.told)
    for found, expected in zip(other.models, one.models, strict=True):
        assert torch.equal(found, expected)


def test_a_round_is_told_also_when_the_next_one_is_stopped(images):
    witness, steps = Witness(), iter(range(10**6))
    per_round = tiny.experiment({"method": "feddure"}).clients_per_round * 2  # more than lanes ask for in two rounds
    with pytest.raises(Stopped):
        watched(images, True, witness, lambda: next(steps) > per_round)
    assert witness.rounds == list(range(1, len(witness.rounds) + 1))
    assert witness.rounds


def test_an_observer_that_fails_while_clients_train_ends_the_run_and_is_asked_once(images):
    witness = Witness(fails_at=2)
    with pytest.raises(OSError, match="no space"):
        watched(images, True, witness)
    assert witness.rounds == [1]


def test_a_round_whose_record_finds_no_memory_is_told_all_the_same(images, monkeypatch):
    """On a GPU what was found is gathered while the next clients train, and they are tried again with fewer lanes."""
    record, short = TrainedRound.record, iter([True])

    def once_short(trained):
        if next(short, False):
            raise torch.cuda.OutOfMemoryError
        return record(trained)

    monkeypatch.setattr(TrainedRound, "record", once_short)
    monkeypatch.setattr(Lanes, "fewer", lambda lanes: True)
    witness = Witness()
    watched(images, True, witness)
    assert witness.rounds == [1, 2, 3, 4]


SPECULATIVE = {"method": "fedtutor", "rounds": 6, "evaluate_every": 2}
"""The server keeps nothing of a client, so that on a GPU rounds do not wait for each other."""


def expect_the_same_as_one_after_the_other(images):
    one, other = Witness(), Witness()
    expected = watched(images, False, one, changes=SPECULATIVE)
    found = watched(images, True, other, changes=SPECULATIVE)
    assert found.server.can_speculate
    assert other.rounds == [1, 2, 3, 4, 5, 6]
    assert json.dumps(one.told) == json.dumps(other.told)
    for mine, theirs in zip(other.models, one.models, strict=True):
        assert torch.equal(mine, theirs)
    tiny.assert_near(found.server.state, expected.server.state)
    tiny.assert_near(dict(enumerate(found.server.averaged)), dict(enumerate(expected.server.averaged)))
    return one


@pytest.mark.parametrize("late", [0, 1, 9])
def test_rounds_that_wait_for_their_evaluation_are_told_with_their_own_model(images, monkeypatch, late):
    """As on a GPU, where an evaluation goes on while further rounds train."""
    asked = collections.Counter()

    def ready(trained):
        asked[trained] += 1
        return asked[trained] > late

    monkeypatch.setattr(TrainedRound, "ready", ready)
    expect_the_same_as_one_after_the_other(images)


@pytest.mark.parametrize("bad", [{1}, {3}, {2, 3}, {6}, {1, 2, 3, 4, 5, 6}])
def test_updates_that_were_taken_unseen_and_are_not_finite_are_left_out_all_the_same(images, monkeypatch, bad):
    tiny.poison(monkeypatch, bad)
    with pytest.warns(FeddureWarning, match="left out were updates"):
        witness = expect_the_same_as_one_after_the_other(images)
    assert {record["round"] for record in witness.told if record["left_out"]} == bad


def test_a_client_that_always_sends_what_cannot_be_used_costs_one_round_again(images, monkeypatch):
    train, trained = Lanes.run, []
    monkeypatch.setattr(Lanes, "run", lambda *arguments: (trained.append(1), train(*arguments))[1])
    tiny.poison(monkeypatch, {1, 2, 3, 4, 5, 6})
    with pytest.warns(FeddureWarning, match="left out were updates"):
        watched(images, True, Witness(), changes=SPECULATIVE)
    assert len(trained) == 7


def test_a_round_that_is_aggregated_again_may_lack_memory_for_its_evaluation(images, monkeypatch):
    tiny.poison(monkeypatch, {2})
    aggregate, aside, short, again = TrainedRound._aggregate, Engine.aside, iter([True]), []

    def noted(trained, speculative):
        again.append(not speculative)
        aggregate(trained, speculative)

    def lacking(engine, work):
        if again[-1] and next(short, False):
            raise torch.cuda.OutOfMemoryError
        return aside(engine, work)

    monkeypatch.setattr(TrainedRound, "_aggregate", noted)
    monkeypatch.setattr(Engine, "aside", lacking)
    monkeypatch.setattr(Lanes, "fewer", lambda lanes: True)
    witness = Witness()
    with pytest.warns(FeddureWarning, match="left out were updates"):
        watched(images, True, witness, changes=SPECULATIVE)
    assert witness.rounds == [1, 2, 3, 4, 5, 6]
    assert all(model.isfinite().all() for model in witness.models)


def test_an_observer_that_fails_is_told_of_no_later_round(images, monkeypatch):
    """They wait for their evaluation: on disk there would be a hole."""
    monkeypatch.setattr(TrainedRound, "ready", lambda trained: False)
    witness = Witness(fails_at=1)
    with pytest.raises(OSError, match="no space"):
        watched(images, True, witness, changes=SPECULATIVE)
    assert witness.rounds == []


def test_images_of_two_rounds_are_not_held_where_memory_is_short(images, monkeypatch):
    prepare, batches, held = Federation._prepare, [], []

    def noted(federation, number):
        held.append(sum(batch() is not None for batch in batches))
        works = prepare(federation, number)
        batches[:] = [weakref.ref(batch.weak) for _, batch, _ in works]
        return works

    monkeypatch.setattr(Federation, "_prepare", noted)
    monkeypatch.setattr(Engine, "free_memory", lambda engine: 0)
    watched(images, True, Witness(), changes=SPECULATIVE)
    assert held == [0] * 6


class Touchy(FedAvg):
    """Cannot do with what is not finite."""

    def aggregate(self, server, uploads, *arguments):
        int(sum(upload["theta"].sum() for upload in uploads))
        return super().aggregate(server, uploads, *arguments)


def test_methods_of_others_never_see_updates_that_are_not_finite(images, monkeypatch):
    feddure.register_method("touchy", Touchy)
    tiny.poison(monkeypatch, {2})
    witness = Witness()
    with pytest.warns(FeddureWarning, match="left out were updates"):
        watched(images, True, witness, changes=SPECULATIVE | {"method": "touchy"})
    assert witness.rounds == [1, 2, 3, 4, 5, 6]


def test_the_seconds_of_rounds_are_those_of_the_run(images, monkeypatch):
    def later(engine, found):
        def wait():
            time.sleep(0.2)
            return found

        return wait

    monkeypatch.setattr(Engine, "later", later)
    seconds = []
    counting = Observer()
    counting.round_done = lambda federation, record, took: seconds.append(took)
    began = time.perf_counter()
    watched(images, True, counting, changes=SPECULATIVE)
    assert sum(seconds) <= time.perf_counter() - began
    assert min(seconds[:-1]) >= 0.2


def test_a_speculative_round_is_verified_also_when_the_next_one_is_stopped(images, monkeypatch):
    answer, steps = Federation._answer, iter(range(10**6))
    monkeypatch.setattr(
        Federation,
        "_answer",
        lambda self, task, result: replace(
            answer(self, task, result), upload={k: v * torch.nan for k, v in result.upload.items()}
        ),
    )
    witness, per_round = Witness(), tiny.experiment(SPECULATIVE).clients_per_round * 2
    with pytest.raises(Stopped), pytest.warns(FeddureWarning, match="left out were updates"):
        watched(images, True, witness, lambda: next(steps) > per_round, SPECULATIVE)
    assert witness.rounds
    assert all(model.isfinite().all() for model in witness.models)
    assert all(len(record["left_out"]) == len(record["clients"]) for record in witness.told)
