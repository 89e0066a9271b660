"""A site that joins: what it looks at first, and how it comes back after a crash."""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feddure.errors import ConfigError, RunError
from feddure.flower.deploy import certificates, site
from feddure.flower.deploy.check import CheckUp, check
from feddure.flower.deploy.connection import Reached
from feddure.flower.deploy.layout import Bundle, ServerFolder
from feddure.flower.deploy.processes import Together, began


class Ending:
    """Stands for a SuperNode that the server turns away, or for its SuperExec, which ends when it is told to."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path | None, folder: Path) -> None:
        self.command, self.environment, self.folder = command, environment, folder
        self.name, self.code = Path(command[0]).name, 1
        self.popen = SimpleNamespace(pid=77)
        self.ended = self.name == "flower-supernode"
        self.log = log

    def last_words(self) -> str:
        return f"the last words of {self.name}"

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


def every_supernode_ends(monkeypatch: pytest.MonkeyPatch, text: str, code: int, server: str = "ok") -> Clock:
    """Let every SuperNode write this to its log and end with this code, while a server answers so."""
    answer(monkeypatch, server)
    begin = Ending.__init__

    def speak(self: Ending, *arguments: Any) -> None:
        begin(self, *arguments)
        self.code = code
        if self.name == "flower-supernode":
            assert self.log is not None
            with self.log.open("a") as file:
                file.write(text)

    monkeypatch.setattr(Ending, "__init__", speak)
    return Clock(monkeypatch)


ELSEWHERE = (
    "\x1b[91mERROR\x1b[0m :     Exit Code: 305\nFailed to initialize.\n[code: 9] Failed to activate SuperNode.\n"
)
SILENT = "\x1b[92mINFO \x1b[0m:      SuperNode terminated gracefully.\n"


def test_a_site_that_counts_as_connected_tries_again_for_a_while(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = every_supernode_ends(monkeypatch, ELSEWHERE, 1)
    shown: list[str] = []
    with pytest.raises(RunError, match=r"counts north as connected already.*\n.*last words of flower-supernode"):
        site.join(own.bundle("north"), "north", images, {}, shown.append)
    assert clock.now > 60  # longer than the server counts a crashed site as connected
    assert sum("an earlier start may still count" in line for line in shown) == len(supernodes(started)) - 1
    assert not any("Exit Code" in line for line in shown)


def test_a_key_that_the_server_does_not_know_is_told_at_the_site(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "clock_problem", lambda *_: "")
    every_supernode_ends(monkeypatch, SILENT, 0)
    bundle = own.bundle("north")
    with pytest.raises(RunError) as problem:
        site.join(bundle, "north", images, {}, print)
    said = str(problem.value)
    key = certificates.fingerprint(certificates.read_public_key(bundle.public_key))
    assert "turned this site away: it does not know its key" in said
    assert f"given:    {bundle.key}, {key}" in said
    assert "server/nodes/north.pub" in said
    assert len(supernodes(started)) == 1  # another attempt would end in the same way
    assert "south" not in said
    assert bundle.key.read_text().splitlines()[1] not in said


def test_a_supernode_that_somebody_ended_is_not_taken_for_a_wrong_key(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    every_supernode_ends(monkeypatch, SILENT, 0, server="unreachable")
    with pytest.raises(RunError, match=r"flower-supernode ended by itself \(exit code 0\)"):
        site.join(own.bundle("north"), "north", images, {}, lambda line: None)


def test_a_wrong_clock_is_not_taken_for_a_wrong_key(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "clock_problem", lambda *_: "this machine's clock is 60 seconds behind")
    every_supernode_ends(monkeypatch, SILENT, 0)
    with pytest.raises(RunError, match="turned this site away: this machine's clock is 60 seconds behind"):
        site.join(own.bundle("north"), "north", images, {}, lambda line: None)
    assert len(supernodes(started)) > 4  # a clock may be set meanwhile


def test_a_supernode_that_had_joined_and_ended_is_started_again(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    every_supernode_ends(monkeypatch, f"INFO :      SuperNode ID: 7\n{SILENT}", 0)
    with pytest.raises(RunError, match=r"flower-supernode ended by itself \(exit code 0\)"):
        site.join(own.bundle("north"), "north", images, {}, lambda line: None)
    assert len(supernodes(started)) > 4


def test_flowers_logs_and_commands_go_to_files_unless_asked_for(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    every_supernode_ends(monkeypatch, ELSEWHERE, 1)
    bundle = own.bundle("north")
    for verbose in (False, True):
        shown: list[str] = []
        with pytest.raises(RunError):
            site.join(bundle, "north", images, {}, shown.append, verbose)
        assert str(bundle.supernode_log) in shown[0]
        assert any(line.startswith("$ flower-supernode") for line in shown) is verbose
        assert any("Failed to initialize." in line for line in shown) is verbose
    assert {process.log for process in started} == {bundle.supernode_log, bundle.superexec_log}


def test_a_long_log_begins_anew_and_the_one_before_stays(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    Clock(monkeypatch)
    monkeypatch.setattr(site, "_LOG_BYTES", 10)
    bundle = own.bundle("north")
    bundle.state.mkdir()
    bundle.supernode_log.write_text("what was said long ago")
    with pytest.raises(RunError):
        site.join(bundle, "north", images, {}, print)
    assert not bundle.supernode_log.exists()
    assert (bundle.state / "supernode.old.log").read_text() == "what was said long ago"


def test_unreadable_files_are_named_at_the_start(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    for number in range(12):
        (images / "unlabelled" / f"broken-{number:02}.png").write_bytes(b"no image")
    shown: list[str] = []
    site.start(own.bundle("north"), "north", images, {}, shown.append)
    named = [line for line in shown if "broken-" in line]
    assert len(named) == 10
    assert any("and 2 more" in line for line in shown)


def test_the_depth_of_a_sites_images_reaches_its_client_app(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(images / "unlabelled" / "deep.png")
    shown: list[str] = []
    site.start(own.bundle("north"), "north", images, {"depth": 10}, shown.append)
    assert "depth=10" in started[0].command[-1]
    assert any("deep.png: has pixels up to 4095, but depth=10 was given" in line for line in shown)


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
    with pytest.raises(
        RunError, match=r"site north does not stay .*: flower-superexec ended by itself \(exit code -9\)"
    ):
        site.join(own.bundle("north"), "north", images, {}, shown.append)
    assert len(started) == 2 * len(supernodes(started)) > 4
    assert all(supernode.ended for supernode in supernodes(started))
    assert any(line.startswith("flower-superexec ended by itself (exit code -9)") for line in shown)


def test_a_site_that_crashes_after_hours_comes_back(
    own: ServerFolder, images: Path, started: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ok")
    clock = Clock(monkeypatch)

    def live(self: Together, meanwhile: Callable[[], None]) -> Ending:
        clock.pass_by(10_000 if len(supernodes(started)) == 1 else 1)
        return supernodes(started)[-1]

    monkeypatch.setattr(Together, "wait", live)
    with pytest.raises(RunError, match="exit code 1"):
        site.join(own.bundle("north"), "north", images, {}, lambda line: None)
    assert len(supernodes(started)) > 4
