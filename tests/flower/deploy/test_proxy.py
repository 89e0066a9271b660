"""The proxy passes the Fleet API and nothing else, against a stand-in for the SuperLink."""

import asyncio
import base64
import datetime
import os
import socket
import ssl

import httpx
import pytest
from flwr.supercore.primitives.asymmetric import sign_message

from feddure.errors import RunError
from feddure.flower.deploy import certificates, proxy
from feddure.flower.deploy.processes import free_port
from feddure.flower.deploy.proxy import FleetProxy, ProxyServer, Request


class SuperLink:
    """Answers everything, as a SuperLink would answer an operator, and remembers what reached it."""

    def __init__(self):
        self.requests = []
        self.status = 200
        self.seconds = 0.0

    async def __call__(self, scope, receive, send):
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
    """A proxy that listens, with what it leads to."""

    def __init__(self, made, keys=None, connections=100):
        self.superlink = SuperLink()
        self.seen = []
        self.inside, self.port = free_port(), free_port()
        self.authority = made.authority
        self.behind = ProxyServer(self.superlink, "127.0.0.1", self.inside, made.certificate, made.key)
        leading = FleetProxy(f"127.0.0.1:{self.inside}", made.authority, self.seen.append, keys)
        self.proxy = ProxyServer(leading, "127.0.0.1", self.port, made.certificate, made.key, connections)

    def ask(self, method, path, content=b"", headers=None):
        context = ssl.create_default_context(cafile=str(self.authority))
        with httpx.Client(verify=context, trust_env=False) as client:
            return client.request(method, f"https://127.0.0.1:{self.port}{path}", content=content, headers=headers)

    def connect(self):
        context = ssl.create_default_context(cafile=str(self.authority))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def listening(made):
    found = Opened(made)
    with found.behind, found.proxy:
        yield found


@pytest.fixture
def opened(listening):
    listening.superlink.requests.clear()
    listening.superlink.status, listening.superlink.seconds = 200, 0.0
    listening.seen.clear()
    return listening


def test_a_fleet_request_passes_whole_both_ways(opened):
    content = os.urandom(3_000_000)
    key = base64.b64encode(b"the key of north").decode()
    answer = opened.ask("POST", "/v1/fleet/push-object", content, {"flwr-public-key": key})
    assert (answer.status_code, answer.content, answer.headers["x-from"]) == (200, content[::-1], "superlink")
    ((method, path, body, headers),) = opened.superlink.requests
    assert (method, path, body) == ("POST", "/v1/fleet/push-object", content)
    assert headers["flwr-public-key"] == key
    assert opened.seen == [Request("push-object", b"the key of north", "127.0.0.1", 200)]


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
def test_everything_else_stops_at_the_proxy(opened, method, path):
    assert opened.ask(method, path).status_code == 403
    assert opened.superlink.requests == []


def test_a_refusal_of_the_superlink_passes_too(opened):
    opened.superlink.status = 401
    assert opened.ask("POST", "/v1/fleet/activate-node").status_code == 401
    assert [request.status for request in opened.seen] == [401]


def test_sites_are_told_to_try_again_while_the_superlink_is_away(made):
    found = Opened(made)
    with found.proxy:
        assert found.ask("POST", "/v1/fleet/pull-messages").status_code == 503


def test_the_proxy_asks_for_tls(opened):
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://127.0.0.1:{opened.port}/v1/fleet/pull-messages", trust_env=False)
    assert opened.superlink.requests == []


def test_a_proxy_that_cannot_listen_says_where(made):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        late = ProxyServer(FleetProxy("127.0.0.1:1", made.authority), "127.0.0.1", port)
        with pytest.raises(RunError, match=f"port {port}: the proxy"):
            late.__enter__()


HEAD = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n"


def is_let_go(connection):
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_head_without_end_is_not_kept(opened):
    with opened.connect() as endless:
        endless.sendall(HEAD + b"X-Long: " + b"a" * 200_000)
        assert endless.recv(1000).startswith(b"HTTP/1.1 400")
    assert opened.superlink.requests == []


