"""One message at a site: the simulator's result for the same task, and answers instead of accidents."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

import federated
import tiny
from feddure import experiments
from feddure.errors import RunError
from feddure.flower.app import limits, messages
from feddure.flower.app.client import Memory
from feddure.flower.app.messages import ANSWER, TASK, Task
from feddure.simulation.server import Assignment

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """The simulator's, before its first round."""
    root = federated.write_images(tmp_path_factory.mktemp("federation"))
    return federated.simulator(root, federated.experiment({"method": "feddure", "clients_per_round": 3}))


def train(nodes, node, federation, assignment=None, received=None, **changes):
    """A site's reply to the message for one of the simulator's assignments."""
    assignment = assignment or next(a for a in federation.server.assignments() if a.client == node - 11)
    told = {"run_name": "run", "remembered_round": 0, "checkpointed_round": 0} | changes
    content = messages.pack_state(received or federation.server.broadcast(assignment))
    content[TASK] = Task(assignment, experiments.to_yaml(federation.experiment), **told).pack()
    if state := nodes.contexts[node].node_config.get("state"):
        Path(state).mkdir(parents=True, exist_ok=True)
        limits.allow_download(Path(state), nodes.run_id, messages.array_bytes(content))  # as when asked who it is
    (number,) = nodes.push_messages([Message(content, node, messages.TRAIN)])
    (reply,) = nodes.pull_messages([number])
    return reply


def answer(reply):
    told = dict(reply.content.config_records[ANSWER])
    assert len(told.pop("random")) == 16
    return told


@pytest.mark.parametrize("broken", ["audit.jsonl", "privacy.jsonl"])
def test_an_accident_outside_the_training_tells_no_path(root, federation, broken):
    nodes = federated.grid(root, **{"dp-noise": 4.0, "clip-norm": 1.0} if broken == "privacy.jsonl" else {})
    (root / "state" / "north" / broken).mkdir(parents=True)
    told = str(answer(train(nodes, 11, federation)))
    assert "problem" in told
    assert str(root) not in told


@pytest.mark.parametrize("key", ["site", "data", "state", "description"])
def test_a_node_that_does_not_say_all_of_itself_sends_nothing(root, federation, key):
    """Without a state folder there would be no ledger, without a description the server would say what classes mean."""
    nodes = federated.grid(root)
    del nodes.contexts[11].node_config[key]
    reply = train(nodes, 11, federation)
    assert f"has no '{key}'" in answer(reply)["problem"]
    assert not reply.content.array_records


def test_a_run_without_a_description_is_refused(root, federation):
    nodes = federated.grid(root)
    nodes.contexts[11].run_config.clear()
    reply = train(nodes, 11, federation)
    assert "problem" in answer(reply)
    assert not reply.content.array_records


def test_a_message_without_a_task_is_answered_without_the_details(root, federation):
    nodes = federated.grid(root)
    (number,) = nodes.push_messages([Message(RecordDict(), 11, messages.TRAIN)])
    (reply,) = nodes.pull_messages([number])
    assert answer(reply)["problem"] == "KeyError at the site; its log has the details"


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "fedavg-fixmatch", "feddure", "fedmatch", "avg-f-reg", "baseline+maml"),
        *("fedtutor", "sage", "proxyfl"),
    ],
)
def test_a_site_trains_as_the_simulators_client_does(root, method):
    changes = {"method": method, "clients_per_round": 3, "proxyfl.threshold": 0.35}
    federation = federated.simulator(root, federated.experiment(changes))
    nodes = federated.grid(root)
    tasks = federation.tasks()
    for task, result in zip(tasks, federation.engine.run(tasks), strict=True):
        reply = train(nodes, 11 + task.client, federation)
        tiny.assert_equal(messages.unpack_state(reply.content, CPU), result.upload)
        assert answer(reply)["train.loss"] == pytest.approx(result.records["loss"].mean().item(), rel=1e-12)


def test_an_answer_holds_means_and_nothing_of_a_single_image(root, federation):
    told = answer(train(federated.grid(root), 11, federation))
    assert told.keys() == {
        *("site", "client", "round", "seconds"),
        *("train.loss", "train.loss_unlabelled", "train.d", "train.weight"),
    }
    assert all(isinstance(value, str | int | float) for value in told.values())


