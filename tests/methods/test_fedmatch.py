"""FedMatch on the engine against its textbook twin, in float64: steps, rounds, helpers, and what is left on disk."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import tiny
from feddure import experiments
from feddure import nn as networks
from feddure.data.dataset import UNKNOWN
from feddure.errors import ConfigError
from feddure.methods.fedmatch import CHANGED, FedMatch, noise_image
from feddure.serving.load import read_network
from feddure.simulation import checkpoint, runs
from feddure.simulation.server import Answer
from oracle import fedmatch_twin
from oracle.pairing import client_of, distance

STRONG = {"fedmatch.lambda_i": 0.5, "fedmatch.lambda_a": 0.5}  # so that no term hides behind λ_2
OPTIMIZERS = ("original", "common")


def experiment(changes=None, **fields):
    """A network that knows nothing is rarely as sure as the paper's threshold asks for."""
    usual = {"method": "fedmatch", "fedmatch.threshold": 0.45, "unlabelled_batch": 12, **STRONG}
    return tiny.experiment({**usual, **(changes or {}), **fields})


def played(federation):
    return [tiny.play_round(federation) for _ in range(federation.experiment.rounds)]


def module_of(federation):
    """An ordinary module of the federation's architecture."""
    dataset, wanted = federation.dataset, federation.experiment
    norm = federation.server.method.norm
    return networks.make(wanted.model, dataset.shape[2], len(dataset.classes), norm, wanted.seed).double()


def assert_same_parts(network, sigma: Tensor, psi: Tensor, twin, tolerance=1e-9):
    """σ and ψ, flat, are the twin's, and ψ is 0 wherever the twin has none."""
    expected = dict(twin.sigma.named_parameters())
    for name, found in network.parameters.views(sigma).items():
        assert distance(found, expected[name]) < tolerance, name
    for name, found in network.parameters.views(psi).items():
        assert distance(found, twin.psi.get(name, torch.zeros_like(found))) < tolerance, name


def is_psi(name: str) -> bool:
    """Whether a tensor that a client receives is a ψ: the server's, or a helper's."""
    return name == "psi" or name.startswith("helper.")


# --- one client ----------------------------------------------------------------------------------------
class Pair:
    """A client on the engine and its twin, from the same random σ, ψ, statistics and helpers."""

    def __init__(self, images, changes=None, helpers=True, twin=fedmatch_twin.Client):
        federation = tiny.federation(experiment(changes, local_steps=3), images)
        self.method, self.network = federation.server.method, federation.server.program.network
        self.options = experiments.options(federation.experiment, "fedmatch")
        task = federation.tasks()[0]
        self.received = self.randomised(task.received, self.options.helpers if helpers else 0)
        self.task = replace(task, received=self.received)
        self.client = client_of(federation, self.task)
        module = module_of(federation)
        state = self.network.state_dict(self.received["sigma"], self.received["statistics"])
        module.load_state_dict(state, strict=False)
        of_psi = fedmatch_twin.decomposed(module)
        parts = [self.network.parameters.views(flat) for name, flat in self.received.items() if is_psi(name)]
        psi, *others = ({name: views[name].clone() for name in of_psi} for views in parts)
        self.twin = twin(module, psi, others, federation.experiment)

    def randomised(self, received, helpers):
        generator = torch.Generator().manual_seed(5)

        def near(name, size):
            noise = torch.randn(received[name].shape, generator=generator, dtype=torch.float64)
            return received[name] + size * noise

        sigma, psi, statistics = near("sigma", 0.05), near("psi", 0.02), near("statistics", 0.05)
        sent = {"sigma": sigma, "psi": psi * self.network.ordinary, "statistics": statistics.abs() + 0.1}
        return sent | {f"helper.{slot}": near("psi", 0.2) * self.network.ordinary for slot in range(helpers)}

    def step(self, steps=1):
        """So many steps of both; the records of the last."""
        for index in range(steps):
            batch = self.task.batches.step(index)
            found = self.method.step(self.client, batch)
            expected = self.twin.step(batch.labelled, batch.labels, batch.plain, batch.strong)
        return found, expected


