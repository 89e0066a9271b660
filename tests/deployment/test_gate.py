"""The gate passes the Fleet API and nothing else, against a stand-in for the SuperLink."""

import base64
import os
import socket
import ssl
from collections.abc import Iterator

import httpx
import pytest

from feddure.deployment.gate import Gate, RunningGate, Visit, visitor
from feddure.deployment.layout import ServerFolder
from feddure.deployment.processes import free_port
from feddure.errors import RunError


class SuperLink:
    """Answers everything, as a SuperLink would answer an operator, and remembers what reached it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.status = 200

    async def __call__(self, scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["raw_path"].decode(), body, headers))
        answer = body[::-1]
        start = {"type": "http.response.start", "status": self.status, "headers": [(b"x-from", b"superlink")]}
        await send(start)
        await send({"type": "http.response.body", "body": answer})


class Opened:
    """A gate that listens, with what it leads to."""

    def __init__(self, made: ServerFolder) -> None:
        self.superlink = SuperLink()
        self.visits: list[Visit] = []
        self.inside, self.port = free_port(), free_port()
        self.authority = made.authority
        self.behind = RunningGate(self.superlink, "127.0.0.1", self.inside, made.certificate, made.key)  # type: ignore[arg-type]
        gate = Gate(f"127.0.0.1:{self.inside}", made.authority, self.visits.append)
        self.gate = RunningGate(gate, "127.0.0.1", self.port, made.certificate, made.key)

    def ask(
        self, method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        context = ssl.create_default_context(cafile=str(self.authority))
        with httpx.Client(verify=context, trust_env=False) as client:
            return client.request(method, f"https://127.0.0.1:{self.port}{path}", content=content, headers=headers)


@pytest.fixture(scope="module")
def listening(made: ServerFolder) -> Iterator[Opened]:
    found = Opened(made)
    with found.behind, found.gate:
        yield found


@pytest.fixture
def opened(listening: Opened) -> Opened:
    listening.superlink.requests.clear()
    listening.superlink.status = 200
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
    assert opened.visits == [Visit("push-object", key.encode(), "127.0.0.1", 200)]


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
    context = ssl.create_default_context(cafile=str(opened.authority))
    with (
        socket.create_connection(("127.0.0.1", opened.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
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
        gate = RunningGate(Gate("127.0.0.1:1", made.authority), "127.0.0.1", port)
        with pytest.raises(RunError, match=f"port {port}: the gate"):
            gate.__enter__()


def test_a_visitor_is_known_by_its_key() -> None:
    sites = {b"pem of north": "north"}
    assert visitor(Visit("a", base64.b64encode(b"pem of north"), "h", 200), sites) == "north"
    assert visitor(Visit("a", base64.b64encode(b"pem of west"), "h", 200), sites) is None
    assert visitor(Visit("a", b"%%%", "h", 200), sites) is None
    assert visitor(Visit("a", None, "h", 200), sites) is None
