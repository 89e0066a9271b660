"""The server's parts: who visits, what is registered, and what keeps it from starting."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from feddure.deployment import certificates, control, server
from feddure.deployment.certificates import CertificateError
from feddure.deployment.control import Control, Node, RunState
from feddure.deployment.gate import Visit
from feddure.deployment.layout import ServerFolder, Settings, read_settings, write_settings
from feddure.deployment.processes import free_port
from feddure.errors import RunError


class Flower:
    """Stands for the `flwr` program: nodes by number, answered as JSON."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str], **_: Any) -> Any:
        words = [Path(command[0]).name, *command[1:]]
        self.asked.append(" ".join(words[1:3]))
        answer: dict[str, Any] = {"success": True}
        if words[1:3] == ["supernode", "register"]:
            answer["node-id"] = number = str(100 + len(self.asked))
            self.nodes[number] = "registered"
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
    Control(own).register(("north",))
    assert flower.asked.count("supernode register") == 2


def test_a_site_without_a_key_is_named_and_the_others_go_on(own: ServerFolder, flower: Flower) -> None:
    own.public_key("north").unlink()
    shown: list[str] = []
    Control(own, shown.append).register(("north", "south"))
    assert flower.asked.count("supernode register") == 1
    assert any(line.startswith("site north: no public key") for line in shown)


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


def test_an_address_that_is_not_this_machines_is_refused_with_the_option(own: ServerFolder) -> None:
    write_settings(own, Settings("127.0.0.1", free_port(), True))
    with pytest.raises(RunError, match=r"192\.0\.2\.1 port 9092: cannot listen there .*--host ADDRESS"):
        start(own, "192.0.2.1")


def test_settings_survive_and_a_damaged_file_is_named(own: ServerFolder) -> None:
    assert read_settings(own) == Settings("127.0.0.1", 9093, True)
    own.settings.write_text("{}")
    with pytest.raises(RunError, match=r"settings\.json: cannot be read"):
        read_settings(own)
