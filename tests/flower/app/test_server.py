"""Whole runs with a server app and client apps in one process: the simulator's model, and rounds that go wrong."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode
from safetensors.torch import save_file

import federated
import tiny
from feddure.errors import ConfigError, RunError
from feddure.flower.app import server as server_app
from feddure.flower.app.messages import ANSWER, PARAMETERS, STATISTICS, array_bytes
from feddure.reports.run_report import participation, write_report
from feddure.serving.load import read_network
from feddure.simulation.federation import run
from feddure.simulation.runs import FAILURE_FILE
from feddure.tracking import records
from feddure.tracking.summary import summarise

ALL = federated.SETTINGS.replace("clients_per_round=2", "clients_per_round=3")
AUTO = federated.SETTINGS.replace("unlabelled_batch=6", "unlabelled_batch=auto")


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def simulated(root, method="feddure", settings=federated.SETTINGS, **changes):
    federation = federated.simulator(root, federated.experiment({"method": method} | changes, settings))
    run(federation)
    return federation.server


def written(root):
    return records.read(root / "run" / "metrics.jsonl")


def problems(record):
    return {site["site"]: site["problem"] for site in record["federation"]["sites"] if "problem" in site}


def trains(message, round_number=None):
    task = message.content.config_records["task"]
    return message.metadata.message_type == "train" and round_number in (None, task["round"])


# --- the simulator's model --------------------------------------------------------------------------------
def test_a_run_is_the_simulators_and_leaves_an_ordinary_folder(root):
    server = federated.federate(root, settings=ALL)
    expected = simulated(root, settings=ALL)
    tiny.assert_equal(server.state, expected.state)
    found = records.read_run(root / "run")
    assert found.finished
    assert found.experiment == server.experiment
    assert found.metrics[-1]["test"] == expected.test()["test"]
    model = read_network(root / "run")[1]
    for name, tensor in server.model_state().items():
        assert torch.equal(model.state_dict()[name].double(), tensor.to(model.state_dict()[name].dtype).double())
    assert found.timing[0]["sites"].keys() == set(federated.SITES)
    for record in found.metrics:
        sites = record["federation"]["sites"]
        assert {site["site"]: site["node"] for site in sites} == {"north": "11", "south": "12", "west": "13"}
        values = record["communication"]["down"] / 4 / 3  # the record counts four bytes a value, fp64 sends eight
        for site in sites:
            assert all(8 * values <= site["bytes"][way] <= 8 * values + 1000 for way in ("down", "up"))

    with pytest.raises(RunError, match="a run is there already"):
        federated.federate(root, settings=ALL)
    with pytest.raises(RunError, match=r"another configuration \(.*seed: 0 there, 1 given"):
        federated.federate(root, settings=ALL, resume=True, seed=1)


def test_losses_are_the_simulators(root):
    federated.federate(root, settings=ALL, rounds=1, test_folder="")
    federation = federated.simulator(root, federated.experiment({"method": "feddure"}, ALL))
    tasks = federation.tasks()
    expected = federation.finish_round(tasks, federation.engine.run(tasks))["train"]
    (record,) = written(root)
    assert record["train"]["weight"] > 0
    assert {name: record["train"][name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert "test" not in record


def test_fedmatch_with_its_helpers(root, capsys):
    settings = ALL + " fedmatch.helper_every=2 fedmatch.helpers=1 fedmatch.threshold=0"
    nodes = federated.grid(root)
    server = federated.federate(root, nodes, method="fedmatch", settings=settings)
    assert "fedmatch sends a site's parameters to other sites" in capsys.readouterr().out
    assert "helper.0" in nodes.sent[-1].content.array_records[PARAMETERS]
    tiny.assert_equal(server.state, simulated(root, "fedmatch", settings).state)


def test_proxyfl_with_its_heads_and_class_counts(root):
    settings = ALL + " proxyfl.threshold=0.35 proxyfl.tuning_epochs=8 server.ema=0.5"
    server = federated.federate(root, method="proxyfl", settings=settings)
    tiny.assert_equal(server.state, simulated(root, "proxyfl", settings).state)
    assert "loss_proxy" in written(root)[-1]["train"]
    assert read_network(root / "run", "averaged")[1].state_dict().keys() >= server.model_state().keys()


def test_server_optimiser_average_and_automatic_batches(root):
    settings = AUTO + " server.optimizer=adam server.learning_rate=0.01 server.ema=0.5 server.weight=labelled"
    server = federated.federate(root, settings=settings)
    expected = simulated(root, settings=settings)
    tiny.assert_equal(server.state, expected.state)
    tiny.assert_equal(server.moments, expected.moments)
    assert written(root)[-1]["test_ema"] == expected.test()["test_ema"]


# --- going on after a kill --------------------------------------------------------------------------------
class Killed(BaseException):
    pass


def test_a_killed_server_goes_on_from_its_last_checkpoint(root, monkeypatch):
    """Rounds are repeated that sites have trained before, with what they remembered then."""
    settings = (
        ALL + " feddure.f_reg_memory=client checkpoint_every=2 server.ema=0.5 unlabelled_batch=auto evaluate_every=5"
    )
    write = server_app.checkpoint.write

    def stop(server, folder):
        if server.round > 2:
            raise Killed
        write(server, folder)

    with monkeypatch.context() as patch:
        patch.setattr(server_app.checkpoint, "write", stop)
        with pytest.raises(Killed):
            federated.federate(root, settings=settings, rounds=5)
    assert written(root)[-1]["round"] == 4
    server = federated.federate(root, settings=settings, rounds=5, resume=True)
    expected = simulated(root, settings=settings, rounds=5)
    tiny.assert_equal(server.state, expected.state)
    assert [record["round"] for record in written(root)] == [1, 2, 3, 4, 5]
    assert written(root)[-1]["test_ema"] == expected.test()["test_ema"]


def test_a_run_starts_from_the_servers_model_and_resumes_without_its_file(root, monkeypatch):
    first = simulated(root)
    file = root / "first.safetensors"
    save_file(first.model_state(), file)
    expected = simulated(root, init=str(file), rounds=2)
    write = server_app.checkpoint.write

    def stop(server, folder):
        if server.round > 1:
            raise Killed
        write(server, folder)

    nodes = federated.grid(root)
    with monkeypatch.context() as patch:
        patch.setattr(server_app.checkpoint, "write", stop)
        with pytest.raises(Killed):
            federated.federate(root, nodes, init=str(file))
    assert "first.safetensors" not in str([message.content for message in nodes.sent])
    file.unlink()
    server = federated.federate(root, resume=True)
    tiny.assert_equal(server.state, expected.state)


def test_a_run_resumed_without_a_site_is_the_undisturbed_one(root, tmp_path, monkeypatch):
    """South joins after the first round and is away from round 3 on; it counts as a site with images all the same."""

    def federate(kill, **given):
        nodes = federated.grid(root)
        south = nodes.contexts.pop(12)
        run_next = server_app.Rounds.run_next

        def run_round(self):
            if self._server.round == 1:
                nodes.contexts[12] = south
            if self._server.round == 2:
                nodes.contexts.pop(12, None)
                if kill:
                    raise Killed
            run_next(self)

        with monkeypatch.context() as patch:
            patch.setattr(server_app.Rounds, "run_next", run_round)
            return federated.federate(root, nodes, method="fedavg", rounds=6, minimum_sites=2, settings=AUTO, **given)

    whole = federate(kill=False, run_folder=str(tmp_path / "whole"))
    with pytest.raises(Killed):
        federate(kill=True)
    resumed = federate(kill=False, resume=True)
    drawn = [record["clients"] for record in written(root)]
    assert drawn == [record["clients"] for record in records.read(tmp_path / "whole" / "metrics.jsonl")]
    tiny.assert_equal(resumed.state, whole.state)
    about = json.loads((root / "run" / "federation.json").read_text())
    assert [site["site"] for site in about["sites"]] == list(federated.SITES)
    away = [record["federation"]["drawn_but_away"] for record in written(root)][2:]
    assert away == [["south"] if 1 in clients else [] for clients in drawn[2:]]
    assert ["south"] in away


def test_a_second_server_does_not_write_into_the_same_folder(root):
    refused = []

    def start_another(message, reply):
        if trains(message) and not refused:
            with pytest.raises(RunError, match="is working on it") as problem:
                federated.federate(root, resume=True)
            refused.append(problem)
        return reply

    nodes = federated.grid(root)
    nodes.changes[11] = start_another
    federated.federate(root, nodes, settings=ALL)
    assert refused
    assert federated.federate(root, settings=ALL, resume=True).round == 2  # the lock is gone with its server


# --- sites that send what cannot be used ------------------------------------------------------------------
def replace_array(name, make, record=PARAMETERS):
    """A change of a site's answer: one of its arrays becomes another."""

    def change(message, reply):
        arrays = reply.content.array_records
        if record in arrays:
            found = dict(arrays[record])
            made = make(found.pop(name).numpy())
            reply.content[record] = ArrayRecord(found | {n: Array(a) for n, a in made.items()})
        return reply

    return change


