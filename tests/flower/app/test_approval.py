"""A site takes part in what its operator approved, and in nothing else."""

import pytest

import federated
from feddure import experiments
from feddure.errors import ConfigError, RunError
from feddure.flower.app import audit
from feddure.flower.app.approval import MOST_WAITING, Answers, check_approval, run_hash
from feddure.tracking import records

ALL = federated.SETTINGS.replace("clients_per_round=2", "clients_per_round=3").replace("batch=6", "batch=auto")


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def asking(root):
    nodes = federated.grid(root)
    nodes.contexts[12].node_config["approve"] = "ask"
    return nodes, Answers(root / "state" / "south")


def clients(root):
    return [sorted(record["clients"]) for record in records.read(root / "run" / "metrics.jsonl")]


def test_a_run_waits_for_its_approval_and_the_server_knows(root, capsys):
    nodes, answers = asking(root)
    with pytest.raises(RunError, match="site 'south': its operator has not approved run"):
        federated.federate(root, nodes, settings=ALL, wait_seconds=0.1)
    (waiting,) = answers.waiting()
    assert f"sites approve this run as {waiting}" in capsys.readouterr().out
    assert answers.read()[waiting]["asks"].startswith("feddure, cnn, 2 rounds; what leaves the site:")
    answers.answer(waiting, approved=True)
    federated.federate(root, nodes, settings=ALL)
    assert clients(root) == [[0, 1, 2]] * 2
    events = [entry["event"] for entry in audit.read(root / "state" / "south" / audit.FILE).entries]
    assert events == ["run asks for approval", "run approved", "trained", "trained"]


def test_a_refused_run_goes_on_without_the_site(root):
    nodes, answers = asking(root)
    with pytest.raises(RunError):
        federated.federate(root, nodes, settings=ALL, wait_seconds=0.1)
    answers.answer(*answers.waiting(), approved=False)
    federated.federate(root, nodes, settings=ALL, minimum_sites=2)
    assert clients(root) == [[0, 2]] * 2
    (reason,) = records.read(root / "run" / "metrics.jsonl")[0]["federation"]["refused"]
    assert "operator refused run" in reason


def test_a_server_that_does_not_ask_first_is_refused_too(root):
    """One that introduces itself with one experiment and trains another."""
    approved, other = (experiments.to_yaml(federated.experiment({"rounds": rounds})) for rounds in (2, 3))
    node = {"site": "south", "approve": run_hash(approved)}
    check_approval(node, approved)
    check_approval(node, experiments.to_yaml(federated.experiment({"unlabelled_batch": 31})))  # settled since
    with pytest.raises(ConfigError, match="approved run"):
        check_approval(node, other)


def test_only_a_run_that_asked_can_be_answered(root):
    with pytest.raises(ConfigError, match="has not asked"):
        Answers(root).answer("0" * 16, approved=True)


def test_what_is_approved_names_class_counts_where_a_method_sends_them(root):
    answers = Answers(root)
    for method in ("proxyfl", "fedtutor"):
        node = {"site": "south", "approve": "ask", "state": str(root)}
        with pytest.raises(ConfigError):
            check_approval(node, experiments.to_yaml(federated.experiment({"method": method})))
    asked = [entry["asks"] for entry in answers.read().values()]
    assert ["of each class" in text for text in asked] == [True, False]


def test_a_server_cannot_fill_a_sites_disk_with_questions(root):
    answers = Answers(root)
    for number in range(30):
        answers.ask(f"{number:032x}", "a run")
    assert len(answers.waiting()) == MOST_WAITING
    answers.answer(answers.waiting()[0], approved=True)
    assert answers.ask("f" * 32, "a run") is None
    assert len(answers.waiting()) == MOST_WAITING
