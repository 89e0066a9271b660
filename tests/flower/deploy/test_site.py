"""A site that joins: what it looks at first, how it comes back after a crash, and what its operator sees."""

import itertools
import json
import os
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from flwr.common.config import parse_config_args

from feddure.environment import began_at
from feddure.errors import ConfigError, RunError
from feddure.files import parse_yaml
from feddure.flower.app.policy import Answers
from feddure.flower.app.sanitize import LOG_MARK, log, log_prefix
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import certificates, site
from feddure.flower.deploy.check import Reachability
from feddure.flower.deploy.layout import Bundle, Connection
from feddure.flower.deploy.processes import ProcessGroup
from feddure.flower.deploy.site import LogFilter

ELSEWHERE = (
    "\x1b[91mERROR\x1b[0m :     Exit Code: 305\nFailed to initialize.\n[code: 9] Failed to activate SuperNode.\n"
)
SILENT = "\x1b[92mINFO \x1b[0m:      SuperNode terminated gracefully.\n"


class Ending:
    """Stands for a SuperNode that ends at once, or for its SuperExec, which ends when it is told to."""

    def __init__(self, command, environment, log, folder, name=""):
        self.command, self.environment, self.log, self.folder = command, environment, log, folder
        self.name, self.code = name or Path(command[0]).name, 1
        self.popen = SimpleNamespace(pid=77)
        self.ended = self.name == "flower-supernode"

    def log_tail(self):
        return f"the last lines of {self.name}"

    def shorten_log(self):
        pass

    def terminate(self):
        pass

    def stop(self):
        self.ended = True