def poisoned(values):
    values = values.copy()
    values[5] = math.nan
    return {"theta": values}


def answer_fields(**fields):
    def change(message, reply):
        if reply.content.array_records:
            for name, value in fields.items():
                reply.content.config_records[ANSWER][name.replace("__", ".")] = value
        return reply

    return change


def fails(message, reply):
    return Message(Error(code=2, reason="first line\nlast line"), reply_to=message) if trains(message) else reply


def expires(message, reply):
    return Message(Error(code=ErrorCode.MESSAGE_UNAVAILABLE), reply_to=message)


BAD = [
    (replace_array("theta", poisoned), "the update is not finite"),
    (replace_array("statistics", lambda v: {"statistics": v + math.inf}, STATISTICS), "the update is not finite"),
    (replace_array("theta", lambda v: {"theta": v[:-1]}), "sent 'theta' with shape"),
    (replace_array("theta", lambda v: {"weights": v}), "sent arrays statistics, weights"),
    (replace_array("theta", lambda v: {"theta": v, "more": v}), "sent arrays more, statistics, theta"),
    (
        replace_array("theta", lambda v: {"theta": v, "\ud800": v}),
        "sent arrays statistics, theta, \N{REPLACEMENT CHARACTER}",
    ),
    (replace_array("theta", lambda v: {"theta": np.tile(v, 9)}), "bytes of arrays, expected at most"),
    (replace_array("theta", lambda v: {"theta": v.astype(np.float32)}), "sent 'theta' as float32, expected float64"),
    (replace_array("theta", lambda v: {"theta": np.array(["a"])}), "sent arrays that cannot be read"),
    (answer_fields(round=70), "answered for another client or round"),
    (answer_fields(client=0), "answered for another client or round"),
    (fails, "error 2: last line"),
    (expires, "no answer in time"),
]


