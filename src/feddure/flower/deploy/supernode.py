"""Flower's SuperNode, which takes from its server no more than a run's messages can need.

Flower reads whatever a server sends into memory, follows it to other addresses, and puts messages together as they
say. Here an answer has a bound of its own kind, all parts of a message have one together, sent as well as put
together, a redirection is an error, and an app is looked at before it is unpacked. How large the messages of a run
may be the ClientApp has written down when the run asked who the site is (`app.limits`); before that, and for a run
that the site's operator did not approve, they are small.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.supercore.inflatable.inflatable_object import get_object_id, get_object_type_from_object_content
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient

from feddure.flower.app.limits import PART_BYTES, allowed_download, named_parts
from feddure.flower.deploy.allowlist import check_app

ANSWER_BYTES = 1 << 20
"""Of an answer that is no part of a message: what a message is made of, a run's app and its options."""
_PARTS = "/pull-object"

# Fails, and the site with it, where another version of Flower receives messages in another way.
_receive = start_client_internal._pull_and_store_message
_options = start_client_internal.get_fused_config_from_fab


class BoundedStream(httpx.SyncByteStream):
    """An answer's body, as it is sent, up to a limit."""

    def __init__(self, stream: Any, most: int):
        self._stream, self._most = stream, most

    def __iter__(self) -> Iterator[bytes]:
        read = 0
        for chunk in self._stream:
            read += len(chunk)
            if read > self._most:
                raise ValueError(f"the server's answer has more than {self._most:,} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


class BoundedClient(FleetHttpClient):
    """Flower's client of the server, whose answers are plain, of bounded size, and the server's own."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._client.follow_redirects = False
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [_bound]}


def _bound(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ValueError("the server's answer is compressed, which nobody asked for")
    most = PART_BYTES if response.request.url.path.endswith(_PARTS) else ANSWER_BYTES
    response.stream = BoundedStream(response.stream, most)


class Download:
    """What one message takes, part by part; an error where that is more than its run may send."""

    def __init__(self, allowed: Callable[[int], int]):
        self._allowed = allowed
        self._lock = threading.Lock()
        self._bytes = 0
        self._sizes: dict[str, int] = {}  # of parts of arrays, by Flower's name
        self._named: list[str] = []  # the parts of all arrays, as often as they are named

    def take(self, run: int, content: bytes) -> bytes:
        """Count a part that was received."""
        with self._lock:
            self._bytes += len(content)
            self._expect(run, self._bytes)
            kind = get_object_type_from_object_content(content)
            if kind == "ArrayChunk":
                self._sizes[get_object_id(content)] = len(content)
            elif kind == "Array":
                self._named += named_parts(content)
        return content

    def expect_fits(self, run: int) -> None:
        """Look at what the message becomes: equal parts are sent once, and may be named any number of times."""
        self._expect(run, sum(self._sizes.get(name, PART_BYTES) for name in self._named))

    def _expect(self, run: int, size: int) -> None:
        if size > (most := self._allowed(run)):
            raise ValueError(f"it takes more than the {most:,} bytes that this run's messages can need")


def receive_bounded(site_state: Path, /, **callbacks: Any) -> int | None:
    """Flower's function that receives a message, with a bound."""
    pull, confirm = callbacks["pull_object"], callbacks["confirm_message_received"]
    download = Download(lambda run: allowed_download(site_state, run))

    def pull_object(run: int, name: str) -> bytes:
        return download.take(run, pull(run, name))

    def confirm_message_received(run: int, name: str) -> None:
        download.expect_fits(run)
        confirm(run, name)

    changed: Mapping[str, Any] = {"pull_object": pull_object, "confirm_message_received": confirm_message_received}
    return _receive(**{**callbacks, **changed})


def read_options(app: bytes, run: Any) -> Any:
    """Flower's function that unpacks an app for a run's options; none of an app that the ClientApp will refuse."""
    try:
        check_app(app)
        return _options(app, run)
    except Exception:  # an app that cannot be read is no reason to leave the federation
        return {}


def main() -> None:
    """`flower-supernode` with the same options, after the folder of the site's state."""
    from flwr.supernode.cli import flower_supernode

    site_state = Path(sys.argv.pop(1))
    fleet_http_connection.FleetHttpClient = BoundedClient  # type: ignore[misc]
    start_client_internal._pull_and_store_message = partial(receive_bounded, site_state)
    start_client_internal.get_fused_config_from_fab = read_options  # type: ignore[assignment]
    flower_supernode()


if __name__ == "__main__":
    main()