class North:
    """A site whose processes are stand-ins, before a server that answers as it is told; time passes by sleeping."""

    def __init__(self, bundle, images, monkeypatch):
        self.bundle, self.images, self.shown = bundle, ImageFolder(images), []
        self.started, self.now, self.change = [], 0.0, lambda process: None
        self._patch = monkeypatch
        monkeypatch.setattr(site, "Process", self._start)
        monkeypatch.setattr(site.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(site.time, "sleep", self.sleep)
        self.server("ok")

    def server(self, outcome, clock=""):
        self._patch.setattr(site, "reach", lambda *_: Reachability(outcome, f"the server is {outcome}"))
        self._patch.setattr(site, "clock_problem", lambda *_: clock)

    def sleep(self, seconds):
        self.now += seconds

    def _start(self, *arguments):
        process = Ending(*arguments)
        self.change(process)
        self.started.append(process)
        return process

    def every_supernode_ends(self, text, code):
        def change(process):
            process.code = code
            if process.name == "flower-supernode":
                with process.log.open("a") as file:
                    file.write(text)

        self.change = change

    @property
    def supernodes(self):
        return [process for process in self.started if process.name == "flower-supernode"]

    def start(self, options=None, **more):
        return site.start(self.bundle, "north", self.images, options or {}, self.shown.append, **more)

    def join(self, verbose=False):
        """The problem with which joining ended."""
        with pytest.raises(RunError) as problem:
            site.join(self.bundle, "north", self.images, {}, self.shown.append, verbose)
        return str(problem.value)


@pytest.fixture
def north(own, images, monkeypatch):
    return North(own.bundle("north"), images, monkeypatch)


# --- the start --------------------------------------------------------------------------------------------
def test_a_supernode_knows_the_authority_its_key_and_its_images():
    bundle, way = Bundle(Path("/north")), Connection("north", "fed.example.org", 9092)
    images = ImageFolder(Path("/my images"), 12)
    command = site.supernode_command(bundle, way, images, 4000, {"device": "cpu", "clip-norm": 1.5})
    given = dict(itertools.pairwise(command))
    assert given["--superlink"] == "fed.example.org:9092"
    assert given["--root-certificates"] == "/north/ca.crt"
    assert given["--auth-supernode-private-key"] == "/north/node.key"
    assert (given["--host"], given["--isolation"]) == ("127.0.0.1", "process")
    assert "--insecure" not in command
    assert parse_config_args([given["--node-config"]]) == {
        "site": "north",
        "data": "/my images",
        "state": "/north/state",
        "description": "/north/federation.yaml",
        "depth": 12,
        "device": "cpu",
        "clip-norm": 1.5,
    }


def test_both_processes_start_behind_the_allowlist_and_away_from_the_operators_folder(north, own, monkeypatch):
    monkeypatch.chdir(own.root)
    north.bundle.state.mkdir(mode=0o755)
    bundle, north.bundle = north.bundle, Bundle(Path("sites/north"))
    north.start(more_environment={"OMP_NUM_THREADS": "1"})
    supernode, superexec = north.started
    assert supernode.environment == superexec.environment
    assert supernode.environment["PATH"].startswith(str(bundle.programs))
    assert supernode.environment["OMP_NUM_THREADS"] == "1"
    assert supernode.folder == superexec.folder == bundle.flower_home
    assert str(bundle.key) in supernode.command
    port = supernode.command[supernode.command.index("--port") + 1]
    assert f"127.0.0.1:{port}" in superexec.command
    assert superexec.command[-2:] == ["--parent-pid", "77"]
    assert list(bundle.cache.glob("pixels-*"))  # the first round finds them
    assert stat.S_IMODE(bundle.state.stat().st_mode) == 0o700


def test_a_supernode_does_not_stay_without_a_superexec(north):
    def change(process):
        process.ended = False
        if process.name == "flower-superexec":
            raise RunError("flower-superexec: cannot be started")

    north.change = change
    with pytest.raises(RunError, match="cannot be started"):
        north.start()
    assert [process.ended for process in north.supernodes] == [True]


@pytest.mark.parametrize(
    ("outcome", "options", "mode", "path", "problem"),
    [
        ("untrusted", {}, 0o600, None, "cannot join:\nthe server is untrusted"),
        ("ok", {}, 0o644, None, "chmod 600"),
        ("ok", {}, 0o600, str(Path(sys.executable).parent), "feddure's own is not what would be started"),
        ("ok", {"device": "cud"}, 0o600, None, "engine.device: 'cud' was given"),
        ("ok", {"dp-noise": 0.5}, 0o600, None, "without clip-norm"),
        ("ok", {"clip-norm": -1.0}, 0o600, None, "clip-norm: -1.0 was given"),
    ],
)
def test_what_keeps_a_site_from_starting(north, outcome, options, mode, path, problem):
    north.server(outcome)
    north.bundle.key.chmod(mode)
    with pytest.raises((RunError, ConfigError), match=problem):
        north.start(options, more_environment={"PATH": path} if path else None)
    assert north.started == []


def test_a_server_that_is_not_there_yet_is_waited_for(north):
    north.server("unreachable")
    north.start()
    assert len(north.supernodes) == 1


def test_a_site_is_not_started_twice_on_a_machine(north):
    north.bundle.state.mkdir()
    parent = os.getppid()
    noted = [{"pid": parent, "name": "feddure", "began": began_at(parent)}]
    north.bundle.pidfile.write_text(json.dumps(noted))
    assert f"`kill {parent}`" in north.join()
    assert north.started == []
    assert json.loads(north.bundle.pidfile.read_text()) == noted


# --- coming back ------------------------------------------------------------------------------------------
def test_a_site_that_counts_as_connected_tries_again_for_a_while(north):
    north.every_supernode_ends(ELSEWHERE, 1)
    problem = north.join()
    assert "counts north as connected already" in problem
    assert "the last lines of flower-supernode" in problem
    assert north.now > 60  # longer than the server counts a crashed site as connected
    assert not any("Exit Code" in line for line in north.shown)


def test_a_key_that_the_server_does_not_know_is_told_once_and_without_the_key(north):
    north.every_supernode_ends(SILENT, 0)
    problem = north.join()
    assert certificates.fingerprint(certificates.read_public_key(north.bundle.public_key)) in problem
    assert "server/nodes/north.pub" in problem
    assert "south" not in problem
    assert north.bundle.key.read_text().splitlines()[1] not in problem
    assert len(north.supernodes) == 1  # another attempt would end in the same way


@pytest.mark.parametrize(
    ("text", "server", "clock", "problem"),
    [
        (SILENT, "unreachable", "", r"flower-supernode ended by itself \(exit code 0\)"),
        (SILENT, "ok", "this machine's clock is 60 seconds behind", "turned this site away: this machine's clock"),
        (f"INFO :      SuperNode ID: 7\n{SILENT}", "ok", "", r"flower-supernode ended by itself \(exit code 0\)"),
    ],
)
def test_other_reasons_are_not_taken_for_a_wrong_key_and_tried_again(north, text, server, clock, problem):
    north.server(server, clock)
    north.every_supernode_ends(text, 0)
    assert re.search(problem, north.join())
    assert len(north.supernodes) > 4


def test_a_site_whose_superexec_ends_starts_anew_with_both(north):
    def change(process):
        process.ended = process.name == "flower-superexec"
        process.code = -9

    north.change = change
    assert "flower-superexec ended by itself (exit code -9)" in north.join()
    assert len(north.started) == 2 * len(north.supernodes) > 4
    assert all(supernode.ended for supernode in north.supernodes)


def test_a_site_that_crashes_after_hours_comes_back(north, monkeypatch):
    def live(self, *meanwhile):
        north.sleep(10_000 if len(north.supernodes) == 1 else 1)
        return north.supernodes[-1]

    monkeypatch.setattr(ProcessGroup, "wait", live)
    assert "exit code 1" in north.join()
    assert len(north.supernodes) > 4


def test_what_a_client_app_logs_is_shown(north, monkeypatch, capsys):
    def change(process):
        if process.name == "flower-superexec":
            monkeypatch.setenv(LOG_MARK, process.environment[LOG_MARK])
            log("round 1/3")
            process.log.write_text(capsys.readouterr().out)

    north.change = change
    north.join()
    assert any(line.endswith("  round 1/3") for line in north.shown)


def test_flowers_logs_and_commands_go_to_files_unless_asked_for(north):
    north.every_supernode_ends(ELSEWHERE, 1)
    for verbose in (False, True):
        north.shown.clear()
        north.join(verbose)
        assert any("deploy.supernode" in line for line in north.shown) is verbose
        assert any("Failed to initialize." in line for line in north.shown) is verbose
    assert {process.log for process in north.started} == {north.bundle.supernode_log, north.bundle.superexec_log}


# --- Flower's logs ----------------------------------------------------------------------------------------
class Filtered:
    """A filter with its two logs, and what it showed."""

    def __init__(self, folder, verbose=False):
        self.paths, self.raw = (folder / "supernode.log", folder / "superexec.log"), []
        self.filter = LogFilter(*self.paths, "fed.example.org:9092", self.raw.append, verbose)
        self.own = log_prefix(self.filter.mark)

    def log(self, supernode="", superexec=""):
        """Write to the logs, own: as feddure does; returns what is shown of it, without the time."""
        before = len(self.raw)
        for path, text in zip(self.paths, (supernode, superexec.replace("own: ", self.own)), strict=True):
            with path.open("ab") as file:
                file.write(text.encode())
        self.filter.update()
        return [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in self.raw[before:]]


@pytest.fixture
def filtered(tmp_path):
    return Filtered(tmp_path)


def info(text):
    return f"\x1b[92mINFO \x1b[0m:      {text}\n"


def error(text):
    return f"\x1b[91mERROR\x1b[0m :     {text}\n"


LOST = "\x1b[93mWARNING\x1b[0m :   Connection attempt failed, retrying in 0.46 seconds\n"
FOUND = info("Connection successful after 0.47 seconds and 2 tries.")


def test_a_log_that_begins_anew_is_read_on(filtered):
    assert len(filtered.log(info(100 * "word") + info("SuperNode ID: 77"))) == 1
    filtered.paths[0].write_bytes(b"")
    assert len(filtered.log(LOST)) == 1


def test_the_connection_is_shown_where_it_changes(filtered):
    (connected,) = filtered.log(info("Starting Flower SuperNode") + info("SuperNode ID: 77"))
    assert connected.startswith("connected to fed.example.org:9092")
    assert filtered.filter.joined
    (lost,) = filtered.log(LOST + LOST)
    assert lost.startswith("no connection")
    assert filtered.log(LOST) == []
    assert filtered.log(FOUND) == ["connected to fed.example.org:9092 again"]
    assert filtered.log(superexec=LOST + FOUND) == []  # the site's own processes looking for each other


def test_what_was_logged_before_is_not_shown_again(tmp_path):
    (tmp_path / "supernode.log").write_text(info("SuperNode ID: 77"))
    filtered = Filtered(tmp_path)
    assert filtered.log() == []
    assert not filtered.filter.joined


def test_lines_of_the_client_app_are_shown_whole_and_once_and_the_rest_is_not(filtered):
    line = "own: problem: refused\n"
    noise = "Successfully installed feddure-federation.\nleft out: jane-doe.png: broken\n"
    assert filtered.log(info("[RUN 7]"), noise + line + line) == ["problem: refused"]
    assert filtered.log(superexec="own: round 1/3: lo") == []
    assert filtered.log(superexec="ss 2.5\n" + line) == ["round 1/3: loss 2.5", "problem: refused"]


@pytest.mark.parametrize("text", ["Failed to receive message abc: full", "Failed to send message abc: full", "full"])
def test_errors_are_shown(filtered, text):
    (shown,) = filtered.log(error(text))
    assert "full" in shown


def test_a_servers_text_is_not_taken_for_feddures_own(filtered):
    """An error repeats it line by line: it could ask for approval in other words than the site's own."""
    forged = "feddure: problem: run 1 waits for your approval: what was agreed"
    with pytest.raises(yaml.YAMLError) as problem:
        parse_yaml(f"method: fedtutor\n{forged}")
    assert filtered.log(superexec=f"{problem.value}\n{forged}\n") == []


def test_logs_cannot_reach_into_the_terminal(filtered):
    assert filtered.log(superexec="own: problem \x1b]0;title\x07\x1b[2J\n") == ["problem"]


def test_one_word_at_the_terminal_approves_one_run(tmp_path):
    """A server that asks for a second run just before the operator answers the first gains nothing."""
    answers, shown = Answers(tmp_path), []
    answers.ask("a" * 32, "the run that was talked about")
    answers.ask("b" * 32, "another one")
    site.answer_waiting("y", answers, shown.append)
    assert len(answers.waiting()) == 2
    assert any("b" * 32 in line for line in shown)
    answers.answer("b" * 32, approved=False)
    site.answer_waiting("y", answers, shown.append)
    assert [entry["answer"] for entry in answers.read().values()] == [True, False]
