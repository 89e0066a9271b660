"""What starts the runs' programs at a server: it is started again when it ends, and a server without it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feddure.errors import RunError
from feddure.flower.app.description import Description, ServerAddress
from feddure.flower.deploy import server, superexec
from feddure.flower.deploy.control import Control
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import Process, free_port
from feddure.flower.deploy.superexec import SuperExec
from waiting import until


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def strftime(self, pattern: str) -> str:
        return "12:00:00"


class Killed:
    """Stands for a process that somebody killed."""

    ended, code = True, -9

    def __init__(self, *arguments: Any) -> None:
        pass

    def last_words(self) -> str:
        return "no memory left"

    def end(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(superexec, "time", found)
    return found


def test_one_that_ends_is_started_again_and_the_last_one_ends_with_the_block(tmp_path: Path, clock: Clock) -> None:
    code = "import os, time; print('begun', os.getpid(), flush=True); time.sleep(600)"
    log, shown = tmp_path / "log", []

    def begun() -> list[int]:
        return [int(line.split()[1]) for line in log.read_text().splitlines()]

    with SuperExec([sys.executable, "-c", code], os.environ, log, shown.append) as kept:
        (first,) = until(begun)
        assert not kept.ended
        os.kill(first, signal.SIGKILL)
        until(lambda: kept.ended)
        kept.start_again()
        until(lambda: len(begun()) == 2)
        assert not kept.ended
    assert kept.ended
    assert len(begun()) == 2
    assert [line.partition(";")[0] for line in shown] == ["12:00:00  flower-superexec ended (exit code -9)"]


def test_one_that_keeps_on_ending_is_given_up(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superexec, "Process", Killed)
    kept = SuperExec([], {}, tmp_path / "log", lambda line: None)
    for _ in range(5):
        kept.start_again()
    with pytest.raises(
        RunError, match=r"ended 6 times in a row \(exit code -9\).*the server ends too.*\nno memory left"
    ):
        kept.start_again()
    assert clock.slept == [1, 2, 4, 8, 16]


def test_ends_that_are_hours_apart_are_no_reason_to_give_up(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superexec, "Process", Killed)
    kept = SuperExec([], {}, tmp_path / "log", lambda line: None)
    for _ in range(20):
        clock.now += 3600
        kept.start_again()
    assert clock.slept == [1] * 20


class TestServe:
    """The server looks after it until its SuperLink ends, or until it is of no use."""

    def serve(self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch, starts: int, useless: bool) -> list[str]:
        happened: list[str] = []

        def start_again() -> None:
            happened.append("again")
            running.superlink.ended = len(happened) == starts and not useless
            if len(happened) == starts and useless:
                raise RunError("of no use")

        running = SimpleNamespace(
            superlink=SimpleNamespace(ended=False, code=4, last_words=lambda: "out of disk"),
            superexec=SimpleNamespace(ended=True, start_again=start_again),
        )

        @contextmanager
        def serving(*_: Any) -> Iterator[Any]:
            try:
                yield running
            finally:
                happened.append("all ended")

        monkeypatch.setattr(server, "serving", serving)
        monkeypatch.setattr(server, "POLL_SECONDS", 0.0)
        with pytest.raises(RunError) as problem:
            server.serve(own, None, lambda line: None)
        return [*happened, str(problem.value)]

    def test_it_is_started_again_while_the_superlink_lives(
        self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        *happened, problem = self.serve(own, monkeypatch, starts=3, useless=False)
        assert happened == ["again", "again", "again", "all ended"]
        assert problem == "flower-superlink ended by itself (exit code 4):\nout of disk"

    def test_the_server_ends_where_it_is_of_no_use(self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.serve(own, monkeypatch, starts=2, useless=True) == ["again", "again", "all ended", "of no use"]


def superexecs_below(pid: int) -> set[int]:
    """The SuperExecs that live among all that a process started."""
    table = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=3) for line in table.stdout.splitlines()]
    below = [pid]
    for each in below:
        below += [int(child) for child, parent, *_ in rows if int(parent) == each]
    return {
        int(number)
        for number, _, state, words in rows
        if int(number) in below and not state.startswith("Z") and "flower-superexec" in words
    }


@pytest.mark.timeout(240)
def test_a_real_server_whose_superexec_is_killed_still_begins_runs(tmp_path: Path, agreed: Description) -> None:
    address = ServerAddress(host="127.0.0.1", port=free_port())
    description = agreed.model_copy(update={"sites": ("north",), "server": address})
    folder = initialise(tmp_path / "trees", description, control_port=free_port())
    folder.public_key("north").unlink()  # no site joins here, and registering takes seconds
    command = [sys.executable, "-m", "feddure", "federate", "server", str(folder.root)]
    with Process(command, os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "log") as process:
        until(lambda: "ready: sites can join" in process.last_words() or process.ended)
        assert not process.ended, process.last_words()
        (first,) = until(lambda: superexecs_below(process.popen.pid))
        os.kill(first, signal.SIGKILL)
        (second,) = until(lambda: superexecs_below(process.popen.pid) - {first})
        assert "flower-superexec ended (exit code -9); again in 1 s" in process.last_words()
        control = Control(folder)
        number = control.start({"run-folder": str(folder.runs / "a"), "resume": False})
        until(lambda: control.runs(number)[0].begun)
        process.ask_to_end()
        until(lambda: process.ended)
    assert process.code == 128 + signal.SIGTERM
    assert not superexecs_below(second)
