"""What the person at a site sees: Flower's logs, which go to files, in a few lines of plain words."""

import re
import time
from pathlib import Path

from feddure.flower.app.sanitize import SAID
from feddure.flower.deploy.control import Show
from feddure.flower.deploy.terminal import printable

_LEVEL = re.compile(r"(INFO|WARNING|ERROR)\s*:\s+(.*)")
_JOINED = "SuperNode ID: "
_LOST = "Connection attempt failed"
_FOUND_AGAIN = "Connection successful"
_NOT_ACTIVATED = "Failed to activate SuperNode"
_NOT_RECEIVED, _NOT_SENT = "Failed to receive message", "Failed to send message"
_EXPLAINED_AT_THE_END = ("Exit Code:", "SSL/TLS handshake error")
"""Errors with which a SuperNode ends; whoever waits for its end says what that means."""


class Log:
    """The lines that are added to a log from now on."""

    def __init__(self, path: Path):
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """The whole lines since the last call; one that is still being written comes with a later one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        return [printable(line.decode(errors="replace")).strip() for line in lines]


class Narration:
    """One start of a site's SuperNode and SuperExec, told while they run."""

    def __init__(self, supernode: Path, superexec: Path, server: str, show: Show, verbose: bool = False):
        self.joined = False
        self.activation_failed = False
        self._supernode, self._superexec = Log(supernode), Log(superexec)
        self._server = server
        self._show = show
        self._verbose = verbose
        self._connected = True  # until an attempt fails
        self._last = ""

    def look(self) -> None:
        """Tell what was logged since the last look."""
        for line in self._supernode.new_lines():
            self._raw(line)
            self._tell_connection(line)
        for line in self._superexec.new_lines():
            self._raw(line)
            self._tell_work(line)

    def _tell_connection(self, line: str) -> None:
        level, text = _parts(line)
        if text.startswith(_JOINED):
            self.joined = self._connected = True
            self._say(f"connected to {self._server}; waiting for a run (Ctrl-C leaves the federation)")
        elif text.startswith(_LOST):
            if self._connected:
                self._say(f"no connection to {self._server}; trying again until there is one")
            self._connected = False
        elif text.startswith(_FOUND_AGAIN):
            if self.joined and not self._connected:
                self._say(f"connected to {self._server} again")
            self._connected = True
        elif _NOT_ACTIVATED in line:
            self.activation_failed = True
        elif text.startswith((_NOT_RECEIVED, _NOT_SENT)):
            done = "received from" if text.startswith(_NOT_RECEIVED) else "sent to"
            reason = text.partition(": ")[2] or "no reason given"
            self._say(f"warning: a message could not be {done} the server ({reason}); the round goes on without it")
        elif level == "ERROR" and not text.startswith(_EXPLAINED_AT_THE_END):
            self._say(f"Flower reports an error: {text}")

    def _tell_work(self, line: str) -> None:
        level, text = _parts(line)
        if line.startswith(SAID):
            if line != self._last:  # a run that refuses this site asks it again and again
                self._say(line.removeprefix(SAID))
            self._last = line
        elif level == "ERROR":
            self._say(f"Flower reports an error: {text}")

    def _raw(self, line: str) -> None:
        if self._verbose and line:
            self._show(f"  | {line}")

    def _say(self, text: str) -> None:
        self._show(f"{time.strftime('%H:%M:%S')}  {text}")


def _parts(line: str) -> tuple[str, str]:
    """The level of a line of Flower's, and what it says; no level where another program wrote it."""
    found = _LEVEL.fullmatch(line)
    return (found[1], found[2]) if found else ("", line)
