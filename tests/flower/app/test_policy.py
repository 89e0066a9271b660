"""What a site allows, whoever asks, and what its operator approved."""

import time
from contextlib import nullcontext

import pytest
import yaml

import federated
from feddure import experiments, methods
from feddure.errors import ConfigError, RunError
from feddure.flower.app import audit
from feddure.flower.app.policy import (
    LEAVES,
    MOST_WAITING,
    Answers,
    check_approval,
    check_policy,
    check_work,
    run_hash,
)
from feddure.simulation.server import Assignment
from feddure.tracking import records


def asking(**changes):
    return experiments.to_yaml(federated.experiment(changes, federated.SETTINGS.replace("model=cnn ", "")))


@pytest.mark.parametrize("no", [False, "false", "no", 0])
def test_declining_helpers_declines_fedmatch_alone(no):
    for method in methods.METHODS:
        if method == "fedmatch":
            with pytest.raises(ConfigError, match="and helpers=false"):
                check_policy({"helpers": no}, asking(method=method))
        else:
            check_policy({"helpers": no}, asking(method=method))


def test_modules_are_refused_unless_they_are_allowed():
    for changes in ({"method": "a.b:C"}, {"model": "a.b:C"}):
        for node in ({}, {"modules": False}, {"modules": "yes"}):
            with pytest.raises(ConfigError, match="own modules are not allowed at this site; allow them"):
                check_policy(node, asking(**changes))


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        (Assignment(0, 1, 0, 1, 0), ""),
        (Assignment(0, 2, 0, 10_000, 1000), ""),
        (Assignment(0, 1, 0, 10_000, 60_000), "asks for 10000 steps on 60005 images"),
        (Assignment(0, 1, 0, 2, 2**36), "expected at most 65536 images in a step"),
        (Assignment(0, 1, 0, 0, 6), "asks for 0 steps"),
        (Assignment(0, 3, 0, 2, 6), "round 3, expected one of 1 to 2"),
        (Assignment(0, 0, 0, 2, 6), "round 0, expected one of 1 to 2"),
        (Assignment(0, 1, 0, 10_001, 6), "10001 local steps, expected 10000 at most"),
    ],
)
def test_a_server_asks_for_what_a_site_can_do_and_what_was_approved(assignment, problem):
    """Rounds and steps are those of the experiment, which a site's operator approved by hash."""
    experiment = federated.experiment(settings="model=cnn local_steps=10000 labelled_batch=5")
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_work(experiment, methods.make(experiment), assignment, 50, 500, 64)


@pytest.mark.parametrize("method", ["fedavg", "feddure"])
def test_an_epoch_is_one_over_the_sites_own_images(method):
    """The number of steps in the message is the server's; what was approved is an epoch."""
    experiment = federated.experiment({"method": method}, "model=cnn local_steps=epoch labelled_batch=5")
    found = methods.make(experiment)

    def work(steps, labelled=50, unlabelled=40):
        check_work(experiment, found, Assignment(0, 1, 0, steps, 4), labelled, unlabelled, 64)

    work(10)
    work(10, labelled=30, unlabelled=20)  # a half was taken away since the server was told
    work(10, unlabelled=1)  # images without a label that the server does not believe in yet
    with pytest.raises(ConfigError, match="asks for 1000 local steps, expected 40 at most"):
        work(1000)


def test_a_server_cannot_send_a_few_lines_that_stand_for_gigabytes():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(yaml.YAMLError, match="aliases"):
        check_policy({}, "\n".join(lines))


# --- approval ----------------------------------------------------------------------------------------
ALL = federated.SETTINGS.replace("clients_per_round=2", "clients_per_round=3").replace("batch=6", "batch=auto")


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def asking_first(root):
    nodes = federated.grid(root)
    nodes.contexts[12].node_config["approve"] = "ask"
    return nodes, Answers(root / "state" / "south")


def clients(root):
    return [sorted(record["clients"]) for record in records.read(root / "run" / "metrics.jsonl")]


def test_a_run_waits_for_its_approval_and_the_server_knows(root, capsys):
    nodes, answers = asking_first(root)
    with pytest.raises(RunError, match="site 'south': its operator has not approved run"):
        federated.federate(root, nodes, settings=ALL, wait_seconds=0.1)
    (waiting,) = answers.waiting()
    assert f"sites approve this run as {waiting}" in capsys.readouterr().out
    assert answers.read()[waiting]["asks"].startswith("feddure, cnn, 2 rounds of 2 local steps. What leaves the site:")
    answers.answer(waiting, approved=True)
    federated.federate(root, nodes, settings=ALL)
    assert clients(root) == [[0, 1, 2]] * 2
    events = [entry["event"] for entry in audit.read(root / "state" / "south" / audit.FILE).entries]
    assert events == ["run asks for approval", "run approved", "trained", "trained"]


def test_a_refused_run_goes_on_without_the_site(root):
    nodes, answers = asking_first(root)
    with pytest.raises(RunError):
        federated.federate(root, nodes, settings=ALL, wait_seconds=0.1)
    answers.answer(*answers.waiting(), approved=False)
    federated.federate(root, nodes, settings=ALL, minimum_sites=2)
    assert clients(root) == [[0, 2]] * 2
    (reason,) = records.read(root / "run" / "metrics.jsonl")[0]["federation"]["refused"]
    assert "operator refused run" in reason


def approve_first(root, nodes, answers, **given):
    """A run that was asked for, approved, and carried out."""
    with pytest.raises(RunError):
        federated.federate(root, nodes, settings=ALL, wait_seconds=0.1, **given)
    answers.answer(*answers.waiting(), approved=True)
    federated.federate(root, nodes, settings=ALL, **given)


