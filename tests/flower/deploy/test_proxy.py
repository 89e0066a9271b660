"""The proxy passes the Fleet API and nothing else, against a stand-in for the SuperLink."""

import asyncio
import base64
import datetime
import math
import os
import socket
import ssl
from contextlib import ExitStack, suppress

import httpx
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import sign_message

from feddure.errors import RunError
from feddure.flower.app.limits import tell_proxy
from feddure.flower.deploy import certificates, proxy
from feddure.flower.deploy.processes import free_port
from feddure.flower.deploy.proxy import FleetProxy, Listener, ProxyServer, Request, Uploads
from waiting import until


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

    def __init__(self, made, keys=None, uploads=None, **connections):
        self.superlink = SuperLink()
        self.seen = []
        self.inside, self.port = free_port(), free_port()
        self.authority = made.authority
        self.behind = ProxyServer(self.superlink, "127.0.0.1", self.inside, made.certificate, made.key)
        self.flooding = []
        listener = Listener(observe=self.flooding.append, **connections)
        leading = FleetProxy(f"127.0.0.1:{self.inside}", made.authority, self.seen.append, keys, uploads, listener)
        self.proxy = ProxyServer(leading, "127.0.0.1", self.port, made.certificate, made.key, listener)

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


@pytest.mark.usefixtures("lax_tls")
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_nobody_is_served_under_tls_1_1(made):
    found = Opened(made)
    context = ssl.create_default_context(cafile=str(made.authority))
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with found.behind, found.proxy, socket.create_connection(("127.0.0.1", found.port), timeout=20) as plain:
        assert found.ask("POST", "/v1/fleet/pull-messages").status_code == 200
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_fleet_request_passes_whole_both_ways(opened):
    content = os.urandom(3_000_000)
    key = base64.b64encode(b"the key of north").decode()
    answer = opened.ask("POST", "/v1/fleet/push-object", content, {"flwr-public-key": key})
    assert (answer.status_code, answer.content, answer.headers["x-from"]) == (200, content[::-1], "superlink")
    ((method, path, body, headers),) = opened.superlink.requests
    assert (method, path, body) == ("POST", "/v1/fleet/push-object", content)
    assert headers["flwr-public-key"] == key
    until(lambda: opened.seen)  # it is noted once the answer has been sent
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
    until(lambda: opened.seen)
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
    with opened.connect() as endless, suppress(OSError):  # the answer, or the end before all was sent
        endless.sendall(HEAD + b"X-Long: " + b"a" * 200_000)
        assert endless.recv(1000).startswith(b"HTTP/1.1 400")
    assert opened.superlink.requests == []


