"""The proxy for sites: the only thing of a server that the network reaches.

Flower's SuperLink serves three interfaces on one port: the Fleet API, where sites authenticate with their keys, and
the Control and Runtime APIs, which ask for no user: whoever reaches them can start runs, and with them Python code at
every site. So the SuperLink listens on the loopback address, and the proxy, with the server's certificate, passes on
requests of the Fleet API and nothing else. Strangers are turned away before the body of their request is read, and
nobody can make the proxy hold more than a little memory, or a connection for nothing.
"""

import asyncio
import base64
import datetime
import json
import math
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError
from uvicorn.protocols.http.h11_impl import H11Protocol

from feddure.errors import RunError
from feddure.flower.app.limits import FILE as UPLOAD_FILE
from feddure.flower.app.limits import METADATA_BYTES, PART_BYTES
from feddure.flower.deploy import certificates

_PUBLIC_KEY, _SIGNATURE, _TIME = b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"
_FLEET = re.compile(rb"/v1/fleet/[a-z-]+")
_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"host", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_START_SECONDS = 20.0
_HEAD_BYTES = 64 << 10
_ANSWERS, _OBJECTS = "push-messages", "push-object"
_PARTS = frozenset((_ANSWERS, _OBJECTS))
"""Requests that carry messages of sites: what they are made of, and then its parts."""
NOT_ITS_OWN = 422
"""The answer to a site that speaks for another; the SuperLink has other reasons for 403."""
_BODY_PAUSE_SECONDS = 60.0
_HEAD_SECONDS = 30.0
_WINDOW_SECONDS = 600.0
PER_ADDRESS, IN_ALL, PER_SITE = 32, 256, 20
"""Connections over which no site has asked for anything yet, and those of one site."""
Charge = Callable[[int], bool]

Scope = dict[str, Any]
Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Request:
    """One request as the proxy saw it."""

    action: str  # the last part of the path, such as activate-node
    public_key: bytes  # empty where none was given
    address: str
    status: int


