"""A site that joins: what it looks at first, and how it comes back after a crash."""

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feddure.deployment import site
from feddure.deployment.check import CheckUp, check
from feddure.deployment.connection import Reached
from feddure.deployment.layout import Bundle, ServerFolder
from feddure.deployment.processes import Together, began
from feddure.errors import ConfigError, RunError


class Ending:
    """Stands for a SuperNode that the server turns away, or for its SuperExec, which ends when it is told to."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path | None, folder: Path) -> None:
        self.command, self.environment, self.folder = command, environment, folder
        self.name, self.code = Path(command[0]).name, 1
        self.popen = SimpleNamespace(pid=77)
        self.ended = self.name == "flower-supernode"

    def ask_to_end(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True


def supernodes(started: list[Ending]) -> list[Ending]:
    return [process for process in started if process.name == "flower-supernode"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    found: list[Ending] = []

    def start(*arguments: Any) -> Ending:
        found.append(Ending(*arguments))
        return found[-1]

    monkeypatch.setattr(site, "Process", start)
    return found


def answer(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    monkeypatch.setattr(site, "reach", lambda *_: Reached(outcome, f"the server is {outcome}"))


def test_a_supernode_starts_with_the_guard_first_on_its_path(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    shown: list[str] = []
    bundle = own.bundle("north")
    site.start(bundle, "north", images, {"device": "cpu"}, shown.append, environment={"OMP_NUM_THREADS": "1"})
    assert started[0].environment["PATH"].startswith(str(bundle.programs))
    assert started[0].environment["OMP_NUM_THREADS"] == "1"
    assert started[0].environment["FLWR_HOME"] == str(bundle.flower_home)
    assert 'device="cpu"' in started[0].command[-1]
    assert shown[-1].startswith("$ flower-supernode --superlink 127.0.0.1:9092")
    assert list(bundle.cache.glob("pixels-*"))  # the first round finds them


def test_a_supernode_starts_away_from_the_operators_folder(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    monkeypatch.chdir(own.root)
    bundle = own.bundle("north")
    site.start(Bundle(Path("sites/north")), "north", images, {}, print)
    assert started[0].folder == bundle.flower_home
    assert started[0].environment["PATH"].startswith(str(bundle.programs))
    assert str(bundle.key) in started[0].command


def test_what_starts_the_training_stands_behind_the_guard_too(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    site.start(own.bundle("north"), "north", images, {}, print)
    supernode, superexec = started
    assert (superexec.name, superexec.folder) == ("flower-superexec", supernode.folder)
    assert superexec.environment == supernode.environment
    assert superexec.command[-2:] == ["--parent-pid", "77"]
    port = supernode.command[supernode.command.index("--port") + 1]
    assert f"127.0.0.1:{port}" in superexec.command


def test_a_supernode_does_not_stay_without_a_superexec(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")

    def fail(self: Ending, *arguments: Any) -> None:
        begin(self, *arguments)
        self.ended = False
        if self.name == "flower-superexec":
            raise RunError("flower-superexec: cannot be started")

    begin = Ending.__init__
    monkeypatch.setattr(Ending, "__init__", fail)
    with pytest.raises(RunError, match="cannot be started"):
        site.start(own.bundle("north"), "north", images, {}, print)
    assert [process.ended for process in supernodes(started)] == [True]


def test_a_path_that_leads_around_the_guard_starts_nothing(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    around = {"PATH": str(Path(sys.executable).parent)}
    with pytest.raises(RunError, match="the guard is not what would be started"):
        site.start(own.bundle("north"), "north", images, {}, print, environment=around)
    assert started == []


@pytest.mark.parametrize("earlier", [False, True])
def test_others_cannot_look_into_what_a_site_keeps(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    answer(monkeypatch, "ok")
    state = own.bundle("north").state
    if earlier:
        state.mkdir(mode=0o755)
    modes: list[int] = []

    def look(*arguments: Any, **options: Any) -> CheckUp:
        modes.append(stat.S_IMODE(state.stat().st_mode))
        return check(*arguments, **options)

    monkeypatch.setattr(site, "check", look)
    site.start(own.bundle("north"), "north", images, {}, print)
    assert modes == [0o700]


def test_a_server_that_is_not_there_yet_is_waited_for(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "unreachable")
    shown: list[str] = []
    site.start(own.bundle("north"), "north", images, {}, shown.append)
    assert len(supernodes(started)) == 1
    assert any("keeps trying" in line for line in shown)


def test_a_wrong_server_is_never_spoken_to(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "untrusted")
    with pytest.raises(RunError, match="cannot join:\nthe server is untrusted"):
        site.start(own.bundle("north"), "north", images, {}, print)
    assert started == []


def test_a_problem_of_the_site_keeps_it_from_starting(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    own.bundle("north").key.chmod(0o644)
    with pytest.raises(RunError, match="chmod 600"):
        site.start(own.bundle("north"), "north", images, {}, print)
    assert started == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "cud"}, "engine.device: 'cud' was given"),
        ({"dp-epsilon": 0.5}, "dp-epsilon was given without clip-norm"),
        ({"dp-epsilon": 2.0, "clipping-norm": 1.0}, "dp-epsilon: 2.0 was given, expected at most 1"),
        ({"clipping-norm": -1.0}, "clip-norm: -1.0 was given"),
    ],
)
def test_options_that_would_fail_in_every_round_keep_a_site_from_starting(
    own: ServerFolder,
    images: Path,
    started: list[Ending],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    problem: str,
) -> None:
    answer(monkeypatch, "ok")
    with pytest.raises(ConfigError, match=problem):
        site.start(own.bundle("north"), "north", images, options, print)
    assert started == []


def test_a_site_is_not_started_twice_on_a_machine(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    bundle = own.bundle("north")
    bundle.state.mkdir()
    parent = os.getppid()
    noted = [{"pid": parent, "name": "feddure", "began": began(parent)}]
    bundle.running.write_text(json.dumps(noted))
    with pytest.raises(RunError, match=f"site north runs on this machine already.*`kill {parent}`"):
        site.join(bundle, "north", images, {}, print)
    assert started == []
    assert json.loads(bundle.running.read_text()) == noted


def test_a_link_to_nothing_is_left_out_as_in_the_check(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    (images / "unlabelled" / "broken.png").symlink_to("nowhere.png")
    assert check(own.bundle("north"), "north", images, connect=False).passed
    site.start(own.bundle("north"), "north", images, {}, print)
    assert len(supernodes(started)) == 1


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(site.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(site.time, "sleep", self.pass_by)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_a_site_that_is_turned_away_tries_again_for_a_while(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    clock = Clock(monkeypatch)
    shown: list[str] = []
    with pytest.raises(RunError, match=r"exit code 1.*does not know the key.*runs elsewhere already"):
        site.join(own.bundle("north"), "north", images, {}, shown.append)
    assert clock.now > 60  # longer than the server counts a crashed site as connected
    assert sum("an earlier start may still count" in line for line in shown) == len(supernodes(started)) - 1


def test_a_site_whose_superexec_ends_starts_anew_with_both(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    Clock(monkeypatch)
    begin = Ending.__init__

    def lose_the_superexec(self: Ending, *arguments: Any) -> None:
        begin(self, *arguments)
        self.ended = self.name == "flower-superexec"
        self.code = -9

    monkeypatch.setattr(Ending, "__init__", lose_the_superexec)
    shown: list[str] = []
    with pytest.raises(RunError, match=r"site north: flower-superexec ended by itself \(exit code -9\)"):
        site.join(own.bundle("north"), "north", images, {}, shown.append)
    assert len(started) == 2 * len(supernodes(started)) > 4
    assert all(supernode.ended for supernode in supernodes(started))
    assert any(line.startswith("flower-superexec ended (exit code -9)") for line in shown)


def test_a_site_that_crashes_after_hours_comes_back(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    clock = Clock(monkeypatch)

    def live(self: Together) -> Ending:
        clock.pass_by(10_000 if len(supernodes(started)) == 1 else 1)
        return supernodes(started)[-1]

    monkeypatch.setattr(Together, "wait", live)
    with pytest.raises(RunError, match="exit code 1"):
        site.join(own.bundle("north"), "north", images, {}, lambda line: None)
    assert len(supernodes(started)) > 4
