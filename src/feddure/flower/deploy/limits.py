"""Limits of the proxy: how many connections anybody may hold, and how many bytes a site may send in a round."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddure.flower.app.limits import FILE

SMALL_BYTES = 256 << 10
"""Of any request that carries no part of a message: asking for work, heartbeats."""
PART_BYTES = 8 << 20
"""Of one request with a part of a message: Flower sends arrays in parts of 5 MiB."""
_WINDOW_SECONDS = 600.0
PER_ADDRESS, IN_ALL, PER_SITE = 32, 256, 20
"""Connections over which no site has asked for anything yet, and those of one site."""


class Uploads:
    """Bytes of messages that each site sent in the round under way; the run's own file says how many it may.

    A site's account is opened anew in each round, and every ten minutes: while sites gather there are no rounds.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
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
            return (), SMALL_BYTES  # no run has begun, and sites only say who they are


class Connection(socket.socket):
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
    _waiting: dict[tuple, Connection] = field(default_factory=dict)  # peer → connection, the oldest first
    _of_sites: dict[bytes, dict[tuple, Connection]] = field(default_factory=dict)  # by key, likewise

    def open(self, host: str, port: int) -> socket.socket:
        """Listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        plain = socket.create_server((host, port), family=family)
        listener = self

        class Accepting(socket.socket):
            def accept(self) -> tuple[socket.socket, Any]:
                accepted, peer = super().accept()
                connection = Connection(accepted.family, accepted.type, accepted.proto, accepted.detach())
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

    def _add(self, connection: Connection, peer: tuple) -> None:
        peer = peer[:2]
        self._waiting[peer] = connection
        connection.closed = lambda: self._waiting.pop(peer, None)
        same = [other for other in self._waiting if other[0] == peer[0]]
        if len(same) > self.per_address:
            self._let_go(self._waiting, same[0])
        elif len(self._waiting) > self.in_all:
            self._let_go(self._waiting, next(iter(self._waiting)))

    def _let_go(self, held: dict[tuple, Connection], peer: tuple) -> None:
        connection = held.pop(peer)
        self.observe(peer[0])
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # the event loop sees the end and closes it
