"""Who is connected, round after round."""

import threading

import httpx
import pytest

import federated
from feddure.errors import ConfigError, RunError
from feddure.flower.app import nodes as connected
from feddure.flower.app.nodes import ConnectedSites
from feddure.flower.app.registry import Registry
from feddure.simulation.server import ImageCounts


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def make(nodes):
    description = federated.DESCRIPTION
    return ConnectedSites(nodes, description.sites, description.fingerprint(), "", 5.0)


def asked(nodes):
    return [message.metadata.dst_node_id for message in nodes.sent]


def test_every_node_is_asked_once(root):
    nodes = federated.grid(root)
    found = make(nodes)
    for _ in range(3):
        found.update()
    assert asked(nodes) == [11, 12, 13]
    assert {client: site.name for client, site in found.by_client.items()} == dict(enumerate(federated.SITES))


CANNOT = [
    KeyError("arraychunk_ids"),
    httpx.HTTPStatusError(
        "Server error '500'", request=httpx.Request("POST", "https://x"), response=httpx.Response(500)
    ),
]


@pytest.mark.parametrize("problem", CANNOT, ids=["here", "at the SuperLink"])
def test_an_answer_that_cannot_be_put_together_is_that_sites_problem_alone(root, monkeypatch, capsys, problem):
    nodes, whole = federated.grid(root), federated.OneProcess.pull_messages

    def pull(self, numbers):
        numbers = list(numbers)
        if any(self._replies[number].metadata.src_node_id == 12 for number in numbers if number in self._replies):
            raise problem
        return whole(self, numbers)

    monkeypatch.setattr(federated.OneProcess, "pull_messages", pull)
    found = make(nodes)
    found.update()
    assert sorted(found.by_client) == [0, 2]
    assert f"cannot be put together ({type(problem).__name__}" in capsys.readouterr().out


def test_an_answer_whose_arrays_do_not_come_keeps_no_other_waiting(root, monkeypatch):
    monkeypatch.setattr(connected, "_FETCH_SECONDS", 0.2)
    nodes, whole, ended = federated.grid(root), federated.OneProcess.pull_messages, threading.Event()

    def pull(self, numbers):
        numbers = list(numbers)
        if any(self._replies[number].metadata.src_node_id == 12 for number in numbers if number in self._replies):
            ended.wait(60)
        return whole(self, numbers)

    monkeypatch.setattr(federated.OneProcess, "pull_messages", pull)
    found = make(nodes)
    try:
        found.update()
        assert sorted(found.by_client) == [0, 2]
    finally:
        ended.set()


def test_a_node_that_was_started_again_is_asked_again(root):
    nodes = federated.grid(root)
    found = make(nodes)
    found.update()
    for file in list((root / "images" / "clients" / "south" / "unlabelled").iterdir())[:9]:
        file.unlink()
    nodes.started[12] = "again"
    found.update()
    assert asked(nodes) == [11, 12, 13, 12]
    assert found.by_client[1].counts == ImageCounts(26, 20)


def test_a_refused_node_is_asked_again_after_a_while(root, monkeypatch):
    nodes = federated.grid(root)
    (root / "images" / "clients" / "south" / "labelled" / "z").mkdir()
    found = make(nodes)
    found.update()
    found.update()
    assert found.refused[12] == "site 'south': a class folder that the federation does not have"
    assert asked(nodes).count(12) == 1
    (root / "images" / "clients" / "south" / "labelled" / "z").rmdir()
    monkeypatch.setattr(connected, "_ASK_AGAIN_SECONDS", 0.0)
    found.update()
    assert found.refused == {}
    assert found.by_client[1].name == "south"


def test_whoever_is_missing_is_named_with_the_reasons(root):
    nodes = federated.grid(root)
    del nodes.contexts[11]
    (root / "images" / "clients" / "south" / "labelled" / "z").mkdir()
    with pytest.raises(
        RunError, match=r"1 of 3 sites are connected \(not north, south\); site 'south': a class folder that"
    ):
        make(nodes).wait(3, 0.1)


def saying(**told):
    """A change of a site's answer."""

    def change(message, reply):
        reply.content.config_records["answer"].update(told)
        return reply

    return change