def test_answers_that_cannot_be_used_are_left_out_and_named(root, capsys):
    """South sends something else in every round; the model is that of the others."""
    nodes = federated.grid(root)

    def change(message, reply):
        return BAD[message.content.config_records["task"]["round"] - 1][0](message, reply) if trains(message) else reply

    nodes.changes[12] = change
    server = federated.federate(root, nodes, settings=ALL, rounds=len(BAD), test_folder="")
    for record, (_, reason) in zip(written(root), BAD, strict=True):
        assert record["left_out"] == [1]
        assert problems(record).keys() == {"south"}
        assert reason in problems(record)["south"]
    assert "round 1: site 'south' is left out: " in capsys.readouterr().out

    federation = federated.simulator(root, federated.experiment({"method": "feddure", "rounds": len(BAD)}, ALL))
    for _ in BAD:
        tasks = federation.tasks()
        kept = [pair for pair in zip(tasks, federation.engine.run(tasks), strict=True) if pair[0].client != 1]
        federation.finish_round(*zip(*kept, strict=True))
    tiny.assert_equal(server.state, federation.server.state)


def test_an_array_under_many_names_is_not_hashed_for_each(root, monkeypatch):
    """It is sent once; the audit log would hash it for longer than a round may take."""
    nodes, hashed = federated.grid(root), []
    nodes.changes[12] = replace_array("theta", lambda values: {f"theta.{number}": values for number in range(500)})
    monkeypatch.setattr(server_app, "describe_arrays", lambda content: hashed.append(array_bytes(content)) or {})
    federated.federate(root, nodes, settings=ALL, rounds=1)
    assert "bytes of arrays, expected at most" in problems(written(root)[0])["south"]
    assert len(hashed) == 5
    assert max(hashed) < 1e6


