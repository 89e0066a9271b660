"""Flower's programs: their environment, and what the operator asks of the SuperLink."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from feddure.errors import ConfigError, RunError
from feddure.flower.deploy import certificates, control
from feddure.flower.deploy.control import Control
from feddure.flower.deploy.processes import Terminated


@pytest.mark.parametrize("text", ["plain", "two words", "it's", 'a "b"', "C:\\images", "a=b c=d", ""])
def test_flower_reads_texts_back_as_they_were(text):
    assert parse_config_args([control.toml_pairs({"one": text, "two": 2})]) == {"one": text, "two": 2}


@pytest.mark.parametrize("text", ["'\"", "it's\\here", "two\nlines"])
def test_texts_that_flower_would_misread_are_refused(text):
    with pytest.raises(ConfigError, match="quotation marks"):
        control.toml_pairs({"one": text})


def test_flower_is_quiet_and_finds_its_programs(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin", "no_proxy": "example.org"})
    found = control.environment(Path("/home"), Path("/first"))
    assert found["FLWR_HOME"] == "/home"
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["PATH"].split(os.pathsep) == ["/first", str(Path(sys.executable).parent), "/usr/bin"]
    assert found["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert found["NO_PROXY"] == "127.0.0.1,localhost"


class Flower:
    """Stands for the `flwr` program: nodes by number, answered as JSON; no key is taken twice."""

    def __init__(self):
        self.nodes = {}
        self.keys = set()
        self.asked = []
        self.options = {}
        self.ends_after_registering = self.fails_after_registering = False

    def __call__(self, command, **options):
        self.options = options
        words = [Path(command[0]).name, *command[1:]]
        self.asked.append(" ".join(words[1:3]))
        answer = {"success": True}
        if words[1:3] == ["supernode", "register"]:
            key = Path(words[3]).read_text().split()[1]
            if key in self.keys:
                return _Done(1, json.dumps({"success": False, "error-message": "Public key already in use."}), "")
            self.keys.add(key)
            answer["node-id"] = number = str(100 + len(self.asked))
            self.nodes[number] = "registered"
            if self.ends_after_registering:
                raise Terminated(signal.SIGINT)
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
    def __init__(self, returncode, stdout, stderr):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def flower(monkeypatch):
    found = Flower()
    monkeypatch.setattr(control.subprocess, "run", found)
    return found


def test_each_key_is_registered_once_and_stays_so_over_restarts(own, flower):
    shown = []
    Control(own, shown.append).register(("north", "south"))
    assert flower.asked.count("supernode register") == 2
    assert any("nodes/north.pub federation --name north" in line for line in shown)
    Control(own).register(("north", "south"))
    assert flower.asked.count("supernode register") == 2
    assert [(node.site, node.status) for node in Control(own).sites()] == [
        ("north", "registered"),
        ("south", "registered"),
    ]


def test_a_new_key_takes_the_place_of_the_old(own, flower):
    Control(own).register(("north",))
    (old,) = Control(own).sites()
    line = certificates.public_line(certificates.make_node_key().public_key(), "north")
    own.public_key("north").write_bytes(line)
    Control(own).register(("north",))
    assert flower.nodes[old.node] == "unregistered"
    (new,) = Control(own).sites()
    assert new.node != old.node


def test_a_lost_database_means_registering_again(own, flower):
    Control(own).register(("north",))
    flower.nodes.clear()
    flower.keys.clear()
    Control(own).register(("north",))
    assert flower.asked.count("supernode register") == 2


def test_a_site_without_a_key_is_named_and_the_others_go_on(own, flower):
    own.public_key("north").unlink()
    shown = []
    Control(own, shown.append).register(("north", "south"))
    assert flower.asked.count("supernode register") == 1
    assert any(line.startswith("site north: no public key") for line in shown)


@pytest.mark.parametrize("sites", [("north", "south"), ("south",)])
def test_a_site_whose_key_is_taken_away_is_shut_out(own, flower, sites):
    Control(own).register(("north", "south"))
    north, south = Control(own).sites()
    own.public_key("north").unlink()
    Control(own).register(sites)
    assert (flower.nodes[north.node], flower.nodes[south.node]) == ("unregistered", "registered")
    assert list(json.loads(own.registered.read_text())) == ["south"]


def test_a_damaged_key_does_not_keep_another_site_that_was_revoked(own, flower):
    Control(own).register(("north", "south"))
    north, south = Control(own).sites()
    own.public_key("north").unlink()
    own.public_key("south").write_text("half a ke")
    shown = []
    Control(own, shown.append).register(("north", "south"))
    assert (flower.nodes[north.node], flower.nodes[south.node]) == ("unregistered", "registered")
    assert any(line.startswith("site south: ") for line in shown)


def test_a_key_that_comes_back_is_a_note_and_the_others_go_on(own, flower):
    first = own.public_key("north").read_bytes()
    Control(own).register(("north",))
    own.public_key("north").unlink()
    Control(own).register(("north",))
    own.public_key("north").write_bytes(first)
    shown = []
    Control(own, shown.append).register(("north", "south"))
    assert any(line.startswith("site north: this key was used before") for line in shown)
    assert [node.site for node in Control(own).sites()] == ["south"]


def test_a_registration_that_was_broken_off_is_found_again(own, flower):
    Control(own).register(("south",))
    flower.nodes["7"] = "registered"  # by somebody else, before
    flower.ends_after_registering = True
    with pytest.raises(Terminated):
        Control(own).register(("north", "south"))
    assert [node.site for node in Control(own).sites()] == ["south"]
    flower.ends_after_registering = False
    shown = []
    Control(own, shown.append).register(("north", "south"))
    assert shown == []
    south, north = Control(own).sites()
    assert (south.site, north.site) == ("south", "north")
    assert north.node not in (south.node, "7")
    assert flower.nodes[north.node] == "registered"


def test_a_registration_that_never_reached_the_superlink_is_done_again(own, flower):
    flower.ends_after_registering = True
    with pytest.raises(Terminated):
        Control(own).register(("north",))
    flower.nodes.clear()
    flower.keys.clear()
    flower.ends_after_registering = False
    Control(own).register(("north",))
    assert [node.site for node in Control(own).sites()] == ["north"]


@pytest.mark.parametrize(
    "done",
    [
        _Done(1, "", "no such run"),
        _Done(0, json.dumps({"success": False, "error-message": "no such run"}), ""),
        _Done(0, "no such run", ""),
        _Done(1, "", "\x1b[31mno such run\x1b[0m"),
    ],
)
def test_flowers_failures_are_quoted(own, monkeypatch, done):
    monkeypatch.setattr(control.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RunError, match=r"`flwr list federation --format json` failed:\nno such run"):
        Control(own).runs()
