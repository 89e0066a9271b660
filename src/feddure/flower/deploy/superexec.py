"""Flower's SuperExec at a server: the process that starts the program of each run.

A SuperLink starts one by itself, but does not look whether it still lives, and without one every run waits for ever.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from feddure.errors import RunError
from feddure.flower.deploy.control import Show
from feddure.flower.deploy.processes import Process

_ATTEMPTS = 5
_SHORT_SECONDS = 60.0
"""One that lived longer did its work: its end does not count together with earlier ones."""


class SuperExec:
    """A SuperExec that is started again when it ends; what the SuperLink holds for it is not lost."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, show: Show):
        self._arguments = command, environment, log
        self._show = show
        self._short_lives = 0
        self._start()

    @property
    def ended(self) -> bool:
        return self._process.ended

    def start_again(self) -> None:
        """Start it again after its end, the later the more often that was needed; an error where it is of no use."""
        lived = time.monotonic() - self._began
        self._short_lives = self._short_lives + 1 if lived < _SHORT_SECONDS else 1
        code = self._process.code
        if self._short_lives > _ATTEMPTS:
            log = self._arguments[2]
            raise RunError(
                f"flower-superexec ended {self._short_lives} times in a row (exit code {code}), and no run begins "
                f"without it: the server ends too. Is this machine out of memory, or overloaded? Where it is not, the "
                f"reason is at the end of {log}:\n{self._process.last_words()}"
            )
        self._process.end()
        pause = 2.0 ** (self._short_lives - 1)
        self._show(
            f"{time.strftime('%H:%M:%S')}  flower-superexec ended (exit code {code}); again in {pause:.0f} s. "
            f"A run that was going on is over: go on with --resume"
        )
        time.sleep(pause)
        self._start()

    def _start(self) -> None:
        self._process = Process(*self._arguments)
        self._began = time.monotonic()

    def __enter__(self) -> "SuperExec":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()
