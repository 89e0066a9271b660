"""Robust aggregation against its definitions, and the attacks that it is there for."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from feddure.config import ServerOptions
from feddure.errors import ConfigError
from feddure.simulation import robust


def draws(clients, size=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"theta": torch.randn(size, dtype=torch.float64, generator=generator)} for _ in range(clients)]


def stacked(uploads):
    return np.stack([upload["theta"].numpy() for upload in uploads])


@pytest.mark.parametrize("clients", [1, 2, 3, 5, 8])
def test_median_and_trimmed_mean(clients):
    uploads = draws(clients)
    median = robust.combine(ServerOptions(robust="median"), uploads)
    np.testing.assert_allclose(median["theta"], np.median(stacked(uploads), axis=0))
    options = ServerOptions(robust="trimmed-mean", robust_share=0.25)
    trimmed = robust.combine(options, uploads)
    share = robust.hostile(options, clients) / clients
    np.testing.assert_allclose(trimmed["theta"], scipy.stats.trim_mean(stacked(uploads), share + 1e-9, axis=0))


def test_krum_takes_the_update_that_is_closest_to_its_neighbours():
    uploads, number, hostile = draws(7), 7, 2
    flat = stacked(uploads)
    distances = ((flat[:, None] - flat[None]) ** 2).sum(2)
    expected = [np.sort(np.delete(distances[i], i))[: number - hostile - 2].sum() for i in range(number)]
    np.testing.assert_allclose(robust.krum_scores(torch.from_numpy(flat), hostile), expected)
    one = robust.select(ServerOptions(robust="krum", robust_share=2 / 7), uploads, uploads)
    several = robust.select(ServerOptions(robust="multi-krum", robust_share=2 / 7), uploads, uploads)
    assert one == [int(np.argmin(expected))]
    assert several == sorted(np.argsort(expected)[: number - hostile].tolist())


@given(st.integers(0, 2), st.floats(-1e30, 1e30), st.integers(0, 99))
def test_a_minority_moves_no_coordinate_out_of_the_honest_range(hostile, value, seed):
    honest = draws(3, seed=seed)
    uploads = [*honest, *({"theta": torch.full((7,), value, dtype=torch.float64)} for _ in range(hostile))]
    options = {"median": 0.0, "trimmed-mean": 0.4}
    for name, share in options.items():
        found = robust.combine(ServerOptions(robust=name, robust_share=share), uploads)["theta"].numpy()
        low, high = stacked(honest).min(0), stacked(honest).max(0)
        assert (found >= low - 1e-12).all()
        assert (found <= high + 1e-12).all()


def test_krum_is_not_blinded_by_updates_that_overflow():
    uploads = [{"theta": upload["theta"].float()} for upload in draws(5)]
    uploads[1] = {"theta": torch.full((7,), 3e38)}
    assert 1 not in robust.select(ServerOptions(robust="multi-krum"), uploads, uploads)


def test_krum_goes_by_what_clients_received_and_not_by_numbers_of_their_images():
    honest = draws(5)
    uploads = [upload | {"counts": torch.full((3,), 100.0 * place)} for place, upload in enumerate(honest)]
    uploads[2]["theta"] = -10 * uploads[2]["theta"]  # with counts in the middle of the others'
    assert robust.select(ServerOptions(robust="krum"), honest, uploads) != [2]
    assert robust.select(ServerOptions(robust="krum"), [{}] * 5, [{}] * 5) == [0, 1, 2, 3, 4]  # nothing is sent


def test_who_moves_nothing_does_not_bound_who_does():
    """Clients without labels leave FedMatch's σ as they received it."""
    received = [{"sigma": torch.ones(4, dtype=torch.float64)}] * 5
    uploads = [{"sigma": 1 + length * torch.eye(4, dtype=torch.float64)[0]} for length in (0.0, 0.0, 0.0, 1.0, 50.0)]
    bounded, excess = robust.bound_norms(received, uploads, 3.0)
    assert excess == {4: pytest.approx(50.0)}
    assert [float((upload["sigma"] - 1).norm()) for upload in bounded] == pytest.approx([0, 0, 0, 1, 3])


