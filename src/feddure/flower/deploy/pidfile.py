"""Which processes are at work for a site or a server on this machine: the next start finds what an earlier one left."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.flower.deploy.processes import Process, began

_OWN = "feddure"
_ORPHAN_SECONDS = 15.0
"""Flower's programs that were started by a killed process end within this time, where the system tells them."""


@contextmanager
def alone(path: Path, who: str) -> Iterator[None]:
    """While this holds, another start that notes its processes at the same path is refused."""
    _expect_nobody(path, who)
    note(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def note(path: Path, *started: Process) -> None:
    """Write down this process and those that it started."""
    numbers = {os.getpid(): _OWN} | {process.popen.pid: process.name for process in started}
    content = [{"pid": pid, "name": name, "began": began(pid)} for pid, name in numbers.items()]
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode(), RunError)


def _expect_nobody(path: Path, who: str) -> None:
    limit = time.monotonic() + _ORPHAN_SECONDS
    while living := _living(path):
        own = next((pid for pid, name in living.items() if name == _OWN), None)
        if own is not None:
            raise RunError(f"{who} runs on this machine already; end it first, with Ctrl-C there or `kill {own}`")
        if time.monotonic() > limit:
            numbers = " ".join(map(str, living))
            named = ", ".join(f"{name} (process {pid})" for pid, name in living.items())
            raise RunError(
                f"{who} was killed here earlier, and what it had started goes on without it: {named}; "
                f"end that with `kill {numbers}`, then start again"
            )
        time.sleep(0.2)


def _living(path: Path) -> dict[int, str]:
    """The processes of an earlier start that have not ended; a number may have gone to another process since."""
    try:
        noted = {int(entry["pid"]): (str(entry["name"]), entry["began"]) for entry in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # never written, or torn by a full disk: nobody can be named
    return {
        pid: name for pid, (name, at) in noted.items() if pid != os.getpid() and at is not None and began(pid) == at
    }
