"""The gate passes the Fleet API and nothing else, against a stand-in for the SuperLink."""

import asyncio
import base64
import datetime
import os
import socket
import ssl
from collections.abc import Iterator

import httpx
import pytest
from flwr.supercore.primitives.asymmetric import sign_message

from feddure.errors import RunError
from feddure.flower.deploy import certificates, proxy
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import free_port
from feddure.flower.deploy.proxy import FleetProxy, ProxyServer, Request, site_of


class SuperLink:
    """Answers everything, as a SuperLink would answer an operator, and remembers what reached it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.status = 200
        self.seconds = 0.0

    async def __call__(self, scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["raw_path"].decode(), body, headers))
        await asyncio.sleep(self.seconds)
        answer = body[::-1]
        start = {"type": "http.response.start", "status": self.status, "headers": [(b"x-from", b"superlink")]}
        await send(start)
        await send({"type": "http.response.body", "body": answer})


class Opened:
    """A gate that listens, with what it leads to."""

    def __init__(self, made: ServerFolder, keys: set[bytes] | None = None, connections: int = 100) -> None:
        self.superlink = SuperLink()
        self.visits: list[Request] = []
        self.inside, self.port = free_port(), free_port()
        self.authority = made.authority
        self.behind = ProxyServer(self.superlink, "127.0.0.1", self.inside, made.certificate, made.key)  # type: ignore[arg-type]
        leading = FleetProxy(f"127.0.0.1:{self.inside}", made.authority, self.visits.append, keys)
        self.gate = ProxyServer(leading, "127.0.0.1", self.port, made.certificate, made.key, connections)

    def ask(
        self, method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        context = ssl.create_default_context(cafile=str(self.authority))
        with httpx.Client(verify=context, trust_env=False) as client:
            return client.request(method, f"https://127.0.0.1:{self.port}{path}", content=content, headers=headers)

    def connect(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.authority))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def listening(made: ServerFolder) -> Iterator[Opened]:
    found = Opened(made)
    with found.behind, found.gate:
        yield found


@pytest.fixture
def opened(listening: Opened) -> Opened:
    listening.superlink.requests.clear()
    listening.superlink.status, listening.superlink.seconds = 200, 0.0
    listening.visits.clear()
    return listening


def test_a_fleet_request_passes_whole_both_ways(opened: Opened) -> None:
    content = os.urandom(3_000_000)
    key = base64.b64encode(b"the key of north").decode()
    answer = opened.ask("POST", "/v1/fleet/push-object", content, {"flwr-public-key": key})
    assert (answer.status_code, answer.content, answer.headers["x-from"]) == (200, content[::-1], "superlink")
    ((method, path, body, headers),) = opened.superlink.requests
    assert (method, path, body) == ("POST", "/v1/fleet/push-object", content)
    assert headers["flwr-public-key"] == key
    assert opened.visits == [Request("push-object", key.encode(), "127.0.0.1", 200)]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/list-runs"),
        ("POST", "/v1/runtime/pull-task-input"),
        ("GET", "/v1/fleet/pull-messages"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/health"),
        ("GET", "/"),
        ("POST", "/v1/fleet/"),
        ("POST", "/v1/fleet/pull-messages?x=1"),
        ("POST", "/v1/fleet/pull-messages/"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet/pull%2dmessages"),
        ("POST", "//v1/fleet/pull-messages"),
    ],
)
def test_everything_else_stops_at_the_gate(opened: Opened, method: str, path: str) -> None:
    assert opened.ask(method, path).status_code == 403
    assert opened.superlink.requests == []


def test_dots_in_a_path_do_not_lead_around_the_gate(opened: Opened) -> None:
    with opened.connect() as encrypted:
        encrypted.sendall(b"POST /v1/fleet/../control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert encrypted.recv(1000).startswith(b"HTTP/1.1 403")
    assert opened.superlink.requests == []


def test_a_refusal_of_the_superlink_passes_too(opened: Opened) -> None:
    opened.superlink.status = 401
    assert opened.ask("POST", "/v1/fleet/activate-node").status_code == 401
    assert [visit.status for visit in opened.visits] == [401]


def test_sites_are_told_to_try_again_while_the_superlink_is_away(made: ServerFolder) -> None:
    found = Opened(made)
    with found.gate:
        assert found.ask("POST", "/v1/fleet/pull-messages").status_code == 503


def test_the_gate_asks_for_tls(opened: Opened) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://127.0.0.1:{opened.port}/v1/fleet/pull-messages", trust_env=False)
    assert opened.superlink.requests == []


def test_a_gate_that_cannot_listen_says_where(made: ServerFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        late = ProxyServer(FleetProxy("127.0.0.1:1", made.authority), "127.0.0.1", port)
        with pytest.raises(RunError, match=f"port {port}: the proxy"):
            late.__enter__()


def test_a_visitor_is_known_by_its_key() -> None:
    sites = {b"pem of north": "north"}
    assert site_of(Request("a", base64.b64encode(b"pem of north"), "h", 200), sites) == "north"
    assert site_of(Request("a", base64.b64encode(b"pem of west"), "h", 200), sites) is None
    assert site_of(Request("a", b"%%%", "h", 200), sites) is None
    assert site_of(Request("a", None, "h", 200), sites) is None


HEAD = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n"


def is_let_go(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_head_without_end_is_not_kept(opened: Opened) -> None:
    with opened.connect() as endless:
        endless.sendall(HEAD + b"X-Long: " + b"a" * 200_000)
        assert endless.recv(1000).startswith(b"HTTP/1.1 400")
    assert opened.superlink.requests == []


def test_a_body_with_two_lengths_is_refused(opened: Opened) -> None:
    with opened.connect() as ambiguous:
        ambiguous.sendall(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert ambiguous.recv(1000).startswith(b"HTTP/1.1 400")
    assert opened.superlink.requests == []


def test_a_body_that_is_too_large_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_BODY_BYTES", 100_000)
    assert opened.ask("POST", "/v1/fleet/push-object", b"a" * 100_000).status_code == 200
    assert opened.ask("POST", "/v1/fleet/push-object", b"a" * 100_001).status_code == 413


def test_a_body_that_does_not_come_is_given_up(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_BODY_PAUSE_SECONDS", 0.2)
    with opened.connect() as slow:
        slow.sendall(HEAD + b"Content-Length: 10\r\n\r\nabc")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("begin", [b"", HEAD])
def test_who_asks_for_nothing_is_let_go(opened: Opened, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_HEAD_SECONDS", 0.3)
    with opened.connect() as silent:
        silent.sendall(begin)
        assert is_let_go(silent)


def test_who_begins_a_second_request_and_stops_is_let_go(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_HEAD_SECONDS", 0.3)
    with opened.connect() as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert silent.recv(1000).startswith(b"HTTP/1.1 403")
        silent.sendall(HEAD)
        assert is_let_go(silent)


def test_a_slow_superlink_is_waited_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_HEAD_SECONDS", 0.2)
    opened.superlink.seconds = 0.6
    assert opened.ask("POST", "/v1/fleet/pull-messages").status_code == 200


def test_more_connections_than_the_gate_takes_are_let_go(made: ServerFolder) -> None:
    found = Opened(made, connections=3)
    with found.gate:
        held = [found.connect() for _ in range(3)]
        with found.connect() as one_more:
            assert is_let_go(one_more)
        for connection in held:
            connection.close()


@pytest.fixture(scope="module")
def guarded(made: ServerFolder) -> Iterator[Opened]:
    keys = {certificates.public_pem(certificates.read_public_key(made.public_key(site))) for site in made.read().sites}
    found = Opened(made, keys)
    with found.behind, found.gate:
        yield found


class TestKeys:
    """A gate that knows the keys of its sites."""

    def headers(self, made: ServerFolder, age: float = 0.0, stranger: bool = False) -> dict[str, str]:
        private = certificates.make_node_key() if stranger else certificates.read_private_key(made.bundle("north").key)
        public = certificates.public_pem(private.public_key())
        moment = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
        return {
            "flwr-public-key": base64.b64encode(public).decode(),
            "flwr-timestamp": moment,
            "flwr-signature": base64.b64encode(sign_message(private, moment.encode())).decode(),
        }

    def test_a_site_passes(self, guarded: Opened, made: ServerFolder) -> None:
        assert guarded.ask("POST", "/v1/fleet/activate-node", b"x", self.headers(made)).status_code == 200

    def test_strangers_are_turned_away_before_their_body_is_read(self, guarded: Opened, made: ServerFolder) -> None:
        guarded.superlink.requests.clear()
        guarded.visits.clear()
        theirs = self.headers(made, stranger=True)
        lines = "".join(f"{name}: {value}\r\n" for name, value in theirs.items())
        with guarded.connect() as stranger:
            stranger.sendall(HEAD + lines.encode() + b"Content-Length: 1000000\r\n\r\n")
            assert stranger.recv(1000).startswith(b"HTTP/1.1 401")
        assert guarded.superlink.requests == []
        assert [(visit.action, visit.status) for visit in guarded.visits] == [("push-object", 401)]

    @pytest.mark.parametrize(
        "change",
        [
            {"flwr-signature": base64.b64encode(b"made up").decode()},
            {"flwr-signature": "%%%"},
            {"flwr-timestamp": "2026-01-01T00:00:00+00:00"},
            {"flwr-timestamp": "2026-01-01T00:00:00"},
            {"flwr-timestamp": "today"},
            {"flwr-public-key": "%%%"},
        ],
    )
    def test_a_sites_public_key_alone_is_not_enough(
        self, guarded: Opened, made: ServerFolder, change: dict[str, str]
    ) -> None:
        guarded.superlink.requests.clear()
        answer = guarded.ask("POST", "/v1/fleet/activate-node", b"x", self.headers(made) | change)
        assert answer.status_code == 401
        assert guarded.superlink.requests == []

    @pytest.mark.parametrize("age", [1000.0, -60.0])
    def test_a_signature_of_another_time_is_refused(self, guarded: Opened, made: ServerFolder, age: float) -> None:
        assert guarded.ask("POST", "/v1/fleet/activate-node", b"", self.headers(made, age)).status_code == 401

    def test_a_request_without_a_key_is_refused(self, guarded: Opened) -> None:
        assert guarded.ask("POST", "/v1/fleet/activate-node").status_code == 401
