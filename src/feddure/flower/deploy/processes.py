"""Processes that are ended with what started them."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from feddure.errors import RunError
from feddure.flower.deploy.supervise import tethered
from feddure.flower.deploy.terminal import printable

POLL_SECONDS = 0.2
_END_SECONDS = 20.0
_ORPHAN_SECONDS = 10.0


class Ended(BaseException):
    """The user (Ctrl-C) or the system (SIGTERM, a closed terminal) asked to end.

    Like KeyboardInterrupt no Exception: code that survives any damaged file must not survive this.
    """

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.by_user = number == signal.SIGINT
        self.exit_code = 128 + number


class Process:
    """A child process in a session of its own, so that only its parent decides when it ends.

    On Linux it also ends where its parent was killed; elsewhere it is found by the next start (see `running`).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        folder: Path | None = None,
    ):
        """Start a command in a folder, by default the current one; `log` gets what it prints."""
        self.name = Path(command[0]).name
        self._log_path = log
        self._asked = False
        self._below: dict[int, str] = {}  # what the process had started when it was asked to end
        self._log: IO[bytes] | None = log.open("ab") if log is not None else None
        self._begin = log.stat().st_size if log is not None else 0
        try:
            if shutil.which(command[0], path=environment.get("PATH")) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self.popen = subprocess.Popen(
                tethered(list(command)),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT if self._log is not None else None,
                start_new_session=True,
            )
        except OSError as problem:
            if self._log is not None:
                self._log.close()
            raise RunError(
                f"{command[0]}: cannot be started ({problem.strerror}); pip install 'feddure[flower]'"
            ) from None

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None

    @property
    def code(self) -> int | None:
        """The exit code; None before the end."""
        return self.popen.poll()

    def last_words(self, lines: int = 15) -> str:
        """The end of what the process wrote to its log."""
        if self._log_path is None:
            return ""
        with self._log_path.open("rb") as file:
            file.seek(self._begin)
            words = file.read().decode(errors="replace").splitlines()[-lines:]
        return "\n".join(printable(line) for line in words)

    def ask_to_end(self) -> None:
        """Ask the process to end, without waiting for it; a second signal would break off an orderly end."""
        if not self._asked and not self.ended:
            self._asked = True
            self._below = _descendants(self.popen.pid)
            self.popen.terminate()

    def end(self) -> None:
        """Ask the process to end, make it end where it does not, and see that nothing it started is left."""
        try:
            self.ask_to_end()
            try:
                self.popen.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait()
            _outlive(self._below | _in_session(self.popen.pid))
        finally:
            if self._log is not None:
                self._log.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Together:
    """Processes of which none is of use without the others: where one has ended, all of them are to end."""

    def __init__(self, *processes: Process):
        self._processes = processes

    @property
    def ended(self) -> bool:
        return any(process.ended for process in self._processes)

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> Process:
        """Wait for the end of one of them, while signals still get through; returns the one."""
        while True:
            ended = next((process for process in self._processes if process.ended), None)
            meanwhile()  # once more after the end: what was said last counts too
            if ended is not None:
                return ended
            time.sleep(POLL_SECONDS)

    def ask_to_end(self) -> None:
        """Ask all of them to end, without waiting for it."""
        for process in self._processes:
            process.ask_to_end()

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, *_: object) -> None:
        self.ask_to_end()
        with ExitStack() as ending:
            for process in self._processes:
                ending.callback(process.end)


def _descendants(pid: int) -> dict[int, str]:
    """Processes that a process started, and those started by them, with the time at which each began.

    Flower's programs start others in sessions of their own; those look for their parent every few seconds and end
    without it. Systems without /proc are left to that.
    """
    children: dict[int, list[tuple[int, str]]] = {}
    for each, about in _running().items():
        children.setdefault(about.parent, []).append((each, about.start))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child, start in children.get(waiting.pop(), []):
            found[child] = start
            waiting.append(child)
    return found


def _in_session(pid: int) -> dict[int, str]:
    """Processes in the session of one that may be gone, with the time at which each began.

    Where a process was killed, what it had started has no parent to be found by.
    """
    return {each: about.start for each, about in _running().items() if about.session == pid}


class _Seen(NamedTuple):
    """What the system says of a process."""

    parent: int
    session: int
    start: str


def _running() -> dict[int, _Seen]:
    """All processes that have not ended; none on systems without /proc."""
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return {pid: seen for pid in numbers if (seen := _see(pid)) is not None}


def _see(pid: int) -> _Seen | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else _Seen(int(fields[1]), int(fields[3]), fields[19])


def began(pid: int) -> str | None:
    """When a living process began, in the system's own words; None where it has ended or nobody can say."""
    if Path("/proc/self/stat").exists():
        seen = _see(pid)
        return seen.start if seen is not None else None
    if os.name == "nt":
        return None
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def _outlive(processes: Mapping[int, str]) -> None:
    """Wait for the end of processes; those that do not see that they are alone are ended."""
    limit = time.monotonic() + _ORPHAN_SECONDS
    left = dict(processes)
    while left:
        # A number may have gone to another process since: the time at which it began tells them apart.
        left = {pid: start for pid, start in left.items() if (seen := _see(pid)) and seen.start == start}
        if left and time.monotonic() > limit:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


@contextmanager
def signals_as_ended() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal raise `Ended`, so that everything started is also ended.

    A signal that is ignored stays so: that is how `nohup` keeps a server running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        for each in numbers:  # a second signal must not break off the ending
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    known = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    numbers = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def wait_until(ready: Callable[[], bool], process: Process, what: str, seconds: float = 60.0) -> None:
    """Wait until a process does its work; an error with its last words where it does not."""
    limit = time.monotonic() + seconds
    while not ready():
        if process.ended:
            raise RunError(f"{what} ended at once (exit code {process.popen.returncode}):\n{process.last_words()}")
        if time.monotonic() > limit:
            raise RunError(f"{what} is not ready after {seconds:.0f} seconds:\n{process.last_words()}")
        time.sleep(0.1)


def is_listening(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def expect_free(host: str, port: int, option: str) -> None:
    """Refuse an address that cannot be listened on, naming the option that gives another."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as problem:
            raise RunError(f"{host} port {port}: cannot listen there ({problem.strerror}); {option}") from None


def free_port() -> int:
    """A port that nothing listens on at the loopback address."""
    with socket.socket() as attempt:
        attempt.bind(("127.0.0.1", 0))
        return int(attempt.getsockname()[1])
