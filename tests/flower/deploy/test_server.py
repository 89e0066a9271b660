"""The server: who is let in, what keeps it from starting, and the SuperExec it looks after."""

import itertools
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from feddure.environment import began_at
from feddure.errors import RunError
from feddure.flower.app import audit
from feddure.flower.app.audit import AuditLog
from feddure.flower.deploy import certificates, server
from feddure.flower.deploy.certificates import CertificateError
from feddure.flower.deploy.layout import ServerFolder, Settings, read_settings, write_settings
from feddure.flower.deploy.processes import free_port
from feddure.flower.deploy.proxy import NOT_ITS_OWN, Request
from feddure.flower.deploy.server import SuperExec
from waiting import until


def test_the_superlink_listens_on_the_loopback_address_with_tls_and_keys():
    folder = ServerFolder(Path("/fed"))
    command = server.superlink_command(folder, 9093)
    given = dict(itertools.pairwise(command))
    assert (given["--host"], given["--port"], given["--isolation"]) == ("127.0.0.1", "9093", "process")
    assert given["--ssl-keyfile"] == "/fed/server/server.key"
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert "--insecure" not in command


def test_the_operator_is_told_who_joins_leaves_and_is_turned_away(made):
    north = certificates.public_pem(certificates.read_public_key(made.public_key("north")))
    shown = []
    visits = server.RequestLog({north: "north"}, shown.append)
    key, stranger = north, b"someone"
    visits(Request("activate-node", key, "10.0.0.1", 200))
    visits(Request("pull-messages", key, "10.0.0.1", 200))
    visits(Request("push-messages", key, "10.0.0.1", 403))  # of a run that was stopped
    visits(Request("deactivate-node", key, "10.0.0.1", 200))
    visits(Request("activate-node", stranger, "10.0.0.9", 403))
    visits(Request("activate-node", stranger, "10.0.0.9", 403))
    visits(Request("activate-node", key, "10.0.0.1", 401))
    visits(Request("push-object", key, "10.0.0.1", 413))
    visits.flooded("10.0.0.9")
    visits.flooded("10.0.0.9")
    told = ("north joined", "north left", "10.0.0.9 (a key", "north: is its clock", "(413)", "10.0.0.9 holds many")
    for line, part in zip(shown, told, strict=True):
        assert part in line


def test_a_site_that_comes_and_goes_does_not_fill_the_audit_log(tmp_path):
    shown = []
    visits = server.RequestLog({b"a key": "north"}, shown.append, AuditLog(tmp_path))
    for _ in range(200):
        visits(Request("activate-node", b"a key", "10.0.0.1", 200))
        visits(Request("deactivate-node", b"a key", "10.0.0.1", 200))
    entries = audit.read(tmp_path / audit.FILE).entries
    assert len(shown) == len(entries) == 21
    assert entries[-1]["kind"] == "restless"


def test_strangers_from_everywhere_neither_fill_the_memory_nor_hide_what_a_site_does(tmp_path):
    shown = []
    visits = server.RequestLog({b"a key": "north"}, shown.append, AuditLog(tmp_path))
    for number in range(3000):
        visits(Request("activate-node", b"", f"2001:db8::{number:x}", 401))
    assert len(shown) <= len(visits._refused) == 1000
    visits(Request("push-messages", b"a key", "10.0.0.1", NOT_ITS_OWN))
    assert "north" in shown[-1]
    assert audit.read(tmp_path / audit.FILE).entries[-1]["site"] == "north"


def start(folder, host=None):
    with server.serving(folder, host, lambda line: None):
        pytest.fail("the server started")


def test_an_ended_certificate_keeps_the_server_from_starting(own, monkeypatch):
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    authority = certificates.read_private_key(own.authority_key), certificates.read_certificate(own.authority)
    certificates.write_certificate(own.certificate, certificates.make_server("127.0.0.1", authority)[1])
    with pytest.raises(CertificateError, match="feddure federate renew"):
        start(own)


def test_a_server_key_that_others_can_read_is_refused(own):
    own.key.chmod(0o640)
    with pytest.raises(CertificateError, match="chmod 600"):
        start(own)


def test_a_server_that_runs_already_is_named(own):
    parent = os.getppid()
    own.pidfile.write_text(json.dumps([{"pid": parent, "name": "feddure", "began": began_at(parent)}]))
    with pytest.raises(RunError, match=f"the server of {own.root} runs on this machine already.*`kill {parent}`"):
        start(own)


def test_an_address_that_is_not_this_machines_is_refused_with_the_option(own):
    write_settings(own, Settings("127.0.0.1", free_port()))
    with pytest.raises(RunError, match=r"192\.0\.2\.1 port 9092: cannot listen there .*--host ADDRESS"):
        start(own, "192.0.2.1")


def test_a_name_that_leads_only_to_this_machine_itself_is_refused(own, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(server.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RunError, match=r"fed\.example\.org: stands for 127\.0\.1\.1.*--host 0\.0\.0\.0"):
        start(own, "fed.example.org")


def test_settings_survive_and_a_damaged_file_is_named(own):
    assert read_settings(own) == Settings("127.0.0.1", 9093)
    own.settings.write_text("{}")
    with pytest.raises(RunError, match=r"settings\.json: cannot be read"):
        read_settings(own)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)


class Killed:
    """Stands for a process that somebody killed."""

    ended, code = True, -9

    def __init__(self, *arguments, **options):
        pass

    def log_tail(self):
        return "no memory left"

    def stop(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(server, "time", found)
    return found


def test_one_that_ends_is_started_again_and_the_last_one_ends_with_the_block(tmp_path, clock):
    code = "import os, time; print('begun', os.getpid(), flush=True); time.sleep(600)"
    log, shown = tmp_path / "log", []

    def begun():
        return [int(line.split()[1]) for line in log.read_text().splitlines()]

    with SuperExec([sys.executable, "-c", code], os.environ, log, shown.append) as kept:
        (first,) = until(begun)
        assert not kept.ended
        os.kill(first, signal.SIGKILL)
        until(lambda: kept.ended)
        kept.restart()
        until(lambda: len(begun()) == 2)
        assert not kept.ended
    assert kept.ended
    assert len(begun()) == 2
    assert [line.partition(";")[0] for line in shown] == ["flower-superexec ended (exit code -9)"]


def test_one_that_keeps_on_ending_is_given_up(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(server, "Process", Killed)
    kept = SuperExec([], {}, tmp_path / "log", lambda line: None)
    for _ in range(5):
        kept.restart()
    with pytest.raises(
        RunError, match=r"ended 6 times in a row \(exit code -9\).*the server ends too.*\nno memory left"
    ):
        kept.restart()
    assert clock.slept == [1, 2, 4, 8, 16]


def test_ends_that_are_hours_apart_are_no_reason_to_give_up(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(server, "Process", Killed)
    kept = SuperExec([], {}, tmp_path / "log", lambda line: None)
    for _ in range(20):
        clock.now += 3600
        kept.restart()
    assert clock.slept == [1] * 20
