"""The command lines that wrap Flower, and the environment they run in."""

import os
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from feddure.errors import ConfigError
from feddure.flower.deploy import commands
from feddure.flower.deploy.layout import Bundle, Connection, ServerFolder

FOLDER, BUNDLE = ServerFolder(Path("/fed")), Bundle(Path("/north"))
NORTH = Connection("north", "fed.example.org", 9092)


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_superlink_listens_on_the_loopback_address_with_tls_and_keys() -> None:
    command = commands.superlink(FOLDER, 9093, secure=True)
    assert Path(command[0]).name == "flower-superlink"
    assert (value(command, "--host"), value(command, "--port")) == ("127.0.0.1", "9093")
    assert value(command, "--ssl-ca-certfile") == "/fed/server/ca.crt"
    assert value(command, "--ssl-certfile") == "/fed/server/server.crt"
    assert value(command, "--ssl-keyfile") == "/fed/server/server.key"
    assert value(command, "--database") == "/fed/server/superlink.db"
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert "--insecure" not in command


def test_flower_leaves_the_superexec_to_who_watches_it() -> None:
    assert value(commands.superlink(FOLDER, 9093, secure=True), "--isolation") == "process"
    assert value(commands.supernode(BUNDLE, NORTH, Path("/x"), 4000), "--isolation") == "process"


def test_a_superexec_speaks_as_its_superlink_or_supernode_does_and_ends_with_it() -> None:
    command = commands.superexec(9093, 77, Path("/fed/server/ca.crt"))
    assert Path(command[0]).name == "flower-superexec"
    assert value(command, "--runtime-api-address") == "127.0.0.1:9093"
    assert value(command, "--parent-pid") == "77"
    assert value(command, "--root-certificates") == "/fed/server/ca.crt"
    assert "--insecure" not in command
    assert "--insecure" in commands.superexec(9093, 77, None)


def test_an_insecure_superlink_still_listens_on_the_loopback_address() -> None:
    command = commands.superlink(FOLDER, 9093, secure=False)
    assert "--insecure" in command
    assert value(command, "--host") == "127.0.0.1"
    assert not any(word.startswith("--ssl") for word in command)


def test_a_supernode_knows_the_authority_its_key_and_its_images() -> None:
    command = commands.supernode(BUNDLE, NORTH, Path("/my images"), 4000, {"device": "cpu", "clipping-norm": 1.5})
    assert Path(command[0]).name == "flower-supernode"
    assert value(command, "--superlink") == "fed.example.org:9092"
    assert value(command, "--root-certificates") == "/north/ca.crt"
    assert value(command, "--auth-supernode-private-key") == "/north/node.key"
    assert (value(command, "--host"), value(command, "--port")) == ("127.0.0.1", "4000")
    assert "--insecure" not in command
    assert parse_config_args([value(command, "--node-config")]) == {
        "site": "north",
        "data": "/my images",
        "state": "/north/state",
        "description": "/north/federation.yaml",
        "device": "cpu",
        "clipping-norm": 1.5,
    }


def test_an_insecure_supernode_says_so() -> None:
    command = commands.supernode(BUNDLE, Connection("north", "h", 1, secure=False), Path("/x"), 4000)
    assert "--insecure" in command
    assert "--root-certificates" not in command


def test_what_the_operator_asks_of_the_superlink() -> None:
    def words(command: list[str]) -> str:
        return commands.shown(command)

    assert words(commands.register(Path("/a.pub"), "a")) == (
        "flwr supernode register /a.pub federation --name a --format json"
    )
    assert words(commands.unregister("12")) == "flwr supernode unregister 12 federation --format json"
    assert words(commands.list_nodes()) == "flwr supernode list federation --format json"
    assert words(commands.list_runs()) == "flwr list federation --format json"
    assert words(commands.list_runs("7")) == "flwr list federation --run-id 7 --format json"
    assert words(commands.stream_log("7")) == "flwr log 7 federation --stream"
    assert words(commands.stop_run("7")) == "flwr stop 7 federation --format json"
    assert words(commands.start_run(Path("/fed/app"), {"rounds": 3, "method": "feddure", "resume": False})) == (
        "flwr run /fed/app federation --run-config 'rounds=3 method=\"feddure\" resume=false' --format json"
    )


@pytest.mark.parametrize("text", ["plain", "two words", "it's", 'a "b"', "C:\\images", "a=b c=d", ""])
def test_flower_reads_texts_back_as_they_were(text: str) -> None:
    assert parse_config_args([commands.toml_pairs({"one": text, "two": 2})]) == {"one": text, "two": 2}


@pytest.mark.parametrize("text", ["'\"", "it's\\here", "two\nlines"])
def test_texts_that_flower_would_misread_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="quotation marks"):
        commands.toml_pairs({"one": text})


def test_the_connection_is_the_loopback_address_by_absolute_paths() -> None:
    tree = tomllib.loads(commands.connections(FOLDER, 9093, secure=True))
    assert tree["superlink"]["default"] == "federation"
    assert tree["superlink"]["federation"] == {
        "address": "127.0.0.1:9093",
        "root-certificates": "/fed/server/ca.crt",
    }
    tree = tomllib.loads(commands.connections(FOLDER, 9093, secure=False))
    assert tree["superlink"]["federation"] == {"address": "127.0.0.1:9093", "insecure": True}


def test_flower_is_quiet_and_finds_its_programs() -> None:
    found = commands.environment(Path("/home"), Path("/guard"), base={"PATH": "/usr/bin", "no_proxy": "example.org"})
    assert found["FLWR_HOME"] == "/home"
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["PATH"].split(os.pathsep) == ["/guard", str(Path(sys.executable).parent), "/usr/bin"]
    assert found["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert found["NO_PROXY"] == "127.0.0.1,localhost"