@pytest.mark.parametrize("gone", ["labelled", "unlabelled"])
@pytest.mark.parametrize("method", ["feddure", "fedmatch"])
def test_a_site_without_one_kind_of_images_trains(root, gone, method):
    federation = federated.simulator(root, federated.experiment({"method": method, "clients_per_round": 3}))
    shutil.rmtree(root / "images" / "clients" / "north" / gone)
    reply = train(federated.grid(root), 11, federation)
    assert "problem" not in answer(reply)
    upload = messages.unpack_state(reply.content, CPU)
    assert all(torch.isfinite(tensor).all() for tensor in upload.values())
    assert any(not torch.equal(upload[name], federation.server.state[name]) for name in upload)


def test_a_site_tests_the_received_model_on_its_own_images_when_asked(root, federation):
    shutil.copytree(root / "images" / "test", root / "images" / "clients" / "north" / "test")
    nodes = federated.grid(root)
    told = answer(train(nodes, 11, federation, evaluate=True))
    assert told["test.accuracy"] == federation.server.test()["test"]["accuracy"]
    assert told["test.images"] == 24
    assert "test.accuracy" not in answer(train(nodes, 11, federation))


def only_a_broken_file(home):
    shutil.rmtree(home)
    (home / "unlabelled").mkdir(parents=True)
    (home / "unlabelled" / "jane-doe.png").write_bytes(b"no image")


