"""Whole runs with a server app and client apps in one process: the simulator's model, and rounds that go wrong."""

import json
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode

import federated
import tiny
from feddure import data
from feddure.errors import ConfigError, RunError
from feddure.flower.app import server as server_app
from feddure.flower.app.messages import ANSWER, PARAMETERS, STATISTICS
from feddure.reports.participation import participation
from feddure.reports.run_report import write_report
from feddure.serving.network import read_network
from feddure.simulation.federation import run
from feddure.tracking import records


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def simulated(root, method="feddure", settings=federated.SETTINGS, **changes):
    federation = federated.simulator(root, federated.experiment({"method": method} | changes, settings))
    run(federation)
    return federation.server


def written(root):
    return records.read(root / "run" / "metrics.jsonl")


ALL = federated.SETTINGS.replace("clients_per_round=2", "clients_per_round=3")


# --- the same model ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "feddure", "avg-f-reg", "fedprox-uda"])
def test_a_federation_ends_with_the_simulators_model(root, method):
    server = federated.federate(root, method=method)
    expected = simulated(root, method)
    tiny.assert_equal(server.state, expected.state)
    assert server.test() == expected.test()


def test_fedmatch_with_its_helpers(root):
    settings = ALL + " fedmatch.helper_every=2 fedmatch.helpers=1 fedmatch.threshold=0"
    nodes = federated.grid(root)
    server = federated.federate(root, nodes, method="fedmatch", settings=settings)
    expected = simulated(root, "fedmatch", settings)
    assert "helper.0" in nodes.sent[-1].content.array_records[PARAMETERS]
    tiny.assert_equal(server.state, expected.state)


def test_server_optimiser_average_and_automatic_batches(root):
    settings = federated.SETTINGS.replace("unlabelled_batch=6", "unlabelled_batch=auto")
    settings += " server.optimizer=adam server.learning_rate=0.01 server.ema=0.5 server.weight=labelled"
    server = federated.federate(root, settings=settings)
    expected = simulated(root, settings=settings)
    tiny.assert_equal(server.state, expected.state)
    tiny.assert_equal(server.moments, expected.moments)
    assert written(root)[-1]["test_ema"] == expected.test()["test_ema"]


def test_what_clients_remember_is_what_the_simulators_do(root):
    settings = ALL + " feddure.f_reg_memory=client"
    server = federated.federate(root, settings=settings, rounds=3)
    tiny.assert_equal(server.state, simulated(root, settings=settings, rounds=3).state)


# --- the run folder ----------------------------------------------------------------------------------------
def test_the_run_folder_is_an_ordinary_one(root):
    server = federated.federate(root)
    found = records.read_run(root / "run")
    assert found.finished
    assert found.experiment == server.experiment
    assert found.experiment.checkpoint_every == 1
    model = read_network(root / "run")[1]
    for name, tensor in server.model_state().items():
        assert torch.equal(model.state_dict()[name].double(), tensor.to(model.state_dict()[name].dtype).double())
    assert found.timing[0]["sites"].keys() == {found.metrics[0]["federation"]["sites"][i]["site"] for i in (0, 1)}


def test_the_record_names_sites_nodes_processes_and_bytes(root):
    federated.federate(root, settings=ALL)
    for record in written(root):
        sites = record["federation"]["sites"]
        assert {site["site"]: site["node"] for site in sites} == {"north": "11", "south": "12", "west": "13"}
        assert all(site["pid"] > 0 for site in sites)
        values = record["communication"]["down"] / 4 / 3  # the record counts four bytes a value, fp64 sends eight
        for site in sites:
            for way in ("down", "up"):
                assert 8 * values <= site["bytes"][way] <= 8 * values + 1000


def test_losses_are_the_simulators(root):
    federated.federate(root, settings=ALL)
    federation = federated.simulator(root, federated.experiment({"method": "feddure"}, ALL))
    tasks = federation.tasks()
    expected = federation.finish_round(tasks, federation.engine.run(tasks))["train"]
    found = written(root)[0]["train"]
    assert found["weight"] > 0
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_no_test_folder_no_test(root):
    federated.federate(root, test_folder="")
    assert all("test" not in record for record in written(root))


