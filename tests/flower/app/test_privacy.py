"""Clipping and noise on a site's updates, and servers that try to switch them off."""

import math
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from scipy.stats import kstest

import federated
from feddure import experiments
from feddure.errors import ConfigError, RunError
from feddure.flower.app import messages, privacy
from feddure.flower.app.messages import ANSWER, PARAMETERS, STATISTICS, TASK, Task
from feddure.flower.app.privacy import Protection
from feddure.simulation.server import Assignment
from feddure.tracking import records

GROUP = federated.SETTINGS + " norm=group"
CENTRAL = " server.norm_bound=null server.weight=uniform server.sampling=poisson server.dp_clip=1"
CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def updates(root, settings=GROUP, node=None, **given):
    """The norm of every site's update in the first round, and the statistics it sent."""
    norms, statistics = [], []

    def watch(message, reply):
        if PARAMETERS in reply.content.array_records:
            sent, got = (messages.unpack_state(m.content, CPU) for m in (reply, message))
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


# --- what is asked for is done -----------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["feddure", "fedmatch", "avg-f-reg"])
def test_updates_are_clipped_and_statistics_are_not(root, method):
    settings = federated.SETTINGS + " fedmatch.helper_every=1"
    norms, statistics = updates(root, settings, method=method, clip_norm=0.01)
    assert norms == pytest.approx([0.01, 0.01], rel=1e-6)
    assert all(not torch.equal(sent, got) for sent, got in statistics)
    assert first_record(root)["left_out"] == []


@pytest.mark.parametrize("scale", [0.0, 0.3, 7.0])
def test_clipping_is_flowers_own(scale):
    received = {"theta": np.linspace(-1, 1, 50), "sigma": np.full(7, 3.0)}
    sent = {name: values + scale * np.cos(np.arange(values.size)) for name, values in received.items()}
    down, up = (RecordDict({PARAMETERS: ArrayRecord({n: Array(v) for n, v in d.items()})}) for d in (received, sent))
    up[ANSWER] = ConfigRecord({"site": "a"})
    ours = privacy._protected(Protection(0.5), received, up).array_records[PARAMETERS]
    if scale:  # theirs divides by zero
        down["config"] = ConfigRecord({"clipping_norm": 0.5})
        message = Message(down, 1, "train")
        del up[ANSWER]
        theirs = fixedclipping_mod(message, None, lambda *_: Message(up, reply_to=message)).content.array_records
        for name, array in theirs[PARAMETERS].items():
            np.testing.assert_allclose(ours[name].numpy(), array.numpy(), rtol=1e-12)
    else:
        assert all(np.array_equal(ours[name].numpy(), received[name]) for name in received)


def test_noise_has_the_stated_deviation_and_what_it_does_not_cover_is_withheld(root):
    norms, _ = updates(root, clip_norm=0.01, dp_noise=3.0)
    record = first_record(root)
    values = record["communication"]["up"] / 4 / 2
    assert norms == pytest.approx([3.0 * 0.01 * values**0.5] * 2, rel=0.05)
    assert record["train"] == {}
    assert record["left_out"] == []
    assert record["privacy"]["epsilon"] == pytest.approx(privacy.dp.epsilon([(1.5, 1.0, 1)], 1e-5))


def test_noise_is_normal_new_each_time_and_on_a_grid():
    protection = Protection(2.0, 0.5)
    one, other = (privacy.add_noise(np.full(50_000, 1e-3), protection) for _ in range(2))
    assert kstest(one - 1e-3, "norm", args=(0, 1.0)).pvalue > 1e-3
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    assert np.array_equal(one, np.round(one * 2**20) / 2**20)


def test_privacy_refuses_batch_norm_statistics(root):
    with pytest.raises(ConfigError, match="batch-norm statistics cannot be made private; add --set norm=group"):
        updates(root, federated.SETTINGS, clip_norm=0.01, dp_noise=1.0)


def test_the_simulators_noise_is_none_of_a_federations(root):
    with pytest.raises(ConfigError, match="for the simulator"):
        updates(root, GROUP + CENTRAL)


