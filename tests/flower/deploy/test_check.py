"""A site's check: what passes, what is noted, what keeps it from training, and its way to the server."""

import shutil
import signal
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from PIL import Image

from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import certificates
from feddure.flower.deploy import check as checks
from feddure.flower.deploy.check import Reachability, clock_problem, reach
from feddure.flower.deploy.layout import Connection
from feddure.flower.deploy.processes import Terminated, free_port, terminating_on_signals
from feddure.flower.deploy.proxy import FleetProxy, ProxyServer


def check(folder, images, site="north", connect=False):
    return checks.check(folder.bundle("north"), site, ImageFolder(images), connect)


def texts(found, level):
    return "\n".join(f"{finding.what}: {finding.text}" for finding in found.findings if finding.level == level)


def test_a_sound_site_passes_with_its_counts(made, images):
    found = check(made, images)
    assert found.passed
    assert not texts(found, "note")
    assert (found.labelled, found.unlabelled, found.tests) == ({"ash": 3, "elm": 1}, 4, 0)


def test_ctrl_c_while_an_image_is_read_is_not_taken_for_a_damaged_image(made, images, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Terminated), terminating_on_signals():
        check(made, images)


@pytest.mark.parametrize("part", ["labelled", "unlabelled"])
def test_images_of_one_kind_only_are_noted(made, images, part):
    shutil.rmtree(images / part)
    found = check(made, images)
    assert found.passed
    assert f"no {part} image" in texts(found, "note")


def test_images_that_are_nearly_black_are_noted_also_where_their_pixels_are_kept(made, images):
    for file in images.rglob("*.png"):
        Image.open(file).convert("L").point(lambda value: value / 16).save(file)
    for _ in range(2):
        found = check(made, images)
        assert found.passed
        assert "nearly black" in texts(found, "note")
        assert "depth=12" in texts(found, "note")


PROBLEMS = {
    "another class": (lambda folder, images: (images / "labelled" / "elms").mkdir(), "did you mean 'elm'"),
    "no folder": (lambda folder, images: shutil.rmtree(images), "there is no such folder"),
    "another key": (
        lambda folder, images: certificates.write_private_key(
            folder.bundle("north").key, certificates.make_node_key(), ssh=True
        ),
        "does not belong to",
    ),
    "an open key": (lambda folder, images: folder.bundle("north").key.chmod(0o644), "chmod 600"),
    "no key": (lambda folder, images: folder.bundle("north").key.unlink(), "node.key: cannot be read"),
    "a damaged authority": (lambda folder, images: folder.bundle("north").authority.write_text("x"), "ca.crt"),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_keeps_a_site_from_training_is_named(own, images, kind):
    spoil, problem = PROBLEMS[kind]
    spoil(own, images)
    found = check(own, images)
    assert not found.passed
    assert problem in texts(found, "problem")


def test_several_problems_are_told_at_once(own, images):
    own.bundle("north").key.unlink()
    (images / "labelled" / "oak").mkdir()
    problems = texts(check(own, images, site="west"), "problem")
    assert all(problem in problems for problem in ("no such site", "no class 'oak'", "node.key"))


def test_an_authority_that_ends_soon_is_noted(own, images, monkeypatch):
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 20)
    certificates.write_certificate(own.bundle("north").authority, certificates.make_authority("trees")[1])
    found = check(own, images)
    assert found.passed
    assert "ca.crt is valid until" in texts(found, "note")


@pytest.mark.parametrize("clock", ["", "this machine's clock is 60 seconds behind"])
def test_a_server_that_answers_passes_where_the_clock_is_right(made, images, monkeypatch, clock):
    certificate = certificates.read_certificate(made.certificate)
    monkeypatch.setattr(checks, "reach", lambda *_: Reachability("ok", "it answers", certificate))
    monkeypatch.setattr(checks, "clock_problem", lambda *_: clock)
    found = check(made, images, connect=True)
    assert found.passed is not bool(clock)
    assert "it answers until" in texts(found, "ok")


# --- the way to the server --------------------------------------------------------------------------------
@contextmanager
def listening(certificate=None, key=None, newest=None):
    """A server that shakes hands, or one without TLS that says something else; yields the way to it."""
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        context.maximum_version = newest or context.maximum_version

    def answer():
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
            yield Connection("north", "127.0.0.1", server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def serve_as(folder, authority):
    key, certificate = certificates.make_server("127.0.0.1", authority)
    certificates.write_private_key(folder / "server.key", key)
    certificates.write_certificate(folder / "server.crt", certificate)
    return folder / "server.crt", folder / "server.key"


@pytest.mark.usefixtures("lax_tls")
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_a_server_that_speaks_nothing_newer_than_tls_1_1_is_not_trusted(made):
    with listening(made.certificate, made.key, ssl.TLSVersion.TLSv1_1) as way:
        found = reach(way, made.authority)
    assert found.outcome == "untrusted"
    assert "does not speak TLS as" in found.text


def test_the_right_server_is_recognised(made):
    with listening(made.certificate, made.key) as way:
        found = reach(way, made.authority)
    assert found.outcome == "ok"
    assert found.certificate == certificates.read_certificate(made.certificate)


def test_servers_that_are_not_this_federations_are_not_trusted(made, tmp_path, monkeypatch):
    with listening(*serve_as(tmp_path, certificates.make_authority("trees"))) as way:
        found = reach(way, made.authority)
        assert (found.outcome, "not the server of this federation" in found.text) == ("untrusted", True)
    with listening() as way:
        assert reach(way, made.authority).outcome == "untrusted"
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    authority = certificates.read_private_key(made.authority_key), certificates.read_certificate(made.authority)
    with listening(*serve_as(tmp_path, authority)) as way:
        found = reach(way, made.authority)
        assert (found.outcome, "has ended" in found.text) == ("untrusted", True)


def test_a_certificate_for_another_name_is_not_trusted(made, monkeypatch):
    here = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    with listening(made.certificate, made.key) as way:
        address = [(*entry[:4], ("127.0.0.1", way.port)) for entry in here]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: address)
        found = reach(Connection("north", "fed.example.org", way.port), made.authority)
    assert found.outcome == "untrusted"
    assert "for another name than fed.example.org" in found.text


def test_silence_and_absence_are_unreachable(made, monkeypatch):
    assert "is the server started" in reach(Connection("north", "127.0.0.1", free_port()), made.authority).text
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = reach(Connection("north", "127.0.0.1", silent.getsockname()[1]), made.authority, timeout=0.2)
    assert (found.outcome, "firewall" in found.text) == ("unreachable", True)

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert reach(Connection("north", "nowhere.invalid", 9092), made.authority).outcome == "unreachable"


def test_a_wrong_clock_is_found(made, monkeypatch):
    way, proxy = Connection("north", "127.0.0.1", free_port()), FleetProxy("127.0.0.1:9", made.authority, keys=set())
    with ProxyServer(proxy, way.host, way.port, made.certificate, made.key):
        for ahead, problem in ((0, ""), (60, "ahead of the server's"), (-3600, "behind the server's")):
            monkeypatch.setattr(checks, "time", SimpleNamespace(time=lambda ahead=ahead: time.time() + ahead))
            found = clock_problem(way, made.authority)
            assert (problem in found) if problem else found == ""
    with listening(made.certificate, made.key) as silent:
        assert clock_problem(silent, made.authority) == ""
    assert clock_problem(way, made.authority) == ""