def test_a_report_can_be_made(root):
    federated.federate(root)
    write_report([root / "run"], root / "run" / "report.html")
    page = (root / "run" / "report.html").read_text()
    assert "FedDure" in page


def test_a_folder_with_a_run_is_not_overwritten(root):
    federated.federate(root)
    with pytest.raises(RunError, match="a run is there already"):
        federated.federate(root)


# --- going on after a kill ---------------------------------------------------------------------------------
class Killed(BaseException):
    pass


def kill_after(monkeypatch, rounds):
    """End the server's process when so many rounds are written but the next checkpoint is not."""
    write = server_app.RunFolder.write_checkpoint

    def stop(self, server):
        if server.round > rounds:
            raise Killed
        write(self, server)

    monkeypatch.setattr(server_app.RunFolder, "write_checkpoint", stop)


@pytest.mark.parametrize("every", [1, 2])
def test_a_killed_server_goes_on_from_its_last_checkpoint(root, monkeypatch, every):
    """Also where rounds are repeated that sites have trained before, with what they remembered then."""
    settings = ALL + f" feddure.f_reg_memory=client checkpoint_every={every} server.ema=0.5 unlabelled_batch=auto"
    with monkeypatch.context() as patch:
        kill_after(patch, 2)
        with pytest.raises(Killed):
            federated.federate(root, settings=settings, rounds=5)
    assert written(root)[-1]["round"] == (3 if every == 1 else 4)
    server = federated.federate(root, settings=settings, rounds=5, resume=True)
    expected = simulated(root, settings=settings, rounds=5)
    tiny.assert_equal(server.state, expected.state)
    assert [record["round"] for record in written(root)] == [1, 2, 3, 4, 5]
    assert written(root)[-1]["test_ema"] == expected.test()["test_ema"]


@pytest.mark.parametrize("joins_late", [False, True])
def test_a_run_resumed_without_a_site_is_the_undisturbed_one(root, tmp_path, monkeypatch, joins_late):
    """From round 3 on, south is away; it counts as a site with images all the same."""

    def play(nodes, kill, **given):
        absent = nodes.contexts.pop(12) if joins_late and not given.get("resume") else None
        playing = server_app.Rounds.play

        def play_round(self):
            if self._server.round == 1 and absent is not None:
                nodes.contexts[12] = absent
            if self._server.round == 2:
                nodes.contexts.pop(12, None)
                if kill:
                    raise Killed
            playing(self)

        with monkeypatch.context() as patch:
            patch.setattr(server_app.Rounds, "play", play_round)
            return federated.federate(root, nodes, method="fedavg", rounds=6, minimum_sites=2, **given)

    settings = federated.SETTINGS.replace("unlabelled_batch=6", "unlabelled_batch=auto")
    whole = play(federated.grid(root), False, run_folder=str(tmp_path / "whole"), settings=settings)
    with pytest.raises(Killed):
        play(federated.grid(root), True, settings=settings)
    nodes = federated.grid(root)
    del nodes.contexts[12]
    resumed = play(nodes, False, resume=True, settings=settings)
    assert [r["clients"] for r in written(root)] == [
        r["clients"] for r in records.read(tmp_path / "whole" / "metrics.jsonl")
    ]
    tiny.assert_equal(resumed.state, whole.state)
    about = json.loads((root / "run" / "federation.json").read_text())
    assert [site["site"] for site in about["sites"]] == list(federated.SITES)
    away = [record["federation"]["drawn_but_away"] for record in written(root)]
    assert away[2:] == [["south"] if 1 in record["clients"] else [] for record in written(root)[2:]]
    assert ["south"] in away[2:]