def test_a_site_that_lies_about_its_images_neither_ends_the_run_nor_owns_the_mean(root, capsys):
    nodes = federated.grid(root)

    def lie(message, reply):
        if message.metadata.message_type == "query":
            reply.content.config_records[ANSWER]["unlabelled"] = 99_999_999
        return reply

    nodes.changes[12] = lie
    server = federated.federate(root, nodes, settings=AUTO.replace("clients_per_round=2", "clients_per_round=3"))
    assert server.experiment.unlabelled_batch < 10
    honest, liar, other = server.weights([0, 1, 2])
    assert liar == 3 * max(honest, other)
    assert "note: site 'south' would weigh 1e+08" in capsys.readouterr().out


def test_odd_reports_beside_a_proper_update_do_no_harm(root):
    """Only numbers under plain names are recorded, and one site's nonsense does not drown what the others report."""
    nodes = federated.grid(root)
    nodes.changes[11] = answer_fields(train__loss=math.nan, test__secret=1.0, seconds=[1.0, 2.0])
    own = {f"train__{name}": 1.0 for name in ["", "<b>", *(f"own{n}" for n in range(50))]}
    nodes.changes[12] = answer_fields(train__loss=1e308, train__weight=1e29, seconds=1e29, **own)
    nodes.changes[13] = answer_fields(seconds=-5.0)
    server = federated.federate(root, nodes, settings=ALL)
    tiny.assert_equal(server.state, simulated(root, settings=ALL).state)
    for record in written(root):
        assert record["train"].keys() > {"loss", "loss_unlabelled", "d", "weight"}
        assert len(record["train"]) == 32
        assert all(name.isidentifier() for name in record["train"])
        assert 0 < record["train"]["loss"] < 10
        assert 0 <= record["train"]["weight"] <= 1
        assert all("test_of_received_model" not in site for site in record["federation"]["sites"])
    timed = [json.loads(line) for line in (root / "run" / "timing.jsonl").read_text().splitlines()]
    assert all(line["sites"] == dict.fromkeys(federated.SITES) for line in timed)


def test_a_silent_site_is_left_out_told_and_reported(root, capsys):
    nodes = federated.grid(root)
    nodes.silent_once = {12}
    del nodes.contexts[13]
    federated.federate(root, nodes, settings=ALL, rounds=2, timeout_seconds=0.1, minimum_sites=2)
    first, second = written(root)
    assert (first["left_out"], problems(first)) == ([1], {"south": "no answer in time"})
    assert second["left_out"] == []
    assert capsys.readouterr().out.count("the server did not use this site's answer of round 1: no answer in time") == 1
    found, _ = participation(records.read_run(root / "run"))
    rows = {row[0]: dict(zip(found.columns[1:], row[1:], strict=True)) for row in found.rows}
    assert list(rows) == list(federated.SITES)
    assert (rows["north"]["labelled"], rows["north"]["drawn"], rows["north"]["took part"]) == ("32", "2", "2")
    assert (rows["south"]["took part"], rows["south"]["failed"], rows["west"]["drawn"]) == ("1", "1", "0")
    assert "<h2>Sites</h2>" in write_report([root / "run"], root / "page.html").read_text()