def test_a_body_with_two_lengths_is_refused(opened):
    with opened.connect() as ambiguous:
        ambiguous.sendall(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert ambiguous.recv(1000).startswith(b"HTTP/1.1 400")
    assert opened.superlink.requests == []


def in_chunks(content):
    yield from (content[start : start + 10_000] for start in range(0, len(content), 10_000))


@pytest.mark.parametrize("sent", [lambda content: content, in_chunks], ids=["with a length", "without"])
def test_a_body_that_is_too_large_is_refused(opened, sent, monkeypatch):
    monkeypatch.setattr(proxy, "PART_BYTES", 100_000)
    monkeypatch.setattr(proxy, "METADATA_BYTES", 5_000)
    assert opened.ask("POST", "/v1/fleet/push-object", sent(b"a" * 100_000)).status_code == 200
    assert opened.ask("POST", "/v1/fleet/push-object", sent(b"a" * 100_001)).status_code == 413
    assert opened.ask("POST", "/v1/fleet/pull-messages", sent(b"a" * 5_001)).status_code == 413


def test_a_site_sends_no_more_in_a_round_than_its_update_has(made, tmp_path):
    """The file is the run's; the next round opens a new account, and other actions cost nothing."""
    found = Opened(made, uploads=Uploads(tmp_path))
    with found.behind, found.proxy:

        def push(size, key=b"north"):
            headers = {"flwr-public-key": base64.b64encode(key).decode()}
            return found.ask("POST", "/v1/fleet/push-object", b"a" * size, headers).status_code

        assert push(300_000) == 413  # before a run has begun
        tell_proxy(tmp_path, "run", 1, 1_000_000)
        assert [push(400_000) for _ in range(3)] == [200, 200, 413]
        assert push(400_000, b"south") == 200
        assert found.ask("POST", "/v1/fleet/pull-messages", b"x").status_code == 200
        tell_proxy(tmp_path, "run", 2, 1_000_000)
        assert push(900_000) == 200


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


@pytest.mark.parametrize("limit", ["per_address", "in_all"])
def test_a_flood_of_connections_loses_the_oldest_and_no_site_its_own(made, limit):
    found = Opened(made, **{limit: 4})
    context = ssl.create_default_context(cafile=str(made.authority))
    with (
        found.behind,
        found.proxy,
        ExitStack() as held,
        httpx.Client(verify=context, trust_env=False, base_url=f"https://127.0.0.1:{found.port}") as site,
    ):
        assert site.post("/v1/fleet/pull-messages").status_code == 200
        flood = [held.enter_context(found.connect()) for _ in range(12)]
        # Without a handshake too.
        plain = [held.enter_context(socket.create_connection(("127.0.0.1", found.port), 20)) for _ in range(4)]
        assert all(is_let_go(connection) for connection in flood)
        assert site.post("/v1/fleet/pull-messages").status_code == 200  # over the connection it had
        assert found.ask("POST", "/v1/fleet/pull-messages").status_code == 200  # over a new one
        assert is_let_go(plain[0])
    assert set(found.flooding) == {"127.0.0.1"}


def test_a_site_holds_a_few_connections(made):
    found = Opened(made, per_site=2)
    with found.behind, found.proxy, ExitStack() as held:
        asked = []
        for _ in range(3):
            asked.append(held.enter_context(found.connect()))
            asked[-1].sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert asked[-1].recv(1000).startswith(b"HTTP/1.1 200")
        asked[0].settimeout(20)
        while asked[0].recv(1000):  # what is left of the answer
            pass
        asked[2].sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert asked[2].recv(1000)


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

    @pytest.mark.parametrize(
        ("source", "answers", "status"),
        [(7, "a question", 200), (8, "a question", 422), (1, "", 422), (7, "", 422)],
        ids=["its own answer", "of another site", "an order of the server", "no answer"],
    )
    def test_a_site_speaks_for_itself_and_when_it_is_asked(self, authenticated, made, source, answers, status):
        authenticated.superlink.requests.clear()
        about = Metadata(src_node_id=source, dst_node_id=12, reply_to_message_id=answers, message_type="train")
        content = PushMessagesRequest(node=Node(node_id=7), messages_list=[ProtoMessage(metadata=about)])
        path = "/v1/fleet/push-messages"
        answer = authenticated.ask("POST", path, content.SerializeToString(), self.headers(made))
        assert answer.status_code == status
        assert [request[1] for request in authenticated.superlink.requests] == [path] * (status == 200)
        assert authenticated.ask("POST", path, b"\xff\xff", self.headers(made)).status_code == 400

    @pytest.mark.parametrize("times", [{"created_at": math.nan}, {"ttl": math.inf}])
    def test_an_answer_of_no_time_stops_at_the_proxy(self, authenticated, made, times):
        """The SuperLink would keep it, and fail each time that the run asks for it."""
        about = Metadata(src_node_id=7, dst_node_id=1, reply_to_message_id="a question", message_type="train", **times)
        content = PushMessagesRequest(node=Node(node_id=7), messages_list=[ProtoMessage(metadata=about)])
        path = "/v1/fleet/push-messages"
        answer = authenticated.ask("POST", path, content.SerializeToString(), self.headers(made))
        assert answer.status_code == 400

    def test_strangers_are_turned_away_before_their_body_is_read(self, authenticated, made):
        authenticated.superlink.requests.clear()
        authenticated.seen.clear()
        theirs = self.headers(made, stranger=True)
        lines = "".join(f"{name}: {value}\r\n" for name, value in theirs.items())
        with authenticated.connect() as stranger:
            stranger.sendall(HEAD + lines.encode() + b"Content-Length: 1000000\r\n\r\n")
            assert stranger.recv(1000).startswith(b"HTTP/1.1 401")
        assert authenticated.superlink.requests == []
        until(lambda: ("push-object", 401) in [(request.action, request.status) for request in authenticated.seen])

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