def test_sites_that_are_not_there_yet_do_not_shrink_automatic_batches(root):
    nodes = federated.grid(root)
    del nodes.contexts[12], nodes.contexts[13]
    settings = federated.SETTINGS.replace("unlabelled_batch=6", "unlabelled_batch=auto")
    server = federated.federate(root, nodes, settings=settings, minimum_sites=1)
    assert server.unlabelled_batch == 5  # a fifth of north's 24


def test_a_second_server_does_not_write_into_the_same_folder(root):
    problems = []

    def start_another(message, reply):
        if trains(message) and not problems:
            with pytest.raises(RunError, match="another server is writing this run") as problem:
                federated.federate(root, resume=True)
            problems.append(problem)
        return reply

    nodes = federated.grid(root)
    nodes.changes[11] = start_another
    server = federated.federate(root, nodes, settings=federated.SETTINGS, rounds=2)
    assert problems
    tiny.assert_equal(server.state, simulated(root).state)
    assert federated.federate(root, resume=True).round == 2  # the lock is gone with its server


def test_a_resumed_run_keeps_its_configuration(root):
    federated.federate(root)
    with pytest.raises(RunError, match=r"another configuration \(.*seed: 0 there, 1 given"):
        federated.federate(root, resume=True, seed=1)


# --- sites that send what cannot be used -------------------------------------------------------------------
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


def answer_field(name, value):
    def change(message, reply):
        if reply.content.array_records:
            reply.content.config_records[ANSWER][name] = value
        return reply

    return change


def fails(message, reply):
    return Message(Error(code=2, reason="first line\nlast line"), reply_to=message) if trains(message) else reply


def expires(message, reply):
    return Message(Error(code=ErrorCode.MESSAGE_UNAVAILABLE), reply_to=message) if trains(message) else reply


def trains(message):
    return message.metadata.message_type == "train"