# --- the stricter value counts -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "node", "expected"),
    [
        ({"clip_norm": 1.0}, {}, Protection(1.0)),
        ({"clip_norm": 1.0}, {"dp-noise": 0.5, "dp-delta": 1e-7}, Protection(1.0, 0.5, 0.0, 1e-7)),
        ({"clip_norm": 9.0, "dp_noise": 0.1}, {"clip-norm": 2.0, "dp-noise": 0.5}, Protection(2.0, 0.5)),
        ({"clip_norm": 1.0, "dp_noise": 7.0}, {"clip-norm": 2.0, "dp-noise": 0.5}, Protection(1.0, 7.0)),
        ({"clip_norm": math.nan, "dp_noise": math.nan}, {"clip-norm": 2.0, "dp-noise": 0.5}, None),
        ({"clip_norm": 5e-324}, {"clip-norm": 2.0}, None),  # where squares are 0 every norm is
        ({"clip_norm": -1.0}, {"clip-norm": 2.0}, None),
        ({"clip_norm": 1.0, "dp_noise": 1e-9}, {}, None),
        ({"dp_noise": 0.5}, {}, None),
        ({"dp_noise": math.inf}, {"clip-norm": 2.0}, None),
        ({}, {"clip-norm": math.nan}, None),
        ({}, {"clip-norm": 1.0, "dp-noise": -1.0}, None),
        ({}, {"clip-norm": 1.0, "dp-epsilon": 1.0}, None),  # an option that would be passed over in silence
        ({}, {"clip-norm": 1.0, "dp-noise": 1.0, "dp-delta": 0}, None),
        ({"experiment": "rounds: -1"}, {"clip-norm": 1.0, "dp-budget": 1.0}, None),
    ],
)
def test_what_a_site_does_for_what_run_and_node_want(asked, node, expected):
    if expected is None:
        with pytest.raises(ConfigError):
            Protection.of(asked, node)
    else:
        assert Protection.of(asked, node) == expected


@pytest.mark.parametrize("rounds", [1, 50])
def test_noise_from_a_budget_lets_a_run_finish_and_not_much_more(rounds):
    found = Protection.of({"experiment": f"rounds: {rounds}"}, {"clip-norm": 1.0, "dp-budget": 4.0})
    assert 3.99 < privacy.dp.epsilon([(found.noise / 2, 1.0, rounds)], 1e-5) <= 4.0
    asked = {"experiment": f"rounds: {rounds}", "dp_noise": 0.01}
    assert Protection.of(asked, {"clip-norm": 1.0, "dp-budget": 4.0}) == found


def test_a_node_can_be_stricter_than_the_run(root):
    norms, _ = updates(root, node={"clip-norm": 0.001}, clip_norm=0.01)
    assert norms == pytest.approx([0.001, 0.001], rel=1e-6)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"clip-norm": 0.01, "dp-noise": 1.0}, "start the run with --set norm=group"),
        ({"dp-noise": 0.5}, "without clip-norm"),
        ({"clip-norm": "/home/jane-doe"}, "is not a number"),
    ],
)
def test_what_a_node_cannot_protect_it_does_not_send(root, node, problem):
    norms, _ = updates(root, federated.SETTINGS, node=node)
    assert norms == []
    problems = {site["problem"] for site in first_record(root)["federation"]["sites"]}
    assert len(problems) == 1
    assert problem in problems.pop()


# --- a server that is not honest ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Images, and by method the experiment and what an honest server sends first, in float32."""
    root = federated.write_images(tmp_path_factory.mktemp("images"))
    sent = {}
    for method in ("feddure", "fedtutor"):
        wanted = federated.experiment({"method": method}, GROUP.replace("fp64", "fp32"))
        server = federated.simulator(root, wanted).server
        sent[method] = experiments.to_yaml(wanted), server.broadcast(Assignment(0, 1, 0, 2, 6))
    shutil.copytree(root / "images" / "test", root / "images" / "clients" / "north" / "test")
    return root, sent


@pytest.fixture
def attack(served, tmp_path):
    """Sends one site whatever it likes: `attack(change of the message, the node's options, told=...)`."""
    root, sent = served

    def send(change=lambda content: None, node=None, method="feddure", **told):
        text, state = sent[method]
        content = messages.pack_state(state)
        task = {"run_name": "run", "remembered_round": 0, "checkpointed_round": 0} | told
        content[TASK] = Task(Assignment(0, 1, 0, 2, 6), text, **task).pack()
        change(content)
        nodes = federated.grid(root, **(node or {}), state=str(tmp_path))
        (number,) = nodes.push_messages([Message(content, 11, messages.TRAIN)])
        send.message = content
        return nodes.pull_messages([number])[0].content

    return send


CLIPPED = {"clip-norm": 0.01}
NOISY = {"clip-norm": 0.01, "dp-noise": 1.0}


def problem(content):
    assert not content.array_records
    return content.config_records[ANSWER]["problem"]


def setting(place, value, name="theta", group=PARAMETERS):
    def change(content):
        values = np.array(content.array_records[group][name].numpy())
        values[place] = value
        content.array_records[group][name] = Array(values)

    return change


