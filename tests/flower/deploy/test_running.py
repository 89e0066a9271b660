"""What an earlier start left behind is found and named by the next."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feddure.errors import RunError
from feddure.flower.deploy import pidfile as running
from feddure.flower.deploy.processes import Process

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def living() -> Iterator[Process]:
    with Process(SLEEP, os.environ) as process:
        yield process


def leave(path: Path, process: Process, own: bool) -> None:
    """What a start leaves at a path whose only living process is this one, feddure's own or one of Flower's."""
    running.note(path, process)
    noted = [entry for entry in json.loads(path.read_text()) if entry["pid"] == process.popen.pid]
    path.write_text(json.dumps([entry | ({"name": "feddure"} if own else {}) for entry in noted]))


def start(path: Path) -> None:
    with running.alone(path, "site north"):
        pass


def test_an_orphan_is_named_with_what_to_do(tmp_path: Path, living: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_ORPHAN_SECONDS", 0.0)
    path, pid = tmp_path / "running.json", living.popen.pid
    leave(path, living, own=False)
    with pytest.raises(RunError, match=rf"site north was killed .* \(process {pid}\); end that with `kill {pid}`"):
        start(path)
    living.end()
    start(path)


def test_an_orphan_that_is_about_to_end_is_waited_for(
    tmp_path: Path, living: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "running.json"
    leave(path, living, own=False)
    monkeypatch.setattr(running.time, "sleep", lambda seconds: living.popen.kill())
    start(path)


def test_a_second_start_is_refused_at_once(tmp_path: Path, living: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.time, "sleep", lambda seconds: pytest.fail("waited"))
    path = tmp_path / "running.json"
    leave(path, living, own=True)
    with pytest.raises(RunError, match=f"site north runs on this machine already.*`kill {living.popen.pid}`"):
        start(path)


def test_a_number_that_went_to_another_process_is_nobody(tmp_path: Path, living: Process) -> None:
    path = tmp_path / "running.json"
    leave(path, living, own=True)
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([entry | {"began": "at another time"}]))
    start(path)


@pytest.mark.parametrize("content", ["", "[{}]", "7"])
def test_a_damaged_note_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "running.json").write_text(content)
    start(tmp_path / "running.json")


def test_an_end_leaves_no_note(tmp_path: Path) -> None:
    path = tmp_path / "running.json"
    with running.alone(path, "site north"):
        assert [entry["pid"] for entry in json.loads(path.read_text())] == [os.getpid()]
    assert not path.exists()
