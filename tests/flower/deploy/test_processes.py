"""Processes that end with what started them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from feddure.environment import began_at
from feddure.errors import RunError
from feddure.flower.deploy import processes
from feddure.flower.deploy.processes import (
    Process,
    ProcessGroup,
    Terminated,
    terminating_on_signals,
    wait_until,
)
from waiting import until

SLEEP = [sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(600)"]
DETACH = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def said(process):
    limit = time.monotonic() + 30
    while not process.log_tail() and time.monotonic() < limit:
        time.sleep(0.02)
    return process.log_tail()


def test_a_process_ends_with_its_block_also_on_failure(tmp_path):
    process = Process(SLEEP, os.environ, tmp_path / "log")
    assert said(process) == "hello"
    with pytest.raises(ZeroDivisionError), process:
        _ = 1 / 0
    assert process.ended


def test_a_process_that_will_not_end_is_made_to(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_TERMINATE_SECONDS", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    with Process([sys.executable, "-c", code], os.environ, tmp_path / "log") as process:
        assert said(process) == "deaf"
    assert process.popen.returncode == -signal.SIGKILL


def test_a_long_log_begins_anew_while_its_process_writes_and_the_part_before_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LOG_BYTES", 10)
    code = (
        "import pathlib, sys, time\n"
        "print('a long first line', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "print('second', flush=True)\n"
    )
    log, told = tmp_path / "a.log", tmp_path / "told"
    with Process([sys.executable, "-c", code, str(told)], os.environ, log) as process:
        assert said(process)
        process.shorten_log()
        assert log.read_text() == ""
        told.touch()
        assert said(process) == "second"
    assert (tmp_path / "a.old.log").read_text() == "a long first line\n"


def test_a_process_is_asked_to_end_only_once(tmp_path):
    code = (
        "import signal, time\n"
        "def leave(number, frame):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    print('leaving', flush=True); time.sleep(0.5); print('left', flush=True); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, leave); print('here', flush=True); time.sleep(600)"
    )
    with Process([sys.executable, "-c", code], os.environ, tmp_path / "log") as process:
        assert said(process) == "here"
        process.terminate()
        while "leaving" not in process.log_tail():
            time.sleep(0.02)
    assert (process.log_tail().splitlines(), process.popen.returncode) == (["here", "leaving", "left"], 0)


def test_processes_that_need_each_other_end_together(tmp_path):
    staying = Process(SLEEP, os.environ, tmp_path / "log")
    ending = Process([sys.executable, "-c", "raise SystemExit(3)"], os.environ, tmp_path / "log")
    with ProcessGroup(staying, ending) as both:
        first = both.wait()
        assert first is ending
        assert (first.name, first.code) == (Path(sys.executable).name, 3)
        assert both.ended
        assert not staying.ended
    assert staying.ended


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no-such-program: cannot be started.*feddure\[flower\]"):
        Process(["no-such-program"], os.environ, tmp_path / "log")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_become_an_orderly_end(number, code):
    before = signal.getsignal(number)
    with pytest.raises(Terminated) as ended, terminating_on_signals():
        signal.raise_signal(number)
    assert (ended.value.exit_code, ended.value.by_user) == (code, number == signal.SIGINT)
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with terminating_on_signals():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(Terminated):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_does_not_break_off_the_ending():
    done = []

    def work():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("ended all")

    with pytest.raises(Terminated), terminating_on_signals():
        work()
    assert done == ["ended all"]


# --- pidfile --------------------------------------------------------------------------------------
@pytest.fixture
def living(tmp_path):
    with Process(SLEEP, os.environ, tmp_path / "log") as process:
        yield process


def leave(path, process, own):
    """What a start leaves at a path whose only living process is this one, feddure's own or one of Flower's."""
    processes.write_pidfile(path, process)
    noted = [entry for entry in json.loads(path.read_text()) if entry["pid"] == process.popen.pid]
    path.write_text(json.dumps([entry | ({"name": "feddure"} if own else {}) for entry in noted]))


def start(path):
    with processes.pidfile(path, "site north"):
        pass


def test_an_orphan_is_named_with_what_to_do(tmp_path, living, monkeypatch):
    monkeypatch.setattr(processes, "_LEFTOVER_SECONDS", 0.0)
    path, pid = tmp_path / "running.json", living.popen.pid
    leave(path, living, own=False)
    with pytest.raises(RunError, match=rf"site north was killed .* \(process {pid}\); end that with `kill {pid}`"):
        start(path)
    living.stop()
    start(path)


def test_an_orphan_that_is_about_to_end_is_waited_for(tmp_path, living, monkeypatch):
    path = tmp_path / "running.json"
    leave(path, living, own=False)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: living.popen.kill())
    start(path)


def test_a_second_start_is_refused_at_once(tmp_path, living, monkeypatch):
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: pytest.fail("waited"))
    path = tmp_path / "running.json"
    leave(path, living, own=True)
    with pytest.raises(RunError, match=f"site north runs on this machine already.*`kill {living.popen.pid}`"):
        start(path)


def test_a_damaged_pidfile_or_a_number_of_another_process_names_nobody(tmp_path):
    path = tmp_path / "running.json"
    another = [{"pid": os.getppid(), "name": "feddure", "began": "at another time"}]
    for content in ("", "[{}]", "7", json.dumps(another)):
        path.write_text(content)
        start(path)
        assert not path.exists()


# --- kills ------------------------------------------------------------------------------------------------
def gone(pid):
    return began_at(pid) is None


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_process_started_ends_too(tmp_path, monkeypatch, killed):
    """Also in a session of its own, and where the process itself was killed."""
    monkeypatch.setattr(processes, "_ORPHAN_SECONDS", 0.1)
    code = DETACH.replace(", start_new_session=True", "") if killed else DETACH
    with Process([sys.executable, "-c", code], os.environ, tmp_path / "log") as process:
        child = int(said(process))
        if killed:
            process.popen.kill()
            process.popen.wait()
        assert not gone(child)
    until(lambda: gone(child))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
@pytest.mark.parametrize("ignoring", [False, True])
def test_a_process_ends_with_a_parent_that_is_killed(tmp_path, ignoring):
    """Also one that takes its time after SIGTERM, where it is to be killed."""
    deaf = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN);" + SLEEP[-1]]
    command, number = (deaf, 9) if ignoring else (SLEEP, 15)
    code = (
        "import os, sys, time; from pathlib import Path; from feddure.flower.deploy.processes import Process\n"
        f"child = Process({command!r}, os.environ, Path({str(tmp_path / 'log')!r}), parent_killed={number})\n"
        "print(child.popen.pid, flush=True); time.sleep(600)"
    )
    with Process([sys.executable, "-c", code], os.environ, tmp_path / "parent") as parent:
        child = int(said(parent))
        until((tmp_path / "log").read_text)
        assert not gone(child)
        parent.popen.kill()
        until(lambda: gone(child))


def test_a_process_that_does_not_get_ready_is_quoted(tmp_path):
    (tmp_path / "log").write_text("of an earlier start\n")
    code = "print('port taken'); raise SystemExit(3)"
    with (
        Process([sys.executable, "-c", code], os.environ, tmp_path / "log") as process,
        pytest.raises(RunError, match=r"it ended at once \(exit code 3\):\nport taken$"),
    ):
        wait_until(lambda: False, process, "it")
    slow = Process(SLEEP, os.environ, tmp_path / "log")
    with slow as process, pytest.raises(RunError, match="not ready after 0 seconds"):
        wait_until(lambda: False, process, "it", seconds=0.2)