WRONG = {
    "class": (
        lambda home: (home / "labelled" / "jane-doe").mkdir(),
        "a class folder that the federation does not have",
    ),
    "part": (
        lambda home: (home / "jane-doe").mkdir(),
        "a folder of another name beside labelled, unlabelled, test",
    ),
    "file": (
        lambda home: (home / "labelled" / "jane-doe.png").write_bytes(b"x"),
        "a file in labelled/ that is in no class folder",
    ),
    "no image": (only_a_broken_file, "no readable image in labelled/ or unlabelled/"),
    "no parts": (
        lambda home: [shutil.rmtree(home / part) for part in ("labelled", "unlabelled")],
        "its folder has neither labelled/ nor unlabelled/",
    ),
    "no folder": (shutil.rmtree, "its folder of images is not there"),
    "a loop": (
        lambda home: (home / "unlabelled" / "jane-doe").symlink_to(home),
        "DataError at the site; its log has the details",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_goes_wrong_at_a_site_is_answered_without_paths_and_names(root, federation, kind, capsys):
    """The site's own log has them."""
    spoil, public = WRONG[kind]
    home = root / "images" / "clients" / "north"
    spoil(home)
    reply = train(federated.grid(root), 11, federation)
    assert answer(reply) == {"problem": public, "site": "north"}
    assert not reply.content.array_records
    assert f"problem: {home}" in capsys.readouterr().out


def test_a_round_that_does_not_fit_into_memory_is_refused(root, federation, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10_000))
    told = answer(train(federated.grid(root), 11, federation))
    assert "the images of this round" in told["problem"]


@pytest.mark.parametrize(("name", "value"), [("round", "../../x"), ("steps", 2.0), ("run_name", 7), ("dp_noise", "0")])
def test_wrong_types_in_a_task_are_refused(root, federation, name, value):
    nodes = federated.grid(root)
    assignment = next(a for a in federation.server.assignments() if a.client == 0)
    content = messages.pack_state(federation.server.broadcast(assignment))
    task = Task(assignment, experiments.to_yaml(federation.experiment), "run", 0, 0).pack()
    content[TASK] = ConfigRecord({**task, name: value})
    (number,) = nodes.push_messages([Message(content, 11, messages.TRAIN)])
    assert f"'{name}'" in answer(nodes.pull_messages([number])[0])["problem"]


def test_a_server_cannot_ask_for_a_million_helpers(root):
    nodes = federated.grid(root)
    wanted = experiments.to_yaml(federated.experiment({"method": "fedmatch", "fedmatch.helpers": 10**6}))
    asked = RecordDict({TASK: ConfigRecord({"experiment": wanted})})
    (number,) = nodes.push_messages([Message(asked, 11, messages.QUERY)])
    assert "helpers, expected 64 at most" in answer(nodes.pull_messages([number])[0])["problem"]


@pytest.mark.parametrize("method", ["fedtutor", "fedmatch", "proxyfl", "feddure"])
def test_a_site_expects_messages_of_the_size_that_the_server_sends(root, method):
    """The SuperNode refuses larger ones: no honest message may be, and none that is far larger may come in."""
    nodes = federated.grid(root)
    federated.federate(root, nodes, method=method, rounds=3, settings=federated.SETTINGS + " fedmatch.helper_every=1")
    sent = [m for m in nodes.sent if m.metadata.message_type == messages.TRAIN]
    largest = max(messages.array_bytes(message.content) for message in sent)
    for site in federated.SITES:
        allowed = limits.allowed_download(root / "state" / site, 1)
        assert largest + limits.METADATA_BYTES // 2 < allowed < 10 * largest + limits.METADATA_BYTES


@pytest.mark.parametrize("name", ["method", "model"])
def test_a_server_cannot_make_a_site_import_a_module(root, name, tmp_path, monkeypatch):
    (tmp_path / f"own_{name}.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    wanted = {"model": "cnn"} | {name: f"own_{name}:Class"}
    text = experiments.to_yaml(federated.experiment(wanted, federated.SETTINGS.replace("model=cnn ", "")))
    for allowed in (False, True):
        nodes = federated.grid(root, modules=allowed)
        content = messages.pack_state({"theta": torch.zeros(1)})
        content[TASK] = Task(Assignment(0, 1, 0, 1, 6), text, "run", 0, 0).pack()
        for kind in (messages.QUERY, messages.TRAIN):
            (number,) = nodes.push_messages([Message(content, 11, kind)])
            told = answer(nodes.pull_messages([number])[0])
            assert (told.get("problem") == "own modules are not allowed at this site") == (not allowed)
        assert (tmp_path / "imported").exists() == allowed


def test_a_site_without_helpers_declines_fedmatch_under_any_name(root):
    """A site that allows modules is asked for the package's own class by its import path."""
    wanted = {"method": "feddure.methods.fedmatch:FedMatch"}
    nodes = federated.grid(root, modules=True, helpers=False)
    content = messages.pack_state({"theta": torch.zeros(1)})
    text = experiments.to_yaml(federated.experiment(wanted))
    content[TASK] = Task(Assignment(0, 1, 0, 1, 6), text, "run", 0, 0).pack()
    for kind in (messages.QUERY, messages.TRAIN):
        (number,) = nodes.push_messages([Message(content, 11, kind)])
        assert "declines method 'fedmatch'" in answer(nodes.pull_messages([number])[0])["problem"]


def test_an_unexpected_error_is_answered_without_its_details(root, federation, capsys):
    reply = train(federated.grid(root), 11, federation, received={"theta": torch.zeros(3, dtype=torch.float64)})
    assert answer(reply) == {"problem": "KeyError at the site; its log has the details", "site": "north"}
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"size": 16}, "size is 16 here, 12 there"),
        ({"classes": ("b", "a", "c", "d")}, "b, a, c, d here, a, b, c, d there"),
    ],
)
def test_a_site_with_another_description_is_told_what_differs(root, federation, tmp_path, capsys, changes, told):
    """The server hears which fields."""
    own = tmp_path / "own.yaml"
    own.write_text(federated.DESCRIPTION.model_copy(update=changes).to_yaml())
    problem = answer(train(federated.grid(root, description=str(own)), 11, federation))["problem"]
    assert f"another description of the federation (in {next(iter(changes))})" in problem
    assert str(own) not in problem
    said = capsys.readouterr().out
    assert str(own) in said
    assert told in said


def test_a_site_reads_a_line_for_each_round(root, federation, capsys):
    shutil.copytree(root / "images" / "test", root / "images" / "clients" / "north" / "test")
    reply = train(federated.grid(root), 11, federation, evaluate=True, left_out="round 0: no answer in time")
    warning, line = [text for text in capsys.readouterr().out.splitlines() if text.startswith("feddure: ")]
    assert warning == "feddure: warning: the server did not use this site's answer of round 0: no answer in time"
    told = answer(reply)
    assert line.startswith(f"feddure: round 1/{federation.experiment.rounds}: loss {told['train.loss']:.3f}, received")
    assert f"{100 * told['test.accuracy']:.1f} % on 24 own test images" in line


