"""Differential privacy of clients in the simulator."""

import math

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy.stats import kstest, norm

import feddure
import tiny
from feddure import experiments, rng
from feddure.errors import ConfigError
from feddure.simulation import dp
from oracle.dp_twin import PrivateTwin

PRIVATE = {
    "norm": "group",
    "server.weight": "uniform",
    "server.sampling": "poisson",
    "server.dp_clip": 0.05,
    "server.dp_noise": 0.5,
}


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("clip", [1e-3, 0.05, 1e3])
def test_rounds_equal_the_textbook(images, noise, clip):
    experiment = tiny.experiment(PRIVATE | {"server.dp_noise": noise, "server.dp_clip": clip, "rounds": 3})
    owned = tiny.partition(experiment, images)
    federation = tiny.federation(experiment, images, owned=owned)
    server, twin = federation.server, PrivateTwin(experiment, images, owned)

    def draw(number):
        bits = rng.bits(server.state["theta"].numel(), experiment.seed, number, "dp noise").tolist()
        numbers = torch.tensor(norm.ppf([(value // 4096 + 0.5) / 2**52 for value in bits]))
        return server.program.network.state_dict(numbers, server.state["statistics"])

    twin.draw = draw
    for _ in range(experiment.rounds):
        record = federation.train_round()
        twin.play()
        assert record["clients"] == twin.clients(twin.round)
        tiny.assert_near(server.model_state(), twin.state)


def test_clients_join_each_by_itself(images):
    experiment = tiny.experiment(PRIVATE | {"clients_per_round": 2})
    server = tiny.federation(experiment, images).server
    drawn = [server.sample(number) for number in range(1, 2001)]
    sizes = [len(clients) for clients in drawn]
    assert {0, 1, 2, 3, 4} == set(sizes)
    assert np.mean(sizes) == pytest.approx(2, abs=0.1)
    together = np.mean([0 in clients and 1 in clients for clients in drawn])
    assert together == pytest.approx(1 / 4, abs=0.04)  # drawn without replacement it would be 1/6


def test_a_round_of_nobody_has_noise_too(images):
    """Otherwise an unchanged model would tell that nobody took part."""
    experiment = tiny.experiment(PRIVATE | {"clients_per_round": 1, "partition.clients": 4, "rounds": 40})
    federation = tiny.federation(experiment, images)
    while federation.server.sample(federation.round + 1):
        federation.train_round()
    before = federation.server.state["theta"]
    record = federation.train_round()
    assert record["clients"] == []
    change = federation.server.state["theta"] - before
    assert change.std().item() == pytest.approx(0.5 * 0.05, rel=0.05)


def test_the_account_is_opacus_own_and_in_every_record(images):
    federation = tiny.federation(tiny.experiment(PRIVATE), images)
    for number in (1, 2):
        found = federation.train_round()["privacy"]
        accountant = RDPAccountant()
        for _ in range(number):
            accountant.step(noise_multiplier=0.5, sample_rate=3 / 4)
        assert found == {"epsilon": pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9), "delta": 1e-5}
    without = tiny.federation(tiny.experiment(PRIVATE | {"server.dp_noise": 0.0}), images).train_round()
    assert without["privacy"]["epsilon"] is None
    assert "privacy" not in tiny.federation(tiny.experiment(), images).train_round()


def exact_delta(epsilon, noise):
    """δ of one Gaussian mechanism at ε, exactly (Balle and Wang, 2018)."""
    return norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * norm.cdf(-0.5 / noise - epsilon * noise)


@pytest.mark.parametrize(("noise", "times"), [(0.3, 1), (1.0, 1), (5.0, 1), (5.0, 16), (40.0, 4), (200.0, 1)])
def test_the_account_never_promises_more_than_the_gaussian_mechanism_holds(noise, times):
    """Uses of one mechanism are one with less noise: its exact ε is below the accountant's, and not far."""
    told = dp.epsilon([(noise, 1.0, times)], 1e-5)
    assert exact_delta(told, noise / math.sqrt(times)) <= 1e-5
    assert exact_delta(told / 1.35 - 0.02, noise / math.sqrt(times)) > 1e-5


def test_noise_is_normal():
    assert kstest(dp.gaussian(rng.bits(100_000, 0)), "norm").pvalue > 0.01
    ends = dp.gaussian(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert np.isfinite(ends).all()
    assert ends[0] == -ends[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"server.dp_clip": None}, "without server.dp_clip"),
        ({"server.weight": "total"}, "server.weight=uniform"),
        ({"server.sampling": "fixed"}, "server.sampling=poisson"),
        ({"batch_norm": "static"}, "server.sampling=fixed"),
        ({"norm": "batch"}, "norm=group"),
        ({"method": "avg-f-reg"}, "sends other things"),
        ({"method": "fedmatch"}, "sends other things"),
    ],
)
def test_what_cannot_be_private_is_refused(images, changes, expected):
    wanted = {**tiny.EXPERIMENT, **PRIVATE, **changes}
    with pytest.raises(ConfigError, match=expected):
        tiny.federation(experiments.load(changes=wanted), images)


class FrozenStart(torch.nn.Sequential):
    """A network whose first layer is not trained."""

    def __init__(self, channels, classes):
        layers = torch.nn.Conv2d(channels, 4, 3).requires_grad_(False), torch.nn.Flatten(), torch.nn.LazyLinear(classes)
        super().__init__(*layers)
        self(torch.zeros(1, channels, 12, 12))


def test_what_is_frozen_gets_no_noise(images):
    feddure.register_network("frozen-start", FrozenStart)
    experiment = tiny.experiment(PRIVATE | {"model": "frozen-start", "rounds": 2})
    federation = tiny.federation(experiment, images)
    before = {name: tensor.clone() for name, tensor in federation.server.model_state().items()}
    for _ in range(2):
        federation.train_round()
    after = federation.server.model_state()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["2.weight"], after["2.weight"])