def test_an_array_under_many_names_is_not_unpacked(attack):
    """It is sent once, and would take memory under each name."""

    def repeat(content):
        theta = content.array_records[PARAMETERS]["theta"]
        content.array_records[PARAMETERS].update({f"theta.{number}": theta for number in range(900)})

    assert "bytes of arrays, expected at most" in problem(attack(repeat))


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("node", [{}, CLIPPED, NOISY])
def test_a_server_cannot_switch_clipping_off_with_a_value_that_is_not_finite(attack, value, node):
    """One of -inf makes the norm NaN, and min(1, clip / NaN) is 1."""
    assert "not finite" in problem(attack(setting(-1, value), node))


def test_every_tensor_that_is_sent_is_looked_at(attack):
    assert "'teacher.theta'" in problem(attack(setting(0, math.inf, "teacher.theta"), method="fedtutor"))


def test_large_values_that_overflow_in_training(attack):
    """They are finite, and what is made of them is not: no update leaves, and under noise nothing but noise."""
    assert "not finite" in problem(attack(setting(slice(None, 50), 3e38), CLIPPED))
    sent = attack(setting(slice(None, 50), 3e38), NOISY)
    found = sent.array_records[PARAMETERS]["theta"].numpy()
    assert np.isfinite(found).all()
    change = (found - attack.message.array_records[PARAMETERS]["theta"].numpy())[50:]
    assert change.std() == pytest.approx(0.01, rel=0.05)
    assert "problem" not in sent.config_records[ANSWER]


def test_parameters_so_large_that_rounding_lengthens_an_update():
    """Next to 1e5 a float32 moves by 0.008 or not at all."""
    received = {"theta": np.full(1000, 1e5, dtype=np.float32)}
    sent = RecordDict({PARAMETERS: ArrayRecord({"theta": Array(received["theta"] + np.float32(1))})})
    sent[ANSWER] = ConfigRecord({"site": "a"})
    with pytest.raises(ConfigError, match="too large"):
        privacy._protected(Protection(0.13), received, sent)


@pytest.mark.parametrize(
    "like",
    [
        lambda theta: theta.astype(np.float64),
        lambda theta: theta.astype(np.int64),
        lambda theta: theta.astype(np.float16),
        lambda theta: theta[:1],  # which stands for all in training
    ],
)
def test_another_type_of_number_or_shape(attack, like):
    def change(content):
        theta = content.array_records[PARAMETERS]["theta"].numpy()
        content.array_records[PARAMETERS]["theta"] = Array(like(theta))

    assert "did not send its like" in problem(attack(change, CLIPPED))


def test_texts_in_place_of_numbers(attack):
    def change(content):
        content.array_records[PARAMETERS]["theta"] = Array(np.array(["a", "b"]))

    assert "no array of numbers" in problem(attack(change))


def test_one_model_to_train_and_another_to_compare_with(attack):
    """Where both records had a name, training began at the one and the update was told from the other."""

    def change(content):
        content.array_records[STATISTICS]["theta"] = content.array_records[PARAMETERS]["theta"]

    assert "twice" in problem(attack(change, CLIPPED))


def test_accuracy_on_own_images_losses_and_times_are_withheld_under_noise(attack):
    told = attack(evaluate=True).config_records[ANSWER]
    assert {"test.accuracy", "train.loss", "seconds"} <= told.keys()
    told = attack(node=NOISY, evaluate=True).config_records[ANSWER]
    assert told.keys() == {"site", "client", "round", "random"}


def test_a_run_without_noise_at_a_site_that_kept_a_ledger(attack):
    """A site that is started again without its options must not go on without noise."""
    assert PARAMETERS in attack(node=NOISY).array_records
    assert "no update without noise" in problem(attack(node=CLIPPED))
    assert PARAMETERS in attack(node=CLIPPED, dp_noise=2.0).array_records


def test_a_budget_ends_a_sites_part_and_the_server_is_told(attack, capsys, tmp_path):
    node = {"clip-norm": 0.01, "dp-noise": 4.0, "dp-budget": 4.0}
    answers = 0
    while PARAMETERS in (content := attack(node=node)).array_records:  # the same round again and again
        answers += 1
        assert answers < 10
    assert privacy.dp.epsilon([(2.0, 1.0, answers)], 1e-5) <= 4.0 < privacy.dp.epsilon([(2.0, 1.0, answers + 1)], 1e-5)
    assert "privacy budget" in problem(content)
    assert f"{answers} updates" in capsys.readouterr().out
    assert "privacy budget" in problem(attack(node=node, run_name="another"))
    (tmp_path / "privacy.jsonl").unlink()
    told = problem(attack(node=node))
    assert "damaged" in told
    assert str(tmp_path) not in told