def assert_steps_agree(pair, steps=1):
    found, expected = pair.step(steps)
    sigma, psi = pair.client.state["sigma"], pair.client.state["psi"]
    assert_same_parts(pair.network, sigma, psi, pair.twin)
    assert torch.equal(pair.client.theta, sigma + psi)
    statistics = pair.network.statistics.views(pair.client.statistics)
    tiny.assert_near(statistics, {name: b for name, b in pair.twin.sigma.named_buffers() if name in statistics})
    assert set(found) == set(expected)
    tiny.assert_near(found, expected, 1e-9)
    return found


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("helpers", [True, False], ids=["helpers", "alone"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_step_equals_the_twin(images, optimizer, helpers, norm):
    pair = Pair(images, {"fedmatch.optimizer": optimizer, "norm": norm}, helpers)
    found = assert_steps_agree(pair)
    assert (found["loss_inter_client"] > 0) == helpers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"proximal": 0.7},
        {"fedmatch.net": "original"},
        {"fedmatch.helpers": 1},
        {"fedmatch.helpers": 3, "fedmatch.lambda_1": 0.3, "fedmatch.lambda_2": 0.1},
        {"fedmatch.learning_rate": 0.02, "optimizer.learning_rate": 0.01, "fedmatch.lambda_s": 1.5},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()) or "as it comes",
)
def test_steps_equal_the_twin(images, optimizer, changes):
    assert_steps_agree(Pair(images, {"fedmatch.optimizer": optimizer, **changes}), steps=3)


def test_the_batch_has_confident_and_other_images_and_helpers_change_labels(images):
    """What the comparisons above rely on."""
    found, alone = (Pair(images, helpers=helpers).step()[0] for helpers in (True, False))
    assert 0 < found["weight"].sum() < len(found["weight"])
    assert torch.equal(found["weight"], alone["weight"])
    assert not torch.equal(found["pseudo"], alone["pseudo"])


class OpposedKL(fedmatch_twin.Client):
    """KL(p_θ ‖ p_h)."""

    def divergence(self, p, q):
        return (p * (p.log() - q.log())).sum()


class HelpersOnReceivedSigma(fedmatch_twin.Client):
    """p of σ + ψ_h with σ as it was at the start of the round."""

    def __init__(self, sigma, *arguments):
        super().__init__(sigma, *arguments)
        self.first = sigma

    def predict_as_helper(self, psi, images):
        now, self.sigma = self.sigma, self.first
        prediction = super().predict_as_helper(psi, images)
        self.sigma = now
        return prediction


class OwnVoteAlone(fedmatch_twin.Client):
    """Helpers do not vote."""

    def agree(self, opinions):
        return super().agree(opinions[:1])


class HighestInATie(fedmatch_twin.Client):
    """Of several classes with as many votes the highest."""

    def agree(self, opinions):
        return len(opinions[0]) - 1 - super().agree([opinion.flip(0) for opinion in opinions])


class HelpersMoveStatistics(fedmatch_twin.Client):
    """Running statistics take in what helpers see."""

    def predict_as_helper(self, psi, images):
        self.predict(images)
        return super().predict_as_helper(psi, images)


WRONG = (OpposedKL, HelpersOnReceivedSigma, OwnVoteAlone, HighestInATie, HelpersMoveStatistics)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_twin_with_one_thing_wrong_is_told_apart(images, wrong):
    changes = {"fedmatch.helpers": 1}  # two voters: every disagreement is a tie
    with pytest.raises(AssertionError):
        assert_steps_agree(Pair(images, changes, twin=wrong), steps=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_a_confident_image_only_its_norms_move_psi(images, optimizer):
    changes = {"fedmatch.threshold": 1.0, "fedmatch.lambda_1": 0.3, "fedmatch.optimizer": optimizer}
    assert_steps_agree(Pair(images, changes), steps=3)
    pair = Pair(images, changes)
    found, _ = pair.step()
    assert found["weight"].sum() == 0
    assert found["loss_inter_client"] == 0
    before, sigma, now = pair.received["psi"], pair.client.state["sigma"], pair.client.state["psi"]
    slope = pair.network.ordinary * (0.3 * before.sign() + 2 * pair.options.lambda_2 * (before - sigma))
    if optimizer == "original":
        assert distance(now, before - pair.options.learning_rate * slope) < 1e-12
    assert torch.equal((now != before) & pair.network.ordinary, (slope != 0) & pair.network.ordinary)


def test_labels_move_sigma_alone_and_unlabelled_images_psi_alone(images):
    pair = Pair(images)
    batch = pair.task.batches.step(0)
    none = batch.labelled[:0]
    pair.method.step(pair.client, replace(batch, plain=none, strong=none, truth=batch.truth[:0]))
    moved = {name: pair.client.state[name].clone() for name in ("sigma", "psi")}
    assert not torch.equal(moved["sigma"], pair.received["sigma"])
    assert torch.equal(moved["psi"], pair.received["psi"])
    pair.method.step(pair.client, replace(batch, labelled=none, labels=batch.labels[:0]))
    assert torch.equal(pair.client.state["sigma"], moved["sigma"])
    assert not torch.equal(pair.client.state["psi"], moved["psi"])


# --- whole rounds --------------------------------------------------------------------------------------
def assert_rounds_agree(wanted, images, owned=None):
    """Round after round σ, ψ, the global model, helpers and mean losses are the twin's."""
    owned = owned or tiny.partition(wanted, images)
    federation = tiny.federation(wanted, images, owned=owned)
    noise = torch.from_numpy(noise_image(images.shape))
    twin = fedmatch_twin.Federation(wanted, images, owned, noise)
    helped = []
    for _ in range(wanted.rounds):
        tasks = federation.tasks()
        helped.append({task.client: helpers_of(task, federation) for task in tasks})
        record = federation.finish_round(tasks, federation.engine.run(tasks))
        twin.play()
        assert helped[-1] == twin.helped
        assert_same_parts(
            federation.server.program.network, federation.server.state["sigma"], federation.server.state["psi"], twin
        )
        assert torch.equal(
            federation.server.state["theta"], federation.server.state["sigma"] + federation.server.state["psi"]
        )
        tiny.assert_near(federation.server.model_state(), twin.theta(), 1e-9)
        for name in ("loss", "loss_inter_client"):
            steps = torch.stack([step.get(name, torch.zeros(())) for client in twin.records for step in client])
            assert record["train"][name] == pytest.approx(steps.mean().item(), rel=1e-9)
    return helped


def helpers_of(task, federation):
    """The clients whose ψ a task comes with, nearest first."""
    owners = {id(tensor): int(name[4:]) for name, tensor in federation.server.state.items() if name.startswith("psi.")}
    return [owners[id(tensor)] for name, tensor in task.received.items() if name.startswith("helper.")]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("clients", "every"), [(1, 1), (4, 2)])