def test_a_site_that_is_gone_is_drawn_left_out_and_welcome_when_it_returns(root):
    nodes = federated.grid(root)
    away = {}

    def leave(message, reply):
        if trains(message):
            away[13] = nodes.contexts.pop(13)
        return reply

    def return_(message, reply):
        if trains(message, 2):
            nodes.contexts[23] = away[13]
        return reply

    nodes.changes = {13: leave, 11: return_}
    federated.federate(root, nodes, settings=ALL, rounds=3)
    assert [record["left_out"] for record in written(root)] == [[], [2], []]
    assert {site["site"]: site["node"] for site in written(root)[2]["federation"]["sites"]}["west"] == "23"


def test_a_run_does_not_use_up_its_rounds_while_the_drawn_sites_are_away(root, monkeypatch):
    """As long as another site is there, an empty round would take no time at all, and the next one neither."""
    nodes = federated.grid(root)
    away, looks = {}, [0]
    nodes_of = nodes.get_nodes

    def get_nodes():
        trained = [message for message in nodes.sent if message.metadata.message_type == "train"]
        if len(trained) == 2 and not looks[0]:
            away.update({node: nodes.contexts.pop(node) for node in (12, 13)})  # round 2 draws these
        looks[0] += bool(away)
        if looks[0] == 4:
            nodes.contexts.update(away)
        return nodes_of()

    monkeypatch.setattr(nodes, "get_nodes", get_nodes)
    federated.federate(root, nodes)
    assert looks[0] > 3
    assert [record["left_out"] for record in written(root)] == [[], []]
    assert written(root)[1]["clients"] == [1, 2]


def test_rounds_without_any_usable_update_end_the_run_and_keep_the_checkpoint(root):
    nodes = federated.grid(root)
    nodes.changes = dict.fromkeys((11, 12, 13), lambda m, r: r if trains(m, 3) else fails(m, r))
    with pytest.raises(RunError, match=r"5 rounds in a row without a usable update \(site '\w+': error 2: last line"):
        federated.federate(root, nodes, settings=ALL, rounds=9, test_folder="")
    assert [len(record["left_out"]) for record in written(root)] == [3, 3, 0, 3, 3, 3, 3, 3]
    assert federated.federate(root, settings=ALL, rounds=9, resume=True, test_folder="").round == 9
    assert written(root)[-1]["left_out"] == []


def test_a_run_whose_last_rounds_used_no_site_ends_with_an_error_and_can_go_back(root):
    """One update of 1e30 is taken in round 4; the sites' own updates are not finite from then on."""
    nodes = federated.grid(root)

    def poison(message, reply):
        number = message.content.config_records["task"].get("round", 0)
        if trains(message) and number == 4:
            return replace_array("theta", lambda v: {"theta": np.full_like(v, 1e30)})(message, reply)
        return replace_array("theta", poisoned)(message, reply) if number > 4 else reply

    nodes.changes = dict.fromkeys((11, 12, 13), poison)
    given = {"settings": ALL, "rounds": 6, "test_folder": ""}
    for resume in (False, True):  # nothing is left to do the second time, and it is still no success
        with pytest.raises(RunError, match=r"the last 2 of 6 rounds used no site.*something: 2, 3, 4"):
            federated.federate(root, nodes, resume=resume, **given)
    assert not (root / "run" / "model.safetensors").exists()
    failure = json.loads((root / "run" / FAILURE_FILE).read_text())["error"]  # for who watches the folder
    assert "the last 2 of 6 rounds used no site" in failure
    with pytest.raises(RunError, match="no checkpoint of round 1 was kept; there are: 2, 3, 4"):
        federated.federate(root, resume=True, round=1, **given)
    server = federated.federate(root, resume=True, round=3, **given)
    tiny.assert_equal(server.state, simulated(root, settings=ALL, rounds=6).state)
    assert (root / "run" / "model.safetensors").exists()
    assert not (root / "run" / FAILURE_FILE).exists()