def test_long_updates_are_shortened_to_the_bound():
    received = [{"theta": torch.ones(4, dtype=torch.float64)}] * 4
    uploads = [{"theta": 1 + length * torch.eye(4, dtype=torch.float64)[0]} for length in (1.0, 2.0, 3.0, 1e30)]
    bounded, excess = robust.bound_norms(received, uploads, 3.0)
    assert excess == {3: pytest.approx(5e29)}
    assert [float((u["theta"] - 1).norm()) for u in bounded] == pytest.approx([1, 2, 3, 6])


# --- attacks ---------------------------------------------------------------------------------------------------
def learn(images, **changes):
    fields = {
        "rounds": 4,
        "norm": "group",
        "clients_per_round": 5,
        "partition.clients": 5,
        "partition.setting": "iid-iid",
        "engine.precision": "fp32",
        "local_steps": 6,
        "method": "fedavg-matched",
        "optimizer.learning_rate": 2e-3,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    federation = tiny.federation(tiny.experiment(fields), images)
    lines = [federation.train_round() for _ in range(federation.experiment.rounds)]
    return lines[-1]["test"]["accuracy"], lines, federation


@pytest.fixture(scope="module")
def images():
    return tiny.dataset(size=200, tests=100, classes=2, side=16)


@pytest.fixture(scope="module")
def honest(images):
    return learn(images)[0]


@pytest.mark.parametrize("kind", ["scale", "sign-flip", "noise"])
@pytest.mark.parametrize(
    "defence",
    [{"server__norm_bound": 2.0}, {"server__robust": "median"}, {"server__robust": "multi-krum"}],
    ids=["norm-bound", "median", "multi-krum"],
)
def test_a_defence_saves_what_an_attack_ruins(images, honest, kind, defence):
    attack = {"attack__kind": kind, "attack__factor": 1e4}
    ruined, _, _ = learn(images, **attack)
    saved, lines, federation = learn(images, **attack, **defence)
    assert honest > 0.9
    assert saved > 0.9
    assert ruined < 0.7
    if "server__robust" not in defence or defence["server__robust"] == "multi-krum":
        assert all(set(line["suspicious"]) == {str(c) for c in federation._hostile} for line in lines)


def test_class_counts_are_bounded_as_well_and_name_nobody():
    received = [{"theta": torch.zeros(3)} for _ in range(3)]
    uploads = [{"theta": torch.ones(3), "counts": torch.tensor([size, 0.0, 0.0])} for size in (10.0, 10.0, 1e30)]
    bounded, excess = robust.bound_norms(received, uploads, 3.0)
    assert [upload["counts"][0].item() for upload in bounded] == pytest.approx([10.0, 10.0, 30.0])
    assert excess == {}


def test_a_lie_about_counts_moves_weights_alone(images):
    _, _, federation = learn(images, rounds=1, attack__kind="lie-about-counts", attack__factor=1000.0)
    server = federation.server
    (liar,) = federation._hostile
    assert server._weight(liar) == 1000 * server.image_counts[liar].total
    assert all(server._weight(c) == server.image_counts[c].total for c in range(5) if c != liar)


def test_flipped_labels_are_those_of_hostile_clients_alone(images):
    fields = {"attack.kind": "label-flip", "attack.share": 0.25, "clients_per_round": 4}
    poisoned, honest = (tiny.federation(tiny.experiment(f), images) for f in (fields, {"clients_per_round": 4}))
    for one, other in zip(poisoned.tasks(), honest.tasks(), strict=True):
        flipped = 1 - other.batches.labels if one.client in poisoned._hostile else other.batches.labels
        torch.testing.assert_close(one.batches.labels, flipped)


@pytest.mark.parametrize("method", ["fedmatch", "proxyfl", "feddure.methods.fedmatch:FedMatch"])
def test_a_method_that_needs_single_uploads_has_no_median(images, method):
    fields = {"method": method, "server.robust": "median"}
    with pytest.raises(ConfigError, match="norm_bound"):
        tiny.federation(tiny.experiment(fields), images)