def test_rounds_equal_the_twin(images, clients, every, optimizer, norm):
    changes = {"fedmatch.optimizer": optimizer, "fedmatch.helper_every": every, "engine.lanes": 3, "norm": norm}
    wanted = experiment(changes, clients_per_round=clients, rounds=8 if clients == 1 else 4, local_steps=1)
    helped = assert_rounds_agree(wanted, images)
    assert [] in [helpers for of_round in helped for helpers in of_round.values()]
    assert {len(helpers) for of_round in helped for helpers in of_round.values()} == {0, 2}
    if clients == 4:
        assert [any(of_round.values()) for of_round in helped] == [False, True, False, True]


def test_the_original_network_has_neither_normalisation_nor_biases(images):
    wanted = experiment({"fedmatch.net": "original", "fedmatch.helper_every": 2}, clients_per_round=4, rounds=3)
    assert_rounds_agree(wanted, images)
    federation = tiny.finished(wanted, images)
    state = federation.server.model_state()
    assert federation.server.state["statistics"].numel() == 0
    assert sorted(name.rpartition(".")[2] for name in state) == ["bias"] * 4 + ["weight"] * 4
    assert all((tensor == 0).all() == name.endswith("bias") for name, tensor in state.items())


def test_the_residual_network_equals_the_twin():
    colour = tiny.dataset(size=100, channels=3, side=16)
    changes = {"fedmatch.helper_every": 2, "model": "resnet9-slim", "labelled_batch": 4}
    assert_rounds_agree(experiment(changes, clients_per_round=3, local_steps=1), colour)


def test_clients_without_labelled_or_without_unlabelled_images():
    """Site a has both kinds of images, b only labelled ones, c only unlabelled ones of unknown class."""
    labels = tiny.dataset(size=60).labels.copy()
    site = np.repeat(np.arange(3), 20)
    labels[(site == 2) | (np.arange(60) < 8)] = UNKNOWN
    images = tiny.dataset(size=60, labels=labels, labelled=labels != UNKNOWN, sites=("a", "b", "c"), site=site)
    changes = {"partition.setting": "sites", "fedmatch.helper_every": 2}
    wanted = experiment(changes, rounds=3)
    wanted = wanted.model_copy(update={"partition": wanted.partition.model_copy(update={"labels_per_class": None})})
    assert_rounds_agree(wanted, images)
    for record in played(tiny.federation(wanted, images)):
        json.dumps(record, allow_nan=False)
        assert record["left_out"] == []


def test_the_mean_is_uniform_whatever_clients_weigh(images):
    one, other = (tiny.finished(experiment({"server.weight": weight}), images) for weight in ("total", "uniform"))
    tiny.assert_equal(one.server.state, other.server.state)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_other_server_optimisers_are_refused(images, optimizer):
    with pytest.raises(ConfigError, match=f"server.optimizer: '{optimizer}' was given.* only 'mean'"):
        tiny.federation(experiment({"server.optimizer": optimizer}), images)


