"""Clipping and noise on a site's updates."""

from contextlib import suppress

import pytest
import torch

import federated
from feddure.errors import ConfigError, RunError
from feddure.flower.app import messages
from feddure.flower.app.privacy import Protection
from feddure.tracking import records

GROUP = federated.SETTINGS + " norm=group"


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def updates(root, settings=GROUP, node=None, **given):
    """The norm of every site's update in the first round, and the statistics it sent."""
    norms, statistics = [], []

    def watch(message, reply):
        if "parameters" in reply.content.array_records:
            sent, got = (messages.unpack_state(m.content, torch.device("cpu")) for m in (reply, message))
            names = [name for name in sent if name != "statistics"]
            norms.append(torch.cat([sent[name] - got[name] for name in names]).norm().item())
            statistics.append((sent["statistics"], got["statistics"]))
        return reply

    nodes = federated.grid(root, **(node or {}))
    nodes.changes = dict.fromkeys(nodes.contexts, watch)
    with suppress(RunError):  # where no site's update could be used
        federated.federate(root, nodes, settings=settings, rounds=1, **given)
    return norms, statistics


def first_record(root):
    return records.read(root / "run" / "metrics.jsonl")[0]


@pytest.mark.parametrize("method", ["feddure", "fedmatch", "avg-f-reg"])
def test_updates_are_clipped_and_statistics_are_not(root, method):
    settings = federated.SETTINGS + " fedmatch.helper_every=1"
    norms, statistics = updates(root, settings, method=method, clipping_norm=0.01)
    assert norms == pytest.approx([0.01, 0.01], rel=1e-6)
    assert all(not torch.equal(sent, got) for sent, got in statistics)
    assert first_record(root)["left_out"] == []


def test_noise_is_that_of_the_gaussian_mechanism_and_losses_are_withheld(root):
    norms, _ = updates(root, clipping_norm=0.01, dp_epsilon=1.0)
    values = first_record(root)["communication"]["up"] / 4 / 2
    deviation = 2 * 0.01 * (2 * torch.tensor(1.25 / 1e-5).log()).sqrt().item()
    assert norms == pytest.approx([deviation * values**0.5] * 2, rel=0.05)
    assert first_record(root)["train"] == {}
    assert first_record(root)["left_out"] == []


def test_privacy_refuses_batch_norm_statistics(root):
    with pytest.raises(ConfigError, match="batch-norm statistics cannot be made private; add norm=group"):
        updates(root, federated.SETTINGS, clipping_norm=0.01, dp_epsilon=1.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dp_epsilon": 0.5}, "without a clipping norm"),
        ({"clipping_norm": 1.0, "dp_epsilon": 2.0}, "expected at most 1"),
        ({"clipping_norm": 1.0, "dp_epsilon": 0.5, "dp_delta": 1.0}, "dp-delta: 1.0 was given"),
    ],
)
def test_options_that_make_no_sense(root, given, expected):
    with pytest.raises(ConfigError, match=expected):
        updates(root, **given)


def test_the_stricter_value_counts():
    asked = {"clipping_norm": 1.0, "dp_epsilon": 0.0, "dp_delta": 1e-5}
    assert Protection.of(asked, {"dp-epsilon": 0.5, "dp-delta": 1e-7}) == Protection(1.0, 0.5, 1e-7)
    assert Protection.of(asked, {}) == Protection(1.0, 0.0, 1e-5)


@pytest.mark.parametrize(("node", "norm"), [(None, 0.01), (0.001, 0.001), (10.0, 0.01)])
def test_a_node_can_be_stricter_than_the_run_but_not_laxer(root, node, norm):
    norms, _ = updates(root, node={"clipping-norm": node} if node else {}, clipping_norm=0.01)
    assert norms == pytest.approx([norm, norm], rel=1e-6)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"clipping-norm": 0.01, "dp-epsilon": 1.0}, "use a network without them (norm=group)"),
        ({"dp-epsilon": 0.5}, "without a clipping norm"),
        ({"clipping-norm": "/home/jane-doe"}, "the site's options of privacy are not numbers"),
    ],
)
def test_what_a_node_cannot_protect_it_does_not_send(root, node, problem):
    norms, _ = updates(root, federated.SETTINGS, node=node)
    assert norms == []
    problems = {site["problem"] for site in first_record(root)["federation"]["sites"]}
    assert len(problems) == 1
    assert problem in problems.pop()
