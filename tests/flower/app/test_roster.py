"""Who is connected, round after round."""

import pytest

import federated
from feddure.errors import RunError
from feddure.flower.app import nodes as roster
from feddure.flower.app.nodes import Roster
from feddure.simulation.server import ImageCounts


@pytest.fixture
def root(tmp_path):
    return federated.write_images(tmp_path)


def make(nodes, said=None):
    description = federated.DESCRIPTION
    say = (said if said is not None else []).append
    return Roster(nodes, description.sites, description.fingerprint(), "", 5.0, say)


def asked(nodes):
    return [message.metadata.dst_node_id for message in nodes.sent]


def test_every_node_is_asked_once(root):
    nodes = federated.grid(root)
    found = make(nodes)
    for _ in range(3):
        found.update()
    assert asked(nodes) == [11, 12, 13]
    assert {client: member.site for client, member in found.members.items()} == dict(enumerate(federated.SITES))


def test_a_node_that_was_started_again_is_asked_again(root):
    nodes = federated.grid(root)
    found = make(nodes)
    found.update()
    for file in list((root / "images" / "clients" / "south" / "unlabelled").iterdir())[:9]:
        file.unlink()
    nodes.started[12] = "again"
    found.update()
    assert asked(nodes) == [11, 12, 13, 12]
    assert found.members[1].holding == ImageCounts(26, 20)


def test_a_node_that_is_gone_is_no_longer_a_member(root):
    nodes, said = federated.grid(root), []
    found = make(nodes, said)
    found.update()
    del nodes.contexts[12]
    found.update()
    assert sorted(found.members) == [0, 2]
    assert said[-1] == "site 'south' is no longer connected"


def test_a_refused_node_is_asked_again_after_a_while(root, monkeypatch):
    nodes, said = federated.grid(root), []
    (root / "images" / "clients" / "south" / "labelled" / "z").mkdir()
    found = make(nodes, said)
    found.update()
    found.update()
    assert found.refused[12] == "site 'south': a class folder that the federation does not have"
    assert asked(nodes).count(12) == 1
    (root / "images" / "clients" / "south" / "labelled" / "z").rmdir()
    monkeypatch.setattr(roster, "_ASK_AGAIN_SECONDS", 0.0)
    found.update()
    assert found.refused == {}
    assert found.members[1].site == "south"


def test_the_reason_for_a_refusal_is_said_once(root, monkeypatch):
    monkeypatch.setattr(roster, "_ASK_AGAIN_SECONDS", 0.0)
    nodes, said = federated.grid(root), []
    (root / "images" / "clients" / "south" / "labelled" / "z").mkdir()
    found = make(nodes, said)
    for _ in range(3):
        found.update()
    assert asked(nodes).count(12) == 3
    assert len([line for line in said if line.startswith("refused")]) == 1


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


@pytest.mark.parametrize("kind", ["labelled", "unlabelled", "unreadable"])
@pytest.mark.parametrize("number", [-5, 10**8 + 1, 2**40])
def test_impossible_numbers_of_images_are_refused(root, kind, number):
    nodes = federated.grid(root)
    nodes.changes[12] = saying(**{kind: number})
    found = make(nodes)
    found.update()
    assert found.refused[12] == f"site 'south': it says that its number of '{kind}' is {number}"


def test_a_client_beyond_their_number_is_refused(root):
    nodes = federated.grid(root)
    nodes.changes[12] = saying(clients=1)
    found = make(nodes)
    found.update()
    assert found.refused[12] == "site 'south': it says that it is client 1 of 1, expected a number from 0"


FORGED = "x\nfeddure: round 1/2, accuracy 99.9 %\x1b]0;title\x07\x1b[2J\u202e" + "y" * 5000


@pytest.mark.parametrize("told", [{"site": FORGED}, {"problem": FORGED}, {"version": FORGED}, {"labelled": FORGED}])
def test_what_a_site_says_is_one_short_line_of_printable_characters(root, told):
    nodes, said = federated.grid(root), []
    nodes.changes[12] = saying(**told)
    found = make(nodes, said)
    found.update()
    for line in [*said, *found.refused.values()]:
        assert line.isprintable()
        assert len(line) < 500
    assert any("x feddure: round" in line or "x\\nfeddure" in line for line in said)


def test_a_refused_site_is_shown_by_its_registered_name(root):
    nodes = federated.grid(root)
    nodes.names = {12: "south"}
    nodes.changes[12] = saying(site="north", fingerprint="another")
    found = make(nodes)
    found.update()
    assert found.refused[12].startswith("site 'south': it goes by another description")


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
    assert f"feddure: problem: the server refuses this site: {reason}." in capsys.readouterr().out


def test_a_site_that_refused_by_itself_is_not_told_what_it_said(root):
    nodes = federated.grid(root)
    (root / "images" / "clients" / "south" / "labelled" / "z").mkdir()
    found = make(nodes)
    for _ in range(3):
        found.update()
    assert refusals_heard(nodes, 12) == [None]