def test_an_average_of_the_global_model_is_one_of_sums(images):
    federation = tiny.federation(experiment({"server.ema": 0.5}, rounds=1), images)
    before = federation.server.state["theta"]
    tiny.play_round(federation)
    assert distance(federation.server.averaged[0], 0.1 * before + 0.9 * federation.server.state["theta"]) < 1e-12


# --- helpers -------------------------------------------------------------------------------------------
def broadcast(federation, client, round_number):
    sent = federation.server.method.broadcast(federation.server.state, client, round_number)
    return [name for name in sent if name.startswith("helper.")]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(1, 5),
    st.data(),
)
def test_helpers_are_the_nearest_others(points, count, data):
    method = FedMatch(experiment({"fedmatch.helpers": count}))
    clients = data.draw(st.permutations(range(20)))[: len(points)]
    state = {f"embedding.{client}": torch.tensor(point) / 7 for client, point in zip(clients, points, strict=True)}
    where = dict(zip(clients, points, strict=True))
    for client in clients:
        found = method.helpers(state, client)
        others = sorted(math.dist(where[client], where[other]) for other in clients if other != client)
        if len(others) < count:
            assert found == []
        else:
            assert client not in found
            assert len(set(found)) == count
            assert [math.dist(where[client], where[other]) for other in found] == pytest.approx(others[:count])


def test_a_client_that_never_took_part_gets_no_helpers(images):
    wanted = experiment({"partition.clients": 6, "fedmatch.helper_every": 2}, clients_per_round=3, rounds=1)
    federation = tiny.finished(wanted, images)
    seen = federation.server.sample(1)
    for client in range(6):
        assert broadcast(federation, client, 2) == (["helper.0", "helper.1"] if client in seen else [])
        assert broadcast(federation, client, 3) == []


def test_fewer_clients_than_helpers_learn_alone(images):
    """With one other client there is none to make up a pair of helpers."""
    changes = {"partition.clients": 2, "fedmatch.helper_every": 1}
    helped = assert_rounds_agree(experiment(changes, clients_per_round=2, rounds=3), images)
    assert not any(helpers for of_round in helped for helpers in of_round.values())


def test_helpers_come_in_the_tenth_round_and_count(images):
    changes = {"local_steps": 1, "partition.clients": 3, "clients_per_round": 3, "evaluate_every": 20}
    federation, deaf = (
        tiny.federation(experiment({**changes, "fedmatch.lambda_i": weight}, rounds=11), images) for weight in (0.01, 0)
    )
    for number in range(1, 12):
        records = [tiny.play_round(one) for one in (federation, deaf)]
        assert (records[0]["train"]["loss_inter_client"] > 0) == (number == 10)
        assert torch.equal(federation.server.state["theta"], deaf.server.state["theta"]) == (number < 10)
    assert 1e-9 < distance(federation.server.state["psi"], deaf.server.state["psi"]) < 1e-2


@pytest.mark.parametrize("value", [1e307, 1.5e308])
def test_an_update_that_overflows_on_the_noise_image_is_left_out(images, value):
    """Finite parameters, and a finite mean of all clients' parameters, with an embedding that is not."""
    wanted = experiment({"fedmatch.helper_every": 1, "fedmatch.helpers": 1}, clients_per_round=3, rounds=2)
    one, other = (tiny.federation(wanted, images) for _ in range(2))
    tasks = one.tasks()
    answers = [
        Answer(task.client, task.steps, task.received, result.upload)
        for task, result in zip(tasks, one.engine.run(tasks), strict=True)
    ]
    huge = {**answers[0].upload, "sigma": torch.full_like(answers[0].upload["sigma"], value)}
    _, problems = one.server.finish_round([replace(answers[0], upload=huge), *answers[1:]])
    other.server.finish_round(answers[1:])
    assert problems == {answers[0].client: "the update makes the model not finite"}
    tiny.assert_equal(one.server.state, other.server.state)
    assert one.server.method.helpers(one.server.state, answers[1].client) == [answers[2].client]


def test_embeddings_that_are_not_finite_are_no_neighbours():
    """Earlier versions left such ones in checkpoints."""
    method = FedMatch(experiment({"fedmatch.helpers": 1}))
    points = {0: [0.0, 1.0], 1: [math.nan, 1.0], 2: [1.0, 0.0]}
    state = {f"embedding.{client}": torch.tensor(point) for client, point in points.items()}
    assert [method.helpers(state, client) for client in points] == [[2], [], [0]]