def test_the_best_checkpoint_is_kept_beside_the_last(root, monkeypatch):
    accuracies = iter((0.1, 0.9, 0.3, 0.2, 0.4, 0.5))
    found = {"loss": 1.0, "per_class": [], "confusion": []}
    monkeypatch.setattr(server_app.Server, "test", lambda self: {"test": found | {"accuracy": next(accuracies)}})
    federated.federate(root, rounds=6)
    assert server_app.checkpoint.kept_rounds(root / "run") == [2, 4, 5, 6]


@pytest.mark.parametrize(
    "told", [{"test__accuracy": 77.0}, {"test__loss": -1.0}, {"test__images": 2.5}, {"test__accuracy": True}]
)
def test_tests_that_cannot_be_are_not_recorded(root, told, capsys):
    nodes = federated.grid(root)
    honest = {"test__accuracy": 0.5, "test__loss": 1.0, "test__images": 9}
    nodes.changes = {11: answer_fields(**honest | told), 12: answer_fields(**honest)}
    federated.federate(root, nodes, settings=ALL, rounds=1)
    (record,) = written(root)
    assert ["test_of_received_model" in site for site in record["federation"]["sites"]].count(True) == 1
    assert "site 'north' reports a test that cannot be" in capsys.readouterr().out


def test_a_batch_too_large_for_anybody_asks_for_a_number(root):
    nodes = federated.grid(root)

    def claim(message, reply):
        if not trains(message):
            reply.content.config_records[ANSWER].update(unlabelled=10**8)
        return reply

    nodes.changes = dict.fromkeys((12, 13), claim)
    with pytest.raises(ConfigError, match="add --set unlabelled_batch=N"):
        federated.federate(root, nodes, settings=AUTO)
    assert not (root / "run").exists()


def test_a_site_cannot_write_lines_into_the_log(root, capsys):
    nodes = federated.grid(root)
    forged = "x\n\x1b[2Jfeddure: report: somewhere"
    nodes.changes[11] = replace_array("theta", lambda values: {forged: values})
    nodes.changes[12] = lambda m, r: Message(Error(code=2, reason=forged), reply_to=m) if trains(m) else r
    nodes.changes[13] = answer_fields(problem=forged)
    with pytest.raises(RunError, match="the last 1 of 1 rounds used no site"):
        federated.federate(root, nodes, settings=ALL, rounds=1)
    told = [line for line in capsys.readouterr().out.splitlines() if "somewhere" in line]
    assert len(told) == 3
    assert all(line.startswith("feddure: round 1: site '") and line.isprintable() for line in told)


# --- who may take part ------------------------------------------------------------------------------------
def another_description(nodes, root):
    swapped = federated.DESCRIPTION.model_copy(update={"classes": ("b", "a", "c", "d")})
    (root / "other.yaml").write_text(swapped.to_yaml())
    nodes.contexts[12].node_config["description"] = str(root / "other.yaml")


def another_key(nodes, root):
    nodes.names = {11: "north", 12: "west", 13: "west"}


def no_helpers(nodes, root):
    nodes.contexts[12].node_config["helpers"] = False


