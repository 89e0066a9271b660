"""The server's parts: who visits, what is registered, and what keeps it from starting."""

import base64
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from feddure.errors import RunError
from feddure.flower.deploy import certificates, control, server
from feddure.flower.deploy.certificates import CertificateError
from feddure.flower.deploy.control import Control, Node, RunState
from feddure.flower.deploy.layout import ServerFolder, Settings, read_settings, write_settings
from feddure.flower.deploy.processes import Ended, began, free_port
from feddure.flower.deploy.proxy import Visit


class Flower:
    """Stands for the `flwr` program: nodes by number, answered as JSON; no key is taken twice."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.keys: set[str] = set()
        self.asked: list[str] = []
        self.options: dict[str, Any] = {}
        self.ends_after_registering = self.fails_after_registering = False

    def __call__(self, command: Sequence[str], **options: Any) -> Any:
        self.options = options
        words = [Path(command[0]).name, *command[1:]]
        self.asked.append(" ".join(words[1:3]))
        answer: dict[str, Any] = {"success": True}
        if words[1:3] == ["supernode", "register"]:
            key = Path(words[3]).read_text().split()[1]
            if key in self.keys:
                return _Done(1, json.dumps({"success": False, "error-message": "Public key already in use."}), "")
            self.keys.add(key)
            answer["node-id"] = number = str(100 + len(self.asked))
            self.nodes[number] = "registered"
            if self.ends_after_registering:
                raise Ended(signal.SIGINT)
            if self.fails_after_registering:
                return _Done(1, "", "connection lost")
        elif words[1:3] == ["supernode", "unregister"]:
            self.nodes[words[3]] = "unregistered"
        elif words[1:3] == ["supernode", "list"]:
            answer["nodes"] = [
                {"node-id": number, "status": status, "online-at": "today", "offline-at": "N/A"}
                for number, status in self.nodes.items()
            ]
        return _Done(0, "✅ done\n" + json.dumps(answer) + "\n", "")


class _Done:
    def __init__(self, returncode: int, stdout: str, stderr: str) -> None:
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Flower:
    found = Flower()
    monkeypatch.setattr(control.subprocess, "run", found)
    return found


def test_each_key_is_registered_once_and_stays_so_over_restarts(own: ServerFolder, flower: Flower) -> None:
    shown: list[str] = []
    Control(own, shown.append).register(("north", "south"))
    assert flower.asked.count("supernode register") == 2
    assert any("nodes/north.pub federation --name north" in line for line in shown)
    Control(own).register(("north", "south"))
    assert flower.asked.count("supernode register") == 2
    assert [(node.site, node.status) for node in Control(own).nodes()] == [
        ("north", "registered"),
        ("south", "registered"),
    ]


def test_a_new_key_takes_the_place_of_the_old(own: ServerFolder, flower: Flower) -> None:
    Control(own).register(("north",))
    (old,) = Control(own).nodes()
    line = certificates.public_line(certificates.make_node_key(), "north")
    own.public_key("north").write_bytes(line)
    Control(own).register(("north",))
    assert flower.nodes[old.node] == "unregistered"
    (new,) = Control(own).nodes()
    assert new.node != old.node


def test_a_lost_database_means_registering_again(own: ServerFolder, flower: Flower) -> None:
    Control(own).register(("north",))
    flower.nodes.clear()
    flower.keys.clear()
    Control(own).register(("north",))
    assert flower.asked.count("supernode register") == 2


def test_a_site_without_a_key_is_named_and_the_others_go_on(own: ServerFolder, flower: Flower) -> None:
    own.public_key("north").unlink()
    shown: list[str] = []
    Control(own, shown.append).register(("north", "south"))
    assert flower.asked.count("supernode register") == 1
    assert any(line.startswith("site north: no public key") for line in shown)


@pytest.mark.parametrize("sites", [("north", "south"), ("south",)])
def test_a_site_whose_key_is_taken_away_is_shut_out(own: ServerFolder, flower: Flower, sites: tuple[str, ...]) -> None:
    Control(own).register(("north", "south"))
    north, south = Control(own).nodes()
    own.public_key("north").unlink()
    Control(own).register(sites)
    assert (flower.nodes[north.node], flower.nodes[south.node]) == ("unregistered", "registered")
    assert list(json.loads(own.registered.read_text())) == ["south"]


def test_a_site_that_left_the_description_is_shut_out(own: ServerFolder, flower: Flower) -> None:
    Control(own).register(("north", "south"))
    north, _ = Control(own).nodes()
    Control(own).register(("south",))
    assert flower.nodes[north.node] == "unregistered"
    assert [node.site for node in Control(own).nodes()] == ["south"]


def test_a_key_that_comes_back_is_a_note_and_the_others_go_on(own: ServerFolder, flower: Flower) -> None:
    first = own.public_key("north").read_bytes()
    Control(own).register(("north",))
    own.public_key("north").unlink()
    Control(own).register(("north",))
    own.public_key("north").write_bytes(first)
    shown: list[str] = []
    Control(own, shown.append).register(("north", "south"))
    assert any(line.startswith("site north: this key was used before") for line in shown)
    assert [node.site for node in Control(own).nodes()] == ["south"]


def test_a_registration_that_was_broken_off_is_found_again(own: ServerFolder, flower: Flower) -> None:
    Control(own).register(("south",))
    flower.nodes["7"] = "registered"  # by somebody else, before
    flower.ends_after_registering = True
    with pytest.raises(Ended):
        Control(own).register(("north", "south"))
    assert [node.site for node in Control(own).nodes()] == ["south"]
    flower.ends_after_registering = False
    shown: list[str] = []
    Control(own, shown.append).register(("north", "south"))
    assert shown == []
    south, north = Control(own).nodes()
    assert (south.site, north.site) == ("south", "north")
    assert north.node not in (south.node, "7")
    assert flower.nodes[north.node] == "registered"


def test_a_registration_that_never_reached_the_superlink_is_done_again(own: ServerFolder, flower: Flower) -> None:
    flower.ends_after_registering = True
    with pytest.raises(Ended):
        Control(own).register(("north",))
    flower.nodes.clear()
    flower.keys.clear()
    flower.ends_after_registering = False
    Control(own).register(("north",))
    assert [node.site for node in Control(own).nodes()] == ["north"]


def test_a_registration_without_an_answer_is_found_again(own: ServerFolder, flower: Flower) -> None:
    flower.fails_after_registering = True
    with pytest.raises(RunError, match="connection lost"):
        Control(own).register(("north",))
    flower.fails_after_registering = False
    Control(own).register(("north",))
    assert [node.site for node in Control(own).nodes()] == ["north"]


def test_ctrl_c_is_not_passed_to_flowers_commands(own: ServerFolder, flower: Flower) -> None:
    Control(own).nodes()
    assert flower.options["start_new_session"]


def test_nodes_that_are_online_say_since_when(own: ServerFolder, flower: Flower) -> None:
    Control(own).register(("north",))
    number = next(iter(flower.nodes))
    flower.nodes[number] = "online"
    assert Control(own).nodes() == [Node("north", number, "online", "today")]


@pytest.mark.parametrize(
    "done",
    [
        _Done(1, "", "no such run"),
        _Done(0, json.dumps({"success": False, "error-message": "no such run"}), ""),
        _Done(0, "no such run", ""),
        _Done(1, "", "\x1b[31mno such run\x1b[0m"),
    ],
)
def test_flowers_failures_are_quoted(own: ServerFolder, monkeypatch: pytest.MonkeyPatch, done: _Done) -> None:
    monkeypatch.setattr(control.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RunError, match=r"`flwr list federation --format json` failed:\nno such run"):
        Control(own).runs()


def test_only_a_completed_run_is_completed() -> None:
    def state(status: str) -> tuple[bool, bool]:
        found = RunState("1", status, 0.0)
        return found.completed, found.going_on

    assert state("finished:completed") == (True, False)
    assert state("finished:failed") == state("finished:stopped") == (False, False)
    assert state("running") == state("pending") == (False, True)


def test_the_operator_is_told_who_joins_leaves_and_is_turned_away(made: ServerFolder) -> None:
    north = certificates.public_pem(certificates.read_public_key(made.public_key("north")))
    shown: list[str] = []
    visits = server.Visits({north: "north"}, shown.append)
    key, stranger = base64.b64encode(north), base64.b64encode(b"someone")
    visits(Visit("activate-node", key, "10.0.0.1", 200))
    visits(Visit("pull-messages", key, "10.0.0.1", 200))
    visits(Visit("push-messages", key, "10.0.0.1", 403))  # of a run that was stopped
    visits(Visit("deactivate-node", key, "10.0.0.1", 200))
    visits(Visit("activate-node", stranger, "10.0.0.9", 403))
    visits(Visit("activate-node", stranger, "10.0.0.9", 403))
    visits(Visit("activate-node", key, "10.0.0.1", 401))
    assert [line.split("  ", 1)[1] for line in shown] == [
        "north joined from 10.0.0.1",
        "north left",
        "turned away: 10.0.0.9 (a key that is not registered)",
        "turned away: 10.0.0.1 (north: is its clock right?)",
    ]


def test_strangers_from_everywhere_do_not_fill_the_memory() -> None:
    shown: list[str] = []
    visits = server.Visits({b"a key": "north"}, shown.append)
    for number in range(3000):
        visits(Visit("activate-node", None, f"2001:db8::{number:x}", 401))
    assert len(shown) == len(visits._refused) == 1000


def start(folder: ServerFolder, host: str | None = None) -> None:
    with server.serving(folder, host, lambda line: None):
        pytest.fail("the server started")


def test_an_ended_certificate_keeps_the_server_from_starting(
    own: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    authority = certificates.read_private_key(own.authority_key), certificates.read_certificate(own.authority)
    certificates.write_certificate(own.certificate, certificates.make_server("127.0.0.1", authority)[1])
    with pytest.raises(CertificateError, match="feddure federate renew"):
        start(own)


def test_a_server_key_that_others_can_read_is_refused(own: ServerFolder) -> None:
    own.key.chmod(0o640)
    with pytest.raises(CertificateError, match="chmod 600"):
        start(own)


def test_a_server_that_runs_already_is_named(own: ServerFolder) -> None:
    parent = os.getppid()
    own.running.write_text(json.dumps([{"pid": parent, "name": "feddure", "began": began(parent)}]))
    with pytest.raises(RunError, match=f"the server of {own.root} runs on this machine already.*`kill {parent}`"):
        start(own)


def test_an_address_that_is_not_this_machines_is_refused_with_the_option(own: ServerFolder) -> None:
    write_settings(own, Settings("127.0.0.1", free_port(), True))
    with pytest.raises(RunError, match=r"192\.0\.2\.1 port 9092: cannot listen there .*--host ADDRESS"):
        start(own, "192.0.2.1")


def test_a_name_that_leads_only_to_this_machine_itself_is_refused(
    own: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(server.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RunError, match=r"fed\.example\.org: stands for 127\.0\.1\.1.*--host 0\.0\.0\.0"):
        start(own, "fed.example.org")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_who_names_the_loopback_address_gets_it(host: str) -> None:
    assert server._bind_address(host) in ("127.0.0.1", "::1")


def test_settings_survive_and_a_damaged_file_is_named(own: ServerFolder) -> None:
    assert read_settings(own) == Settings("127.0.0.1", 9093, True)
    own.settings.write_text("{}")
    with pytest.raises(RunError, match=r"settings\.json: cannot be read"):
        read_settings(own)