def test_a_body_with_two_lengths_is_refused(opened):
    with opened.connect() as ambiguous:
        ambiguous.sendall(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert ambiguous.recv(1000).startswith(b"HTTP/1.1 400")
    assert opened.superlink.requests == []


def test_a_body_that_is_too_large_is_refused(opened, monkeypatch):
    monkeypatch.setattr(proxy, "_BODY_BYTES", 100_000)
    assert opened.ask("POST", "/v1/fleet/push-object", b"a" * 100_000).status_code == 200
    assert opened.ask("POST", "/v1/fleet/push-object", b"a" * 100_001).status_code == 413


def test_a_body_that_does_not_come_is_given_up(opened, monkeypatch):
    monkeypatch.setattr(proxy, "_BODY_PAUSE_SECONDS", 0.2)
    with opened.connect() as slow:
        slow.sendall(HEAD + b"Content-Length: 10\r\n\r\nabc")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("begin", [b"", HEAD])
def test_who_asks_for_nothing_is_let_go(opened, begin, monkeypatch):
    monkeypatch.setattr(proxy, "_HEAD_SECONDS", 0.3)
    with opened.connect() as silent:
        silent.sendall(begin)
        assert is_let_go(silent)


def test_a_slow_superlink_is_waited_for(opened, monkeypatch):
    monkeypatch.setattr(proxy, "_HEAD_SECONDS", 0.2)
    opened.superlink.seconds = 0.6
    assert opened.ask("POST", "/v1/fleet/pull-messages").status_code == 200


def test_more_connections_than_the_proxy_takes_are_let_go(made):
    found = Opened(made, connections=3)
    with found.proxy:
        held = [found.connect() for _ in range(3)]
        with found.connect() as one_more:
            assert is_let_go(one_more)
        for connection in held:
            connection.close()


@pytest.fixture(scope="module")
def authenticated(made):
    keys = {certificates.public_pem(certificates.read_public_key(made.public_key(site))) for site in made.read().sites}
    found = Opened(made, keys)
    with found.behind, found.proxy:
        yield found


class TestKeys:
    """A proxy that knows the keys of its sites."""

    def headers(self, made, age=0.0, stranger=False):
        private = certificates.make_node_key() if stranger else certificates.read_private_key(made.bundle("north").key)
        public = certificates.public_pem(private.public_key())
        moment = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
        return {
            "flwr-public-key": base64.b64encode(public).decode(),
            "flwr-timestamp": moment,
            "flwr-signature": base64.b64encode(sign_message(private, moment.encode())).decode(),
        }

    def test_a_site_passes(self, authenticated, made):
        assert authenticated.ask("POST", "/v1/fleet/activate-node", b"x", self.headers(made)).status_code == 200

    def test_strangers_are_turned_away_before_their_body_is_read(self, authenticated, made):
        authenticated.superlink.requests.clear()
        authenticated.seen.clear()
        theirs = self.headers(made, stranger=True)
        lines = "".join(f"{name}: {value}\r\n" for name, value in theirs.items())
        with authenticated.connect() as stranger:
            stranger.sendall(HEAD + lines.encode() + b"Content-Length: 1000000\r\n\r\n")
            assert stranger.recv(1000).startswith(b"HTTP/1.1 401")
        assert authenticated.superlink.requests == []
        assert [(request.action, request.status) for request in authenticated.seen] == [("push-object", 401)]

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
    def test_a_sites_public_key_alone_is_not_enough(self, authenticated, made, change):
        authenticated.superlink.requests.clear()
        answer = authenticated.ask("POST", "/v1/fleet/activate-node", b"x", self.headers(made) | change)
        assert answer.status_code == 401
        assert authenticated.superlink.requests == []

    @pytest.mark.parametrize("age", [1000.0, -60.0])
    def test_a_signature_of_another_time_is_refused(self, authenticated, made, age):
        assert authenticated.ask("POST", "/v1/fleet/activate-node", b"", self.headers(made, age)).status_code == 401
        assert authenticated.ask("POST", "/v1/fleet/activate-node").status_code == 401
