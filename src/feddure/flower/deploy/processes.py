"""Processes that are ended with what started them, and the pidfile by which a next start finds what one left."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from feddure.environment import began_at
from feddure.errors import RunError
from feddure.files import write_json
from feddure.flower.app.sanitize import printable
from feddure.flower.deploy.control import LOOPBACK

POLL_SECONDS = 0.2
_TERMINATE_SECONDS = 20.0
_ORPHAN_SECONDS = 10.0
_LEFTOVER_SECONDS = 15.0
"""Flower's programs that were started by a killed process end within this time, where the system tells them."""
_LOG_BYTES, _LAST_LINES = 10_000_000, 15
_OWN_NAME = "feddure"

# A program that becomes another one, which Linux asks to end when the process that started it is gone, kill -9
# included (1 is PR_SET_PDEATHSIG). Nothing but exec is safe in a child of a process with threads.
_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


class Terminated(BaseException):
    """The user (Ctrl-C) or the system (SIGTERM, a closed terminal) asked to end.

    Like KeyboardInterrupt no Exception: code that survives any damaged file must not survive this.
    """

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.by_user = number == signal.SIGINT
        self.exit_code = 128 + number


class Process:
    """A child process in a session of its own, so that only its parent decides when it ends.

    On Linux it also ends where its parent was killed; elsewhere the next start finds it by the pidfile.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
        name: str = "",
        parent_killed: signal.Signals = signal.SIGTERM,
    ):
        """Start a command in a folder, by default the current one; `log` gets what it prints.

        Where this process is killed it gets the signal `parent_killed`.
        """
        self.name = name or Path(command[0]).name
        self._log_path = log
        self._terminating = False
        self._descendants: list[psutil.Process] = []  # what it had started when it was asked to end
        self._log = log.open("ab")
        self._log_start = log.stat().st_size
        try:
            if shutil.which(command[0], path=environment.get("PATH")) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self.popen = subprocess.Popen(
                ending_with_parent(command, parent_killed),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as problem:
            self._log.close()
            raise RunError(
                f"{command[0]}: cannot be started ({problem.strerror}); pip install 'feddure[flower]'"
            ) from None

    @property
    def code(self) -> int | None:
        """The exit code; None before the end."""
        return self.popen.poll()

    @property
    def ended(self) -> bool:
        return self.code is not None

    def log_tail(self) -> str:
        """The end of what the process wrote to its log."""
        with self._log_path.open("rb") as file:
            file.seek(self._log_start)
            return "\n".join(map(printable, file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]))

    def shorten_log(self) -> None:
        """Begin the log anew before it fills the disk, while the process goes on writing; the part before stays."""
        with suppress(OSError):  # no log is worth the end of a server
            if self._log_path.stat().st_size > _LOG_BYTES:
                shutil.copyfile(self._log_path, self._log_path.with_suffix(".old.log"))
                os.truncate(self._log_path, 0)  # it is open for appending
                self._log_start = 0

    def terminate(self) -> None:
        """Ask the process to end, without waiting for it; a second signal would break off an orderly end."""
        if not self._terminating and not self.ended:
            self._terminating = True
            with suppress(psutil.Error):
                self._descendants = psutil.Process(self.popen.pid).children(recursive=True)
            self.popen.terminate()

    def stop(self) -> None:
        """Ask the process to end, make it end where it does not, and see that nothing it started is left."""
        try:
            self.terminate()
            try:
                self.popen.wait(_TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait()
            _wait_or_kill({*self._descendants, *_in_session(self.popen.pid)})
        finally:
            self._log.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ProcessGroup:
    """Processes of which none is of use without the others: where one has ended, all of them are to end."""

    def __init__(self, *processes: Process):
        self._processes = processes

    @property
    def ended(self) -> bool:
        return any(process.ended for process in self._processes)

    def wait(self, *meanwhile: Callable[[], None]) -> Process:
        """Wait for the end of one of them, while signals still get through; returns the one."""
        while True:
            ended = next((process for process in self._processes if process.ended), None)
            for look in meanwhile:  # once more after the end: what was logged last counts too
                look()
            for process in self._processes:
                process.shorten_log()
            if ended is not None:
                return ended
            time.sleep(POLL_SECONDS)

    def terminate(self) -> None:
        """Ask all of them to end, without waiting for it."""
        for process in self._processes:
            process.terminate()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()
        with ExitStack() as ending:
            for process in self._processes:
                ending.callback(process.stop)


def ending_with_parent(command: Sequence[str], number: signal.Signals) -> list[str]:
    """The command line under which a command gets a signal at this process's end; only Linux can do that."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), str(int(number)), *command]


def _in_session(session: int) -> list[psutil.Process]:
    """The processes of a session whose leader may be gone: what a killed one had started has no parent."""
    found = []
    for process in psutil.process_iter() if hasattr(os, "getsid") else ():
        with suppress(OSError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_or_kill(processes: set[psutil.Process]) -> None:
    """Wait for processes that look for their parent every few seconds; those that do not see its end are killed."""
    limit = time.monotonic() + _ORPHAN_SECONDS
    while processes := set(filter(_is_alive, processes)):
        if time.monotonic() > limit:
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            return
        time.sleep(0.05)


# --- pidfile -----------------------------------------------------------------------------------------
@contextmanager
def pidfile(path: Path, who: str) -> Iterator[None]:
    """While this holds, another start with the same pidfile is refused."""
    _expect_nobody(path, who)
    write_pidfile(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def write_pidfile(path: Path, *started: Process) -> None:
    """Note this process and those that it started."""
    numbers = {os.getpid(): _OWN_NAME} | {process.popen.pid: process.name for process in started}
    content = [{"pid": pid, "name": name, "began": began_at(pid)} for pid, name in numbers.items()]
    write_json(path, content, RunError)


def _expect_nobody(path: Path, who: str) -> None:
    limit = time.monotonic() + _LEFTOVER_SECONDS
    while living := _living(path):
        own = next((pid for pid, name in living.items() if name == _OWN_NAME), None)
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
    return {pid: name for pid, (name, at) in noted.items() if pid != os.getpid() and at and began_at(pid) == at}


# --- signals and ports -------------------------------------------------------------------------------
@contextmanager
def terminating_on_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal raise `Terminated`, so that everything started is also ended.

    A signal that is ignored stays so: that is how `nohup` keeps a server running.
    """

    def terminate(number: int, frame: object) -> None:
        for each in numbers:  # a second signal must not break off the ending
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    known = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    numbers = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, terminate) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def wait_until(ready: Callable[[], bool], process: Process, what: str, seconds: float = 60.0) -> None:
    """Wait until a process does its work; an error with the end of its log where it does not."""
    limit = time.monotonic() + seconds
    while not ready():
        if process.ended:
            raise RunError(f"{what} ended at once (exit code {process.code}):\n{process.log_tail()}")
        if time.monotonic() > limit:
            raise RunError(f"{what} is not ready after {seconds:.0f} seconds:\n{process.log_tail()}")
        time.sleep(0.1)


def is_listening(port: int) -> bool:
    """Whether something accepts connections at the loopback address."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


def expect_free(host: str, port: int, hint: str) -> None:
    """Refuse an address that cannot be listened on, with a hint at what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as problem:
            raise RunError(f"{host} port {port}: cannot listen there ({problem.strerror}); {hint}") from None


def free_port() -> int:
    """A port that nothing listens on at the loopback address."""
    with socket.socket() as attempt:
        attempt.bind((LOOPBACK, 0))
        return int(attempt.getsockname()[1])