# --- limits: how many bytes a site may send in a round, and how many connections anybody may hold ----
class Uploads:
    """Bytes of messages that each site sent in the round under way; the run's own file says how many it may.

    A site's account is opened anew in each round, and every ten minutes: while sites gather there are no rounds.
    """

    def __init__(self, folder: Path):
        self._path = folder / UPLOAD_FILE
        self._accounts: dict[bytes, tuple[tuple, float, int]] = {}  # key → its round, since when, bytes

    def charge(self, key: bytes, size: int) -> bool:
        """Whether a site may send so many bytes more."""
        (current, limit), now = self._round(), time.monotonic()
        at, since, used = self._accounts.get(key, (current, now, 0))
        if at != current or now - since > _WINDOW_SECONDS:
            since, used = now, 0
        allowed = used + size <= limit
        self._accounts[key] = current, since, used + size if allowed else used
        return allowed

    def _round(self) -> tuple[tuple, int]:
        try:
            tree = json.loads(self._path.read_bytes())
            return (tree["run"], tree["round"]), int(tree["bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return (), METADATA_BYTES  # no run has begun, and sites only say who they are


class _Connection(socket.socket):
    """An accepted connection that tells when it is closed."""

    closed: Callable[[], object] | None = None

    def close(self) -> None:
        super().close()
        if self.closed is not None:
            self.closed()
            self.closed = None


@dataclass(eq=False)
class Listener:
    """Accepts connections, and lets go of the oldest over which nothing was asked where somebody holds too many.

    A site sends its request at once, so whoever holds connections for nothing loses those, and no site its own.
    """

    per_address: int = PER_ADDRESS
    in_all: int = IN_ALL
    per_site: int = PER_SITE
    observe: Callable[[str], None] = lambda address: None
    _waiting: dict[tuple, _Connection] = field(default_factory=dict)  # peer → connection, the oldest first
    _of_sites: dict[bytes, dict[tuple, _Connection]] = field(default_factory=dict)  # by key, likewise

    def open(self, host: str, port: int) -> socket.socket:
        """Listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        plain = socket.create_server((host, port), family=family)
        listener = self

        class Accepting(socket.socket):
            def accept(self) -> tuple[socket.socket, Any]:
                accepted, peer = super().accept()
                connection = _Connection(accepted.family, accepted.type, accepted.proto, accepted.detach())
                listener._add(connection, peer)
                return connection, peer

        return Accepting(plain.family, plain.type, plain.proto, plain.detach())

    def recognise(self, peer: tuple, key: bytes) -> None:
        """A site's request came over this connection; `peer` begins with address and port."""
        connection = self._waiting.pop(peer[:2], None)
        if connection is not None:
            own = self._of_sites.setdefault(key, {})
            own[peer[:2]] = connection
            connection.closed = lambda: own.pop(peer[:2], None)
            if len(own) > self.per_site:
                self._let_go(own, next(iter(own)))

    def _add(self, connection: _Connection, peer: tuple) -> None:
        peer = peer[:2]
        self._waiting[peer] = connection
        connection.closed = lambda: self._waiting.pop(peer, None)
        same = [other for other in self._waiting if other[0] == peer[0]]
        if len(same) > self.per_address:
            self._let_go(self._waiting, same[0])
        elif len(self._waiting) > self.in_all:
            self._let_go(self._waiting, next(iter(self._waiting)))

    def _let_go(self, held: dict[tuple, _Connection], peer: tuple) -> None:
        connection = held.pop(peer)
        self.observe(peer[0])
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # the event loop sees the end and closes it


# --- the proxy ---------------------------------------------------------------------------------------
class BodyError(Exception):
    """A request's body did not come as it should; `status` is what is answered."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class FleetProxy:
    """An ASGI application that passes requests of the Fleet API on to the SuperLink.

    With `keys`, public keys of sites, only requests that are signed with one of them; `uploads` bounds what a site
    sends, and `listener` learns which connections are a site's.
    """

    def __init__(
        self,
        superlink: str,
        authority: Path,
        observe: Callable[[Request], None] = lambda request: None,
        keys: Collection[bytes] | None = None,
        uploads: Uploads | None = None,
        listener: Listener | None = None,
    ):
        self._observe = observe
        self._keys = keys
        self._uploads = uploads
        self._listener = listener
        self._client = httpx.AsyncClient(
            base_url=f"https://{superlink}",
            verify=certificates.trusting(authority),
            timeout=60,
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=2),  # before the SuperLink closes an idle connection at its 5 seconds
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["raw_path"]
        if scope["method"] != "POST" or not _FLEET.fullmatch(path) or scope["query_string"]:
            await _answer(send, 403)
            return
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            await _answer(send, 400)  # two lengths of one body: which of them holds is not for the proxy to guess
            return
        action, key = path.decode().rpartition("/")[2], _public_key(scope["headers"])
        if self._keys is not None and not is_signed(scope["headers"], self._keys):
            status = 401
            await _answer(send, status)
        else:
            if self._listener is not None and scope.get("client"):
                self._listener.recognise(tuple(scope["client"]), key or scope["client"][0].encode())
            status = await self._pass_on(scope, receive, send, self._charge(action, key), action == _ANSWERS)
        address = scope["client"][0] if scope.get("client") else "?"
        self._observe(Request(action, key, address, status))

    async def close(self) -> None:
        """Let go of the SuperLink, which would wait for the end of every connection before its own."""
        await self._client.aclose()

    def _charge(self, action: str, key: bytes) -> Charge:
        """Whether a request may have so many bytes more."""
        left = PART_BYTES if action == _OBJECTS else METADATA_BYTES

        def charge(size: int) -> bool:
            nonlocal left
            left -= size
            return left >= 0 and (action not in _PARTS or self._uploads is None or self._uploads.charge(key, size))

        return charge

    async def _pass_on(
        self, scope: Scope, receive: Receive, send: Send, charge: Charge, look_at_answers: bool = False
    ) -> int:
        length = _first(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and not charge(int(length)):
            await _answer(send, 413)  # before any of it is read
            return 413
        allowed: Charge = (lambda size: True) if length.isdigit() else charge
        body: AsyncIterator[bytes] | bytes = _body(receive, allowed)
        if look_at_answers and self._keys is not None:
            try:
                body = await _own_answers(_body(receive, allowed))
            except BodyError as error:
                await _answer(send, error.status)
                return error.status
        request = self._client.build_request(
            "POST", scope["raw_path"].decode(), headers=_end_to_end(scope["headers"]), content=body
        )
        try:
            answer = await self._client.send(request, stream=True)
        except BodyError as error:
            await _answer(send, error.status)
            return error.status
        except httpx.TransportError:
            await _answer(send, 503)  # sites try again after this answer
            return 503
        try:
            await _relay(answer, send)
        finally:
            await answer.aclose()
        return answer.status_code


class IdleTimeoutProtocol(H11Protocol):
    """HTTP for strangers: who sends no whole request head in time is let go."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()  # a next request that has begun, or a body that goes on after it was refused

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(_HEAD_SECONDS, self._close_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_idle(self) -> None:
        self._timer = None
        if not self._is_answering():
            self.transport.abort()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is not None:
            self.config.ssl.minimum_version = certificates.OLDEST_TLS
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if isinstance(self.config.app, FleetProxy):
            await self.config.app.close()


class ProxyServer:
    """A proxy that listens, in a thread of its own."""

    def __init__(
        self,
        proxy: FleetProxy,
        host: str,
        port: int,
        certificate: Path | None = None,
        key: Path | None = None,
        listener: Listener | None = None,
    ):
        self._listener = listener or Listener()
        self._server = _Server(
            uvicorn.Config(
                proxy,
                ssl_certfile=certificate,
                ssl_keyfile=key,
                http=IdleTimeoutProtocol,
                h11_max_incomplete_event_size=_HEAD_BYTES,
                loop="asyncio",  # which asks the listener's own socket for connections
                lifespan="off",
                ws="none",
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=30,  # after sites let go of an idle connection, at 5 seconds
            )
        )
        self._address = host, port

    def __enter__(self) -> "ProxyServer":
        host, port = self._address
        try:
            listening = self._listener.open(host, port)
        except OSError as problem:
            raise RunError(
                f"{host} port {port}: the proxy for sites cannot listen there ({problem.strerror})"
            ) from None
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="proxy", daemon=True)
        self._thread.start()
        limit = time.monotonic() + _START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < limit:
            time.sleep(0.02)
        if not self._server.started:
            self._server.should_exit = True
            raise RunError(f"{host} port {port}: the proxy for sites did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._server.force_exit = True


def is_signed(headers: Sequence[tuple[bytes, bytes]], keys: Collection[bytes]) -> bool:
    """Whether the headers hold one of the public keys, and a fresh signature made with its private key.

    The SuperLink asks the same, but only after it has read the whole request; so the proxy asks first.
    """
    given = _first(headers)
    key = _public_key(headers)
    if key not in keys:
        return False
    try:
        signed_at = datetime.datetime.fromisoformat(given[_TIME].decode("ascii"))
        age = (datetime.datetime.now(datetime.UTC) - signed_at).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return False
        signature = base64.b64decode(given[_SIGNATURE], validate=True)
    except (KeyError, ValueError, TypeError, OverflowError):
        return False
    return verify_signature(bytes_to_public_key(key), given[_TIME], signature)


def _public_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    try:
        return base64.b64decode(_first(headers).get(_PUBLIC_KEY, b""), validate=True)
    except ValueError:
        return b""


def _first(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; of several the first counts, as for the SuperLink."""
    return dict(reversed(headers))


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


async def _body(receive: Receive, charge: Charge) -> AsyncIterator[bytes]:
    while True:
        try:
            message = await asyncio.wait_for(receive(), _BODY_PAUSE_SECONDS)
        except TimeoutError:
            raise BodyError(408) from None
        if message["type"] == "http.disconnect":
            raise BodyError(400)  # nobody is there to read it
        chunk = message.get("body", b"")
        if not charge(len(chunk)):
            raise BodyError(413)
        yield chunk
        if not message.get("more_body", False):
            return


async def _own_answers(body: AsyncIterator[bytes]) -> bytes:
    """A request with messages, where each answers something and is of the node that sends it.

    The SuperLink looks at who sends the request, not at what the messages in it say: a message that answers nothing it
    would hand to another site, as the server's own; one with a time that is no number it could never hand on.
    """
    content = b"".join([chunk async for chunk in body])
    try:
        request = PushMessagesRequest.FromString(content)
    except DecodeError:
        raise BodyError(400) from None
    about = [message.metadata for message in request.messages_list]
    if not all(one.reply_to_message_id and one.src_node_id == request.node.node_id for one in about):
        raise BodyError(NOT_ITS_OWN)
    if not all(math.isfinite(one.created_at + one.ttl) for one in about):
        raise BodyError(400)
    return content


async def _relay(answer: httpx.Response, send: Send) -> None:
    headers = _end_to_end([(name.lower(), value) for name, value in answer.headers.raw])
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    async for chunk in answer.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