def test_a_reason_of_the_server_is_one_short_line(root, capsys):
    forged = "x\nfeddure: round 1/2, accuracy 99.9 %\x1b[2J" + "y" * 5000
    content = RecordDict({TASK: ConfigRecord({"experiment": "", "refused": forged})})
    federated.grid(root).push_messages([Message(content, 12, messages.QUERY)])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    assert len(line) < 600


# --- memory ------------------------------------------------------------------------------------------------
def test_memory_is_kept_at_the_site_and_follows_what_the_server_used(root):
    """The second round goes on from the first one's F-reg, or starts afresh where the server did not use it."""
    changes = {"method": "feddure", "feddure.f_reg_memory": "client", "clients_per_round": 3}
    federation = federated.simulator(root, federated.experiment(changes))
    nodes = federated.grid(root)
    first = Assignment(0, 1, 0, 2, 6)
    second = Assignment(0, 2, 0, 2, 6)
    received = federation.server.broadcast(first)
    train(nodes, 11, federation, first, received)
    kept = weights(train(nodes, 11, federation, second, received, remembered_round=1))
    fresh = weights(train(nodes, 11, federation, second, received, remembered_round=0))
    assert kept != fresh

    train(nodes, 11, federation, first, received)
    again = weights(train(federated.grid(root), 11, federation, second, received, remembered_round=1))
    assert again == kept


def weights(reply):
    return json.dumps(messages.unpack_state(reply.content, CPU)["theta"].tolist())


# --- where memories lie ----------------------------------------------------------------------------
def value(memory, round_number):
    found = memory.recall(round_number)
    return None if found is None else found["w"].item()


def test_a_memory_is_that_of_its_run_and_round(tmp_path):
    Memory(tmp_path, "one").keep(3, {"w": torch.tensor([1 / 3], dtype=torch.float64)}, ())
    assert value(Memory(tmp_path, "one"), 3) == 1 / 3
    assert Memory(tmp_path, "one").recall(3)["w"].dtype == torch.float64
    assert value(Memory(tmp_path, "one"), 2) is None
    assert value(Memory(tmp_path, "two"), 3) is None


def test_only_what_the_server_may_go_back_to_is_kept(tmp_path):
    memory = Memory(tmp_path, "one")
    memory.keep(1, {"w": torch.tensor([1.0])}, ())
    memory.keep(2, {"w": torch.tensor([2.0])}, (1,))
    memory.keep(3, {"w": torch.tensor([3.0])}, (2, 1))
    memory.keep(4, {"w": torch.tensor([4.0])}, (3, 1))
    assert [value(memory, number) for number in range(1, 5)] == [1, None, 3, 4]


def test_a_server_that_renames_its_run_in_every_message_does_not_fill_the_disk(tmp_path):
    for number in range(20):
        Memory(tmp_path, f"run{number}").keep(1, {"w": torch.ones(1)}, ())
    assert len(list((tmp_path / "memory").iterdir())) == 16
    assert value(Memory(tmp_path, "run19"), 1) == 1


def test_nobody_else_can_read_a_memory(tmp_path):
    state = tmp_path / "state"
    Memory(state, "one").keep(1, {"w": torch.ones(1)}, ())
    modes = {path.name: path.stat().st_mode & 0o777 for path in (state, *state.rglob("*"))}
    assert modes == {"state": 0o700, "memory": 0o700, "one": 0o700, "round-1.safetensors": 0o600}


def test_a_damaged_memory_counts_as_lost(tmp_path):
    Memory(tmp_path, "one").keep(1, {"w": torch.ones(1)}, ())
    (tmp_path / "memory" / "one" / "round-1.safetensors").write_bytes(b"torn")
    assert Memory(tmp_path, "one").recall(1) is None


@pytest.mark.parametrize("name", ["../other", "", "a/b", "..", "a.b"])
def test_the_server_cannot_choose_a_path_at_the_site(name, tmp_path):
    with pytest.raises(RunError, match="expected letters and digits"):
        Memory(tmp_path, name)