def test_an_approval_is_for_one_run(root):
    """The same experiment once more, and a run that is resumed, ask again."""
    nodes, answers = asking_first(root)
    approve_first(root, nodes, answers)
    for again in ({"run_folder": str(root / "another")}, {"resume": True, "round": 1}):
        nodes.begin_another_run()
        with pytest.raises(RunError, match="site 'south': its operator has not approved run"):
            federated.federate(root, nodes, settings=ALL, wait_seconds=0.1, **again)
    assert len(answers.waiting()) == 2


def test_a_server_that_gives_a_run_an_old_number_gains_no_round(root):
    """The site has counted: whatever the server calls its run, an approval is for each round once."""
    nodes, answers = asking_first(root)
    approve_first(root, nodes, answers)
    federated.federate(root, nodes, settings=ALL, run_folder=str(root / "another"))
    (first, second) = records.read(root / "another" / "metrics.jsonl")
    for record in (first, second):
        (south,) = (site for site in record["federation"]["sites"] if site["site"] == "south")
        assert "an approval is for each round once" in south["problem"]
    events = [entry["event"] for entry in audit.read(root / "state" / "south" / audit.FILE).entries]
    assert events[2:] == ["trained", "trained", "refused to train", "refused to train"]


@pytest.mark.parametrize("by", ["ask", "hash"])
def test_rounds_of_an_approval_go_up_and_are_counted_over_restarts(tmp_path, by):
    experiment = asking(method="fedtutor", rounds=5)
    found = run_hash(experiment, 7)
    node = {"site": "south", "state": str(tmp_path), "approve": "ask" if by == "ask" else found}
    if by == "ask":
        Answers(tmp_path).ask(found, "a run")
        Answers(tmp_path).answer(found, approved=True)
    for number in (1, 3, 4):  # a site is not drawn in each round
        check_approval(node, experiment, 7, number)
    for number in (4, 3, 2, 1, 0):
        with pytest.raises(ConfigError, match="each round once"):
            check_approval(node, experiment, 7, number)
    check_approval(node, experiment, 7)  # who the site is may be asked again
    check_approval(node, experiment, 7, 5)


def test_a_hash_approves_one_run(root):
    experiment = asking(method="fedtutor")
    node = {"site": "south", "state": str(root), "approve": run_hash(experiment, 7)}
    check_approval(node, experiment, 7)
    for other in ((experiment, 8), (asking(method="fedtutor", rounds=3), 7)):
        with pytest.raises(ConfigError, match="approved run"):
            check_approval(node, *other)


def test_a_site_that_says_nothing_of_approval_asks(root):
    with pytest.raises(ConfigError, match="waits for your approval"):
        check_approval({"site": "south", "state": str(root)}, asking(), 7)


def test_a_server_that_does_not_ask_first_is_refused_too(root):
    """One that introduces itself with one experiment and trains another."""
    approved, other = (experiments.to_yaml(federated.experiment({"rounds": rounds})) for rounds in (2, 3))
    node = {"site": "south", "state": str(root), "approve": run_hash(approved, 7)}
    check_approval(node, approved, 7)
    check_approval(node, experiments.to_yaml(federated.experiment({"unlabelled_batch": 31})), 7)  # settled since
    with pytest.raises(ConfigError, match="approved run"):
        check_approval(node, other, 7)


def test_only_a_run_that_asked_can_be_answered(root):
    with pytest.raises(ConfigError, match="has not asked"):
        Answers(root).answer("0" * 16, approved=True)


def test_what_is_approved_names_all_that_leaves(root):
    """Each thing that a site's answers hold, the share for validation, and how long it trains."""
    asked = asking(method="fedtutor", validation=0.2)
    with pytest.raises(ConfigError, match="waits for your approval") as waits:
        check_approval({"site": "south", "state": str(root)}, asked, 7)
    for told in ("2 rounds of 2 local steps", "0.2 of the labelled images", *LEAVES):
        assert told in str(waits.value)
    everything = " ".join(LEAVES)
    for told in ("parameters", "batch-norm", "unreadable", "losses", "seconds", "test", "validation", "version"):
        assert told in everything


def test_what_is_approved_names_class_counts_where_a_method_sends_them(root):
    answers = Answers(root)
    for method in ("proxyfl", "fedtutor"):
        node = {"site": "south", "approve": "ask", "state": str(root)}
        with pytest.raises(ConfigError):
            check_approval(node, experiments.to_yaml(federated.experiment({"method": method})), 7)
    asked = [entry["asks"] for entry in answers.read().values()]
    assert ["of each class" in text for text in asked] == [True, False]


def test_a_server_cannot_fill_a_sites_disk_with_questions(root):
    answers = Answers(root)
    for number in range(30):
        answers.ask(f"{number:032x}", "a run")
    assert len(answers.waiting()) == len(answers.read()) == MOST_WAITING
    answers.answer(answers.waiting()[0], approved=True)
    assert answers.ask("f" * 32, "a run") is None
    assert len(answers.waiting()) == MOST_WAITING


def test_a_run_that_asks_no_longer_does_not_wait(root, monkeypatch):
    """It is over: the next one is answered with one word, and no old one keeps it from asking."""
    answers = Answers(root)
    for number in range(MOST_WAITING):
        answers.ask(f"{number:032x}", "a run")
    monkeypatch.setattr("time.time", lambda now=time.time(): now + 2 * 3600)
    assert answers.waiting() == []
    assert answers.ask("f" * 32, "a run") is None
    assert answers.waiting() == ["f" * 32]
    assert len(answers.read()) == 1