@pytest.mark.parametrize(
    ("spoil", "refused"),
    [
        (another_description, "site 'south': it goes by another description"),
        (another_key, "site 'west': its key is that of this site, but it says that it is 'south'"),
        (no_helpers, "site 'south': this site declines method 'fedmatch'"),
    ],
)
def test_a_run_goes_on_without_a_site_that_is_refused(root, spoil, refused):
    nodes = federated.grid(root)
    spoil(nodes, root)
    federated.federate(root, nodes, settings=ALL, method="fedmatch", minimum_sites=2, rounds=1)
    (record,) = written(root)
    assert sorted(record["clients"]) == [0, 2]
    (reason,) = record["federation"]["refused"]
    assert reason.startswith(refused)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"method": "fedavg-sl"}, "learns from the labels of all images, but .* without a label at north"),
        ({"settings": ALL + " batch_norm=static"}, "a server has no training images; use aggregate"),
        ({"settings": ALL, "method": "local"}, "exchanges nothing"),
    ],
)
def test_what_a_real_federation_cannot_do(root, given, problem):
    with pytest.raises(ConfigError, match=problem):
        federated.federate(root, **given)


# --- validation, and sites without labels -------------------------------------------------------------------
VALIDATED = f"{ALL} validation=0.3"


@pytest.mark.parametrize("tests", [True, False])
def test_sites_validate_the_model_they_received_on_the_simulators_images(root, tests):
    server = federated.federate(root, settings=VALIDATED, rounds=3, **{} if tests else {"test_folder": ""})
    federation = federated.simulator(root, federated.experiment({"method": "feddure", "rounds": 3}, VALIDATED))
    expected = [federation.train_round() for _ in range(3)]
    tiny.assert_equal(server.state, federation.server.state)
    first, *later = written(root)
    assert "validation" not in first
    for record, simulated_record in zip(later, expected[:-1], strict=True):
        found = record["validation"]
        assert found["round"] == simulated_record["round"]
        assert found["images"] == len(federation.partition.validation)
        assert found["accuracy"] == pytest.approx(simulated_record["validation"]["accuracy"])
        each = [site["validation_of_received_model"] for site in record["federation"]["sites"]]
        assert sum(site["images"] for site in each) == found["images"]
    best = summarise(written(root))
    assert best.score.best_round in (1, 2)
    assert (best.score.best is not None) == tests


@pytest.mark.parametrize(
    ("north", "expected"),
    [({"accuracy": 1.0, "images": 10**8}, 3 / 5), ({"accuracy": 7.0}, 0), ({"accuracy": 1.0, "images": 0}, 0)],
)
def test_a_site_does_not_decide_the_mean_of_validation_by_its_word(root, north, expected):
    nodes = federated.grid(root)
    for node, told in ((11, north), (12, {}), (13, {})):
        told = {"accuracy": 0.0, "images": 10} | told
        nodes.changes[node] = answer_fields(**{f"validation__{name}": value for name, value in told.items()})
    federated.federate(root, nodes, method="fedavg", settings=ALL)
    assert written(root)[1]["validation"]["accuracy"] == pytest.approx(expected)


def without_labels(root, *sites):
    for site in sites:
        shutil.rmtree(root / "images" / "clients" / site / "labelled")


@pytest.mark.parametrize(("method", "drawn"), [("fedavg-matched", [0, 2]), ("fedtutor", [0, 1, 2])])
def test_a_site_without_labels_joins(root, method, drawn, capsys):
    without_labels(root, "south")
    server = federated.federate(root, settings=f"{VALIDATED} fedtutor.calibrate=both", method=method)
    tiny.assert_equal(server.state, simulated(root, method, f"{VALIDATED} fedtutor.calibrate=both").state)
    for record in written(root):
        assert sorted(record["clients"]) == drawn
        assert record["left_out"] == []
    said = capsys.readouterr().out
    assert "too few are labelled to set 0.3 of them aside" in said
    assert ("1 of 3 clients have no labelled image" in said) == (method == "fedtutor")


def test_a_federation_without_any_label_is_an_error(root):
    without_labels(root, *federated.SITES)
    with pytest.raises(ConfigError, match="no site has a labelled image"):
        federated.federate(root, method="fedtutor")