FORGED = "x\nfeddure: round 1/2, accuracy 99.9 %\x1b]0;title\x07\x1b[2J\u202e" + "y" * 5000


@pytest.mark.parametrize("told", [{"site": FORGED}, {"problem": FORGED}, {"version": FORGED}, {"labelled": FORGED}])
def test_what_a_site_says_is_one_short_line_of_printable_characters(root, told, capsys):
    nodes = federated.grid(root)
    nodes.changes[12] = saying(**told)
    found = make(nodes)
    found.update()
    logged = capsys.readouterr().out.splitlines()
    for line in [*logged, *found.refused.values()]:
        assert line.isprintable()
        assert len(line) < 500
        assert not line.startswith("feddure: round")
    assert len(logged) in (6, 7)  # three sites and the server; another version is noted


def refusals_heard(nodes, node):
    """The reasons that a node was given with the server's questions."""
    asked = [message for message in nodes.sent if message.metadata.dst_node_id == node]
    return [message.content.config_records["task"].get("refused") for message in asked]


def test_a_refused_node_hears_the_servers_reason_once(root, capsys):
    nodes = federated.grid(root)
    nodes.names = {12: "west"}
    found = make(nodes)
    for _ in range(4):
        found.update()
    reason = "site 'west': its key is that of this site, but it says that it is 'south'"
    assert found.refused == {12: reason}
    assert refusals_heard(nodes, 12) == [None, reason]
    assert refusals_heard(nodes, 11) == [None]
    assert f"feddure: problem: the server refuses this site: {reason};" in capsys.readouterr().out


@pytest.mark.parametrize("registered", ["east", "a-site-of-a-very-long-name-" * 3])
def test_a_site_that_was_added_since_cannot_take_the_place_of_one_that_is_away(root, registered):
    """The run knows nothing of its name, and so must not pass over the question whose key it is."""
    nodes = federated.grid(root)
    nodes.names = {11: "north", 12: registered, 13: "west"}
    found = make(nodes)
    found.update()
    assert sorted(found.by_client) == [0, 2]
    assert "it says that it is 'south'" in found.refused[12]


@pytest.mark.parametrize(
    "told", [{"labelled": -5}, {"unlabelled": 10**8 + 1}, {"unreadable": 2**40}, {"labelled": True, "clients": 1}]
)
def test_impossible_numbers_are_refused(root, told):
    nodes = federated.grid(root)
    nodes.changes[12] = saying(**told)
    found = make(nodes)
    found.update()
    assert found.refused[12].startswith("site 'south': it says that")
    assert 1 not in found.by_client


class TestRegisteredCounts:
    """What a site said first counts until the operator approves another number."""

    def join(self, root, labelled):
        nodes = federated.grid(root)
        nodes.changes[12] = saying(labelled=labelled)
        description = federated.DESCRIPTION
        found = ConnectedSites(nodes, description.sites, description.fingerprint(), "", 5.0, Registry(root))
        found.update()
        return found

    def test_a_later_claim_of_more_counts_once_it_is_approved(self, root, capsys):
        assert self.join(root, 26).by_client[1].counts.labelled == 26
        found = self.join(root, 10**7)
        assert found.by_client[1].counts.labelled == 26
        assert "note: site 'south' says 10000000 labelled" in capsys.readouterr().out
        assert found.by_client[1].notice
        assert not found.by_client[0].notice
        Registry(root).approve("south")
        found.update()  # while the run goes on
        assert found.by_client[1].counts.labelled == 10**7

    def test_a_claim_does_not_become_the_first_one_where_its_site_was_revoked(self, root):
        self.join(root, 26)
        found = self.join(root, 10**7)
        Registry(root).forget("south")  # the SuperLink hears of it a moment later
        found.update()
        assert found.by_client[1].counts.labelled == 26
        assert "south" not in Registry(root).read()

    def test_fewer_images_count_at_once(self, root):
        self.join(root, 26)
        assert self.join(root, 5).by_client[1].counts.labelled == 5
        assert self.join(root, 26).by_client[1].counts.labelled == 26

    def test_a_site_that_nobody_has_heard_of_cannot_be_approved(self, root):
        with pytest.raises(ConfigError, match="no run has heard of it"):
            Registry(root).approve("south")