BAD = {
    "NaN": (replace_array("theta", poisoned), "the update is not finite"),
    "infinite statistics": (
        replace_array("statistics", lambda values: {"statistics": values + math.inf}, STATISTICS),
        "the update is not finite",
    ),
    "wrong shape": (replace_array("theta", lambda values: {"theta": values[:-1]}), "sent 'theta' with shape"),
    "wrong name": (replace_array("theta", lambda values: {"weights": values}), "sent arrays statistics, weights"),
    "one too many": (
        replace_array("theta", lambda values: {"theta": values, "more": values}),
        "sent arrays more, statistics, theta, expected statistics, theta",
    ),
    "wrong type": (
        replace_array("theta", lambda values: {"theta": values.astype(np.float32)}),
        "sent 'theta' as float32, expected float64",
    ),
    "text": (replace_array("theta", lambda values: {"theta": np.array(["a"])}), "sent arrays that cannot be read"),
    "another round": (answer_field("round", 7), "answered for another client or round"),
    "another client": (answer_field("client", 0), "answered for another client or round"),
    "an error": (fails, "error 2: last line"),
    "an expired message": (expires, "no answer in time"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_that_cannot_be_used_is_left_out_and_named(root, kind, capsys):
    change, reason = BAD[kind]
    nodes = federated.grid(root)
    nodes.changes[12] = change
    server = federated.federate(root, nodes, settings=ALL, rounds=1)
    (record,) = written(root)
    assert record["left_out"] == [1]
    problems = {site["site"]: site["problem"] for site in record["federation"]["sites"] if "problem" in site}
    assert problems.keys() == {"south"}
    assert reason in problems["south"]
    assert "round 1: site 'south' is left out: " in capsys.readouterr().out

    federation = federated.simulator(root, federated.experiment({"method": "feddure"}, ALL))
    tasks = federation.tasks()
    kept = [pair for pair in zip(tasks, federation.engine.run(tasks), strict=True) if pair[0].client != 1]
    federation.finish_round(*zip(*kept, strict=True))
    tiny.assert_equal(server.state, federation.server.state)


def test_odd_words_beside_a_proper_update_do_no_harm(root):
    nodes = federated.grid(root)
    nodes.changes[11] = answer_field("pid", b"bytes")
    nodes.changes[12] = answer_field("train.loss", math.nan)
    nodes.changes[13] = answer_field("seconds", [1.0, 2.0])
    server = federated.federate(root, nodes, settings=ALL)
    tiny.assert_equal(server.state, simulated(root, settings=ALL).state)
    assert math.isfinite(written(root)[0]["train"]["loss"])


def test_a_site_that_does_not_answer_in_time_is_left_out_and_used_again(root):
    nodes = federated.grid(root)
    nodes.silent_once = {12}
    federated.federate(root, nodes, settings=ALL, timeout_seconds=1.0)
    first, second = written(root)
    assert first["left_out"] == [1]
    assert [s["problem"] for s in first["federation"]["sites"] if "problem" in s] == ["no answer in time"]
    assert second["left_out"] == []


def test_a_site_that_is_gone_is_drawn_left_out_and_welcome_when_it_returns(root):
    nodes = federated.grid(root)
    away = {}

    def leave(message, reply):
        if trains(message):
            away[13] = nodes.contexts.pop(13)
        return reply

    def return_(message, reply):
        if trains(message) and message.content.config_records["task"]["round"] == 2:
            nodes.contexts[23] = away[13]
        return reply

    nodes.changes = {13: leave, 11: return_}
    federated.federate(root, nodes, settings=ALL, rounds=3)
    left_out = [record["left_out"] for record in written(root)]
    assert left_out == [[], [2], []]
    sites = written(root)[2]["federation"]["sites"]
    assert {site["site"]: site["node"] for site in sites}["west"] == "23"


def test_a_round_in_which_nobody_answers_keeps_the_model(root):
    nodes = federated.grid(root)
    nodes.changes = dict.fromkeys((11, 12, 13), fails)
    server = federated.federate(root, nodes, rounds=1)
    fresh = federated.simulator(root, federated.experiment({"method": "feddure"}))
    tiny.assert_equal(server.state, fresh.server.state)
    assert written(root)[0]["train"] == {}


def test_rounds_without_any_usable_update_end_the_run_and_keep_the_checkpoint(root):
    nodes = federated.grid(root)
    nodes.changes = dict.fromkeys((11, 12, 13), fails)
    with pytest.raises(RunError, match=r"5 rounds in a row without a usable update \(site '\w+': error 2: last line"):
        federated.federate(root, nodes, settings=ALL, rounds=20)
    assert len(written(root)) == 5
    server = federated.federate(root, settings=ALL, rounds=20, resume=True)
    assert server.round == 20
    assert [len(record["left_out"]) for record in written(root)] == [3] * 5 + [0] * 15


def test_single_usable_updates_keep_a_run_going(root):
    nodes = federated.grid(root)

    def fails_often(message, reply):
        return (
            reply if trains(message) and message.content.config_records["task"]["round"] == 5 else fails(message, reply)
        )

    nodes.changes = dict.fromkeys((11, 12, 13), fails_often)
    assert federated.federate(root, nodes, settings=ALL, rounds=9).round == 9


def test_one_sites_claim_does_not_become_everybodys_batch(root):
    nodes = federated.grid(root)
    nodes.changes[13] = introduced_with(unlabelled=10**8)
    settings = federated.SETTINGS.replace("unlabelled_batch=6", "unlabelled_batch=auto")
    with pytest.raises(ConfigError, match=r"would be 6666670 in each step, more than 4096; add unlabelled_batch=N"):
        federated.federate(root, nodes, settings=settings)
    assert not (root / "run").exists()


def introduced_with(**told):
    def change(message, reply):
        if not trains(message):
            reply.content.config_records[ANSWER].update(told)
        return reply

    return change


def test_huge_parameters_of_one_site_do_not_end_a_fedmatch_run(root):
    """Each is finite; their sum is not."""
    settings = ALL.replace("fp64", "fp32") + " fedmatch.helper_every=2 fedmatch.helpers=1"
    nodes = federated.grid(root)

    def huge(message, reply):
        if trains(message):
            sent = reply.content.array_records[PARAMETERS]
            arrays = {name: Array(np.full_like(array.numpy(), 3e38)) for name, array in sent.items()}
            reply.content[PARAMETERS] = ArrayRecord(arrays)
        return reply

    nodes.changes[13] = huge
    server = federated.federate(root, nodes, settings=settings, method="fedmatch", rounds=4)
    assert all(torch.isfinite(tensor).all() for tensor in server.state.values())
    for record in written(root):
        problems = {site["site"]: site["problem"] for site in record["federation"]["sites"] if "problem" in site}
        assert problems == {"west": "the update makes the model not finite"}


def test_a_site_cannot_write_lines_into_the_log(root, capsys):
    nodes = federated.grid(root)
    forged = "x\n\x1b[2Jfeddure: report: somewhere"
    nodes.changes[11] = replace_array("theta", lambda values: {forged: values})
    nodes.changes[12] = lambda m, r: Message(Error(code=2, reason=forged), reply_to=m) if trains(m) else r
    nodes.changes[13] = answer_field("problem", forged)
    federated.federate(root, nodes, settings=ALL, rounds=1)
    told = [line for line in capsys.readouterr().out.splitlines() if "somewhere" in line]
    assert len(told) == 3
    assert all(line.startswith("feddure: round 1: site '") and line.isprintable() for line in told)


def test_only_known_means_are_heard(root):
    nodes = federated.grid(root)
    for field, value in {"train.profit": 1.0, "test.secret": 1.0, "train.loss": 1e308, "train.": 2.0}.items():
        nodes.changes = dict.fromkeys((11, 12, 13), answer_field(field, value))
        federated.federate(root, nodes, settings=ALL, rounds=1, run_folder=str(root / field))
        (record,) = records.read(root / field / "metrics.jsonl")
        expected = {"loss", "loss_unlabelled", "d", "weight"} - {field.removeprefix("train.")}
        assert record["train"].keys() == expected
        assert all("test_of_received_model" not in site for site in record["federation"]["sites"])


# --- who may take part -------------------------------------------------------------------------------------
def test_a_site_with_another_description_is_refused_by_name(root, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    swapped = federated.DESCRIPTION.model_copy(update={"classes": ("b", "a", "c", "d")})
    other.write_text(swapped.to_yaml())
    nodes = federated.grid(root)
    nodes.contexts[12].node_config["description"] = str(other)
    federated.federate(root, nodes, settings=ALL, minimum_sites=2)
    for record in written(root):
        assert sorted(record["clients"]) == [0, 2]
        (refused,) = record["federation"]["refused"]
        assert refused.startswith("site 'south': it goes by another description")
    assert "refused (node 12): site 'south'" in capsys.readouterr().out


def test_a_key_of_one_site_does_not_speak_for_another(root):
    nodes = federated.grid(root)
    nodes.names = {11: "north", 12: "west", 13: "west"}
    federated.federate(root, nodes, settings=ALL, minimum_sites=2)
    assert sorted(written(root)[0]["clients"]) == [0, 2]
    assert written(root)[0]["federation"]["refused"] == [
        "site 'west': its key is that of this site, but it says that it is 'south'"
    ]


def test_a_second_node_of_the_same_site_is_refused(root):
    nodes = federated.grid(root)
    nodes.contexts[14] = federated.grid(root).contexts[12]
    federated.federate(root, nodes, settings=ALL)
    assert "connected already (node 12)" in written(root)[0]["federation"]["refused"][0]


def test_too_few_sites_are_waited_for_but_not_for_ever(root, capsys):
    nodes = federated.grid(root)
    del nodes.contexts[12]
    with pytest.raises(RunError, match=r"2 of 3 sites are connected \(not south\); start the others"):
        federated.federate(root, nodes, wait_seconds=0.1)
    assert "waiting for sites: 2 of 3 sites are connected (not south)" in capsys.readouterr().out
    assert not (root / "run").exists()


def test_a_site_that_comes_later_takes_part_from_then_on(root):
    nodes = federated.grid(root)
    late = nodes.contexts.pop(13)

    def come(message, reply):
        if trains(message):
            nodes.contexts[13] = late
        return reply

    nodes.changes[11] = come
    federated.federate(root, nodes, settings=ALL, minimum_sites=2)
    assert [sorted(record["clients"]) for record in written(root)] == [[0, 1], [0, 1, 2]]


def test_fedmatch_says_what_it_does_and_a_site_may_decline(root, capsys):
    nodes = federated.grid(root)
    nodes.contexts[12].node_config["helpers"] = False
    federated.federate(root, nodes, settings=ALL, method="fedmatch", minimum_sites=2)
    assert "feddure: fedmatch sends a site's parameters to other sites as helpers\n" in capsys.readouterr().out
    for record in written(root):
        assert sorted(record["clients"]) == [0, 2]
        assert record["federation"]["refused"] == [
            "site 'south': this site declines method 'fedmatch', which sends its parameters to other sites as helpers"
        ]
    federated.federate(root, nodes, settings=ALL, method="feddure", run_folder=str(root / "other"))
    assert "as helpers" not in capsys.readouterr().out


# --- what a real federation cannot do ----------------------------------------------------------------------
def test_full_supervision_needs_every_label(root):
    with pytest.raises(ConfigError, match=r"learns from the labels of all images, but the sites have 80"):
        federated.federate(root, method="fedavg-sl")


def test_static_statistics_need_images_at_the_server(root):
    with pytest.raises(ConfigError, match="a server has no training images; use aggregate"):
        federated.federate(root, settings=ALL + " batch_norm=static")


# --- Flower's simulation -----------------------------------------------------------------------------------
def test_clients_of_flowers_simulation_share_out_the_experiments_partition(root):
    settings = "model=cnn clients_per_round=2 local_steps=1 unlabelled_batch=4 evaluate_every=2"
    settings += " partition.labels_per_class=2 engine.device=cpu engine.precision=fp64"
    given = {"description": "", "dataset": "fashion-mini", "settings": settings}
    nodes = federated.OneProcess({n: {"partition-id": n - 1, "num-partitions": 4} for n in range(1, 5)}, given)
    server = federated.federate(root, nodes, **given)
    assert server.experiment.partition.clients == 4
    expected = tiny.finished(server.experiment, data.load("fashion-mini"))
    tiny.assert_equal(server.state, expected.server.state)
    assert json.dumps(written(root)[-1]["test"]) == json.dumps(expected.server.test()["test"])


def test_a_site_hears_why_its_answer_was_left_out(root, capsys):
    nodes = federated.grid(root)
    nodes.silent_once = {12}
    federated.federate(root, nodes, settings=ALL, rounds=3, timeout_seconds=0.1)
    heard = [line for line in capsys.readouterr().out.splitlines() if "did not use" in line]
    assert heard == ["feddure: warning: the server did not use this site's answer of round 1: no answer in time"]


def test_the_report_names_the_sites_and_what_they_did(root):
    nodes = federated.grid(root)
    nodes.silent_once = {12}
    del nodes.contexts[13]
    federated.federate(root, nodes, settings=ALL, rounds=2, timeout_seconds=0.1, minimum_sites=2)
    found = participation(records.read_run(root / "run"))
    rows = {row[0]: dict(zip(found.columns[1:], row[1:], strict=True)) for row in found.rows}
    assert list(rows) == list(federated.SITES)
    assert (rows["north"]["labelled"], rows["north"]["drawn"], rows["north"]["took part"]) == ("32", "2", "2")
    assert (rows["south"]["took part"], rows["south"]["failed"]) == ("1", "1")
    assert rows["west"]["drawn"] == "0"
    assert found.notes == ["west was never connected.", "Last problem of south: no answer in time"]
    page = write_report([root / "run"], root / "page.html").read_text()
    assert "<h2>Sites</h2>" in page
    assert "Updates of sites left out, see Sites: 1 of 4." in page
