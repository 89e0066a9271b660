"""A site's way to the server, against servers on the loopback address."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from feddure.flower.deploy import certificates, connection
from feddure.flower.deploy.connection import clock_problem, reach
from feddure.flower.deploy.layout import Connection, ServerFolder
from feddure.flower.deploy.processes import free_port
from feddure.flower.deploy.proxy import Gate, RunningGate


@contextmanager
def listening(certificate: Path | None = None, key: Path | None = None) -> Iterator[int]:
    """A server that shakes hands, or one without TLS that says something else; yields its port."""
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)

    def answer() -> None:
        while True:
            try:
                plain, _ = server.accept()
            except OSError:
                return
            with plain:
                try:
                    if context is None:
                        plain.recv(1000)
                        plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    else:
                        context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def serve_as(tmp_path: Path, host: str, authority: tuple) -> tuple[Path, Path]:
    key, certificate = certificates.make_server(host, authority)
    certificates.write_private_key(tmp_path / "server.key", key)
    certificates.write_certificate(tmp_path / "server.crt", certificate)
    return tmp_path / "server.crt", tmp_path / "server.key"


def test_the_right_server_is_recognised(made: ServerFolder) -> None:
    with listening(made.certificate, made.key) as port:
        found = reach(Connection("north", "127.0.0.1", port), made.authority)
    assert found.outcome == "ok"
    assert "TLS" in found.text
    assert found.certificate is not None
    assert found.certificate.days_left() in (395, 396)


def test_a_server_of_another_authority_is_not_trusted(made: ServerFolder, tmp_path: Path) -> None:
    with listening(*serve_as(tmp_path, "127.0.0.1", certificates.make_authority("trees"))) as port:
        found = reach(Connection("north", "127.0.0.1", port), made.authority)
    assert found.outcome == "untrusted"
    assert "not the server of this federation" in found.text


def test_a_certificate_for_another_name_is_named(made: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    with listening(made.certificate, made.key) as port:
        address = [(*entry[:4], ("127.0.0.1", port)) for entry in here]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: address)
        found = reach(Connection("north", "fed.example.org", port), made.authority)
    assert found.outcome == "untrusted"
    assert "for another name than fed.example.org" in found.text


def test_an_ended_certificate_is_told_apart(
    made: ServerFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    key = certificates.read_private_key(made.authority_key)
    with listening(*serve_as(tmp_path, "127.0.0.1", (key, certificates.read_certificate(made.authority)))) as port:
        found = reach(Connection("north", "127.0.0.1", port), made.authority)
    assert found.outcome == "untrusted"
    assert "has ended" in found.text


def test_something_without_tls_is_not_trusted(made: ServerFolder) -> None:
    with listening() as port:
        found = reach(Connection("north", "127.0.0.1", port), made.authority)
    assert found.outcome == "untrusted"
    assert "does not speak TLS" in found.text


def test_nobody_listening_is_unreachable(made: ServerFolder) -> None:
    found = reach(Connection("north", "127.0.0.1", free_port()), made.authority)
    assert found.outcome == "unreachable"
    assert "is the server started" in found.text


def test_a_name_without_an_address_is_unreachable(made: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = reach(Connection("north", "nowhere.invalid", 9092), made.authority)
    assert found.outcome == "unreachable"
    assert "nowhere.invalid" in found.text


def test_silence_is_a_firewall(made: ServerFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        way = Connection("north", "127.0.0.1", silent.getsockname()[1])
        found = reach(way, made.authority, timeout=0.2)
    assert found.outcome == "unreachable"
    assert "firewall" in found.text


def test_an_insecure_site_only_looks_whether_something_answers(made: ServerFolder) -> None:
    with listening() as port:
        found = reach(Connection("north", "127.0.0.1", port, secure=False), made.authority)
    assert found.outcome == "ok"
    assert "nothing is encrypted" in found.text


@pytest.fixture
def gate(made: ServerFolder) -> Iterator[Connection]:
    """The way to a gate with the federation's certificate."""
    way = Connection("north", "127.0.0.1", free_port())
    with RunningGate(Gate("127.0.0.1:9", made.authority, keys=set()), way.host, way.port, made.certificate, made.key):
        yield way


@pytest.mark.parametrize(
    ("ahead", "problem"),
    [(0, ""), (60, "seconds ahead of the server's"), (-3600, "seconds behind the server's")],
)
def test_a_wrong_clock_is_found(
    made: ServerFolder, gate: Connection, monkeypatch: pytest.MonkeyPatch, ahead: float, problem: str
) -> None:
    monkeypatch.setattr(connection, "time", SimpleNamespace(time=lambda: time.time() + ahead))
    found = clock_problem(gate, made.authority)
    assert (problem in found) if problem else found == ""


def test_where_nobody_tells_the_time_no_clock_is_wrong(made: ServerFolder) -> None:
    with listening(made.certificate, made.key) as port:
        assert clock_problem(Connection("north", "127.0.0.1", port), made.authority) == ""
    assert clock_problem(Connection("north", "127.0.0.1", free_port()), made.authority) == ""