def test_the_noise_image_is_fixed_and_looks_like_a_normalised_one():
    noise = noise_image((32, 32, 3))
    assert noise.shape == (1, 3, 32, 32)
    assert np.array_equal(noise, noise_image((32, 32, 3)))
    assert abs(noise.mean()) < 0.06
    assert abs(noise.std() - 1) < 0.06


# --- on disk, and on the wire --------------------------------------------------------------------------
SAME = ("metrics.jsonl", "model.safetensors", str(checkpoint.FILE))


@pytest.mark.usefixtures("quiet")
def test_a_stopped_run_resumes_to_identical_files(images, tmp_path, monkeypatch):
    wanted = experiment({"fedmatch.helper_every": 2, "server.ema": 0.7}, rounds=5, checkpoint_every=2)
    whole = runs.execute(wanted, images, tmp_path / "whole", progress=False).folder
    with monkeypatch.context() as patch:
        left = iter(range(7))
        patch.setattr(runs.Stop, "__call__", lambda self: next(left, None) is None)
        patch.setattr(runs.Stop, "signal", 2)
        with pytest.raises(runs.Interrupted):
            runs.execute(wanted, images, tmp_path / "stopped", progress=False)
    stopped = runs.execute(wanted, images, tmp_path / "stopped", resume=True, progress=False).folder
    assert {name: (stopped / name).read_bytes() for name in SAME} == {
        name: (whole / name).read_bytes() for name in SAME
    }
    assert {"server.sigma", "server.psi"} <= set(load_file(whole / checkpoint.FILE))
    own = {path.name: set(load_file(path)) for path in (whole / checkpoint.CLIENTS).iterdir()}
    assert {"server.psi.0", "server.embedding.0"} in own.values()
    assert own.keys() == {path.name for path in (stopped / checkpoint.CLIENTS).iterdir()}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("net", ["common", "original"])
def test_the_model_on_disk_answers_as_the_global_model(images, tmp_path, net):
    wanted = experiment({"fedmatch.net": net}, rounds=2)
    folder = runs.execute(wanted, images, tmp_path / "run", progress=False).folder
    federation = tiny.finished(wanted, images)
    inputs = federation.images.plain(np.arange(20))
    expected = federation.server.program.network.evaluate(
        *federation.server.method.global_model(federation.server.state), inputs
    )
    with torch.no_grad():
        assert distance(read_network(folder)[1].double()(inputs), expected) < 1e-6  # a fresh module is float32


def test_communication_counts_what_was_sent(images):
    federation = tiny.federation(experiment({"fedmatch.helper_every": 2}, clients_per_round=4, rounds=3), images)
    network = federation.server.program.network
    parameters, statistics = network.parameters.size, network.statistics.size
    once = 4 * 4 * (2 * parameters + statistics)
    records = [record["communication"] for record in played(federation)]
    assert [record["down"] for record in records] == [once, once + 4 * 4 * 2 * parameters, once]
    assert [record["up"] for record in records] == [once] * 3
    bits = 4 * -(-parameters // 8)
    for record in records:
        assert bits < record["down_sparse"] <= record["down"] + 3 * bits
        assert 2 * bits < record["up_sparse"] <= record["up"] + 2 * bits


def test_sparse_communication_counts_values_that_changed(images):
    federation = tiny.finished(experiment(clients_per_round=4, rounds=1), images)
    server, size = federation.server.state, federation.server.state["psi"].numel()
    held, bits, statistics = server["psi.2"], -(-size // 8), 4 * server["statistics"].numel()
    received = {"sigma": server["sigma"], "psi": held.clone(), "statistics": server["statistics"]}
    received["psi"][:3] += 2 * CHANGED
    received["psi"][3:9] += CHANGED / 2
    upload = {**received, "sigma": received["sigma"].clone()}
    upload["sigma"][5] -= 1
    found = federation.server.method.sparse_bytes(server, 2, received, upload)
    assert found == {"down": statistics + 4 * size + 4 * 3 + bits, "up": statistics + 4 * 1 + 2 * bits}
    helped = {**received, "helper.0": held, "helper.1": held + 1}
    more = federation.server.method.sparse_bytes(server, 2, helped, upload)
    assert more["down"] - found["down"] == bits + 4 * size + bits
    new = federation.server.method.sparse_bytes(server, 77, received, upload)
    nonzero = int((received["psi"].abs() > CHANGED).sum())
    assert new["down"] == statistics + 4 * size + 4 * nonzero + bits
