"""The page of a folder, served to this machine's browsers alone.

It answers GET for three things: the page, what has changed, and reports of entries that it has found itself. A page of
another site that a name leads to this address (DNS rebinding) is refused by the name that its requests carry.
"""

import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from feddure.errors import ConfigError
from feddure.files import read_regular
from feddure.reports import page
from feddure.watch.folder import Folder

ADDRESS = "127.0.0.1"
_SECONDS_BETWEEN_LOOKS = 0.5
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# A report may come from anybody: it has an origin of its own, which can ask this server nothing.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)


class Server(ThreadingHTTPServer):
    """Serves a folder on a port, or on a free one where it is 0; `serve_forever` until `shutdown`."""

    daemon_threads = True

    def __init__(self, folder: Folder, port: int = 0):
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as problem:
            said = getattr(problem, "strerror", None) or problem
            raise ConfigError(f"--port {port}: cannot be used ({said}); name another, or leave it out") from None
        self._folder = folder
        self._page = page.render("watch.html.j2", live="watch.js", kicker="feddure watch", title="Live").encode()
        self._lock = threading.Lock()
        self._looked = -_SECONDS_BETWEEN_LOOKS

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def is_meant(self, host: str | None) -> bool:
        """Whether a request was meant for this server, by the name that it was sent to."""
        return host in (f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}")

    def answer(self, target: str) -> tuple[HTTPStatus, str, bytes, str]:
        """Status, type, content and policy for what was asked for."""
        parts = urlsplit(target)
        if parts.path == "/":
            return HTTPStatus.OK, "text/html", self._page, "frame-ancestors 'none'"
        if parts.path == "/state":
            after = parse_qs(parts.query).get("after", ["0"])[0]
            state = self._state(int(after) if after.isdecimal() and len(after) < 16 else 0)
            return HTTPStatus.OK, "application/json", state, "default-src 'none'"
        if parts.path.startswith("/report/"):
            with self._lock:
                path = self._folder.report(unquote(parts.path.removeprefix("/report/")))
            try:
                if path is not None:
                    return HTTPStatus.OK, "text/html", read_regular(path), _REPORT_POLICY
            except OSError:
                pass
        return HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n", "default-src 'none'"

    def _state(self, after: int) -> bytes:
        with self._lock:
            if time.monotonic() >= self._looked + _SECONDS_BETWEEN_LOOKS:
                self._folder.look()
                self._looked = time.monotonic()
            return json.dumps(self._folder.state(after), allow_nan=False).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30

    def do_GET(self) -> None:
        if not self.server.is_meant(self.headers.get("Host")):
            found = HTTPStatus.FORBIDDEN, "text/plain", b"Not the name of this server.\n", "default-src 'none'"
        else:
            found = self.server.answer(self.path)
        status, kind, content, policy = found
        self.send_response(status)
        about = _HEADERS | {"Content-Security-Policy": policy, "Content-Length": str(len(content))}
        for name, value in (about | {"Content-Type": f"{kind}; charset=utf-8"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "feddure"

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # a reader has gone
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
