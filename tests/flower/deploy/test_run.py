"""What a run is asked for, what is remembered of it, what stands in its way, and how its end is told."""

import json
import signal
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from feddure import experiments
from feddure.errors import FeddureError, RunError
from feddure.flower.app import CLIENT_APP, run_config
from feddure.flower.deploy import run, status
from feddure.flower.deploy.control import Control, RunState, SiteStatus
from feddure.flower.deploy.processes import Terminated
from feddure.flower.deploy.run import RunEntry
from feddure.simulation.runs import FAILURE_FILE


class Flower:
    """Stands for a SuperLink: its runs, what was asked of it, and how the run that is started there goes."""

    def __init__(self, folder, agreed, monkeypatch):
        self.folder, self.agreed, self.place = folder, agreed, folder.runs / "a"
        self.states, self.asked, self.stopped, self.shown = [], [], [], []
        self.during = lambda: None  # what happens while the run is watched
        self.ends = iter(())
        monkeypatch.setattr(run, "is_listening", lambda *_: True)
        monkeypatch.setattr(status, "is_listening", lambda *_: True)
        monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(run, "_stream", lambda *_: self.during())
        monkeypatch.setattr(Control, "start", lambda _, options: self.start(options))
        monkeypatch.setattr(Control, "stop", lambda _, number: self.stop(number))
        monkeypatch.setattr(Control, "runs", lambda _, number=None: self.runs(number))

    def start(self, options):
        self.asked.append(options)
        return "7"

    def stop(self, number):
        self.stopped.append(number)

    def runs(self, number):
        return list(self.states) if number is None else [RunState("7", next(self.ends), 1.0, "it broke")]

    def begin(self, done=0, **options):
        """Leave what a run leaves that was started with these options and did so many rounds."""
        self.place.mkdir(exist_ok=True)
        found = run_config.read(options | {"description": self.agreed.to_yaml()}).experiment
        (self.place / "config.yaml").write_text(experiments.to_yaml(found.model_copy(update={"unlabelled_batch": 7})))
        lines = [
            json.dumps({"round": 1 + number, "test": {"accuracy": 0.5, "macro_f1": 0.4}}) + "\n"
            for number in range(done)
        ]
        (self.place / "metrics.jsonl").write_text("".join(lines))

    def problem(self, **options):
        """The problem with which a run ends."""
        with pytest.raises(FeddureError) as problem:
            self.run(**options)
        return str(problem.value)

    def run(self, resume=False, **options):
        return run.run(self.folder, options_of(options), self.place, self.shown.append, resume)


@pytest.fixture
def flower(own, agreed, monkeypatch):
    return Flower(own, agreed, monkeypatch)


def options_of(given):
    return {key.replace("_", "-"): value for key, value in given.items()}


def interrupt():
    raise Terminated(signal.SIGINT)


# --- what stands in a run's way ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"settings": "modle=cnn"}, "unknown field 'modle'"),
        ({"test_folder": "nowhere"}, "nowhere: there is no such folder"),
        ({"method": "fedur"}, "did you mean 'feddure'"),
        ({"settings": "model=cn"}, "did you mean 'cnn'"),
        ({"dp_noise": 0.5}, "without clip-norm"),
        ({"dp_noise": 0.5, "clip_norm": 1.0}, "--set norm=group"),
        ({"minimum_sites": 7}, "the federation 'trees' has 2 sites"),
        ({"resume": True}, "no run is there to resume"),
    ],
)
def test_a_run_that_would_fail_is_not_started(flower, options, problem):
    assert problem in flower.problem(**options)
    assert flower.asked == run.read_run_index(flower.folder) == []


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("elms/1.png", "did you mean 'elm'"),
        ("1.png", "expected only folders here"),
        ("elm/.hidden", "no file is there"),
    ],
)
def test_a_wrong_test_folder_is_refused(flower, tmp_path, file, problem):
    path = tmp_path / "tests" / file
    path.parent.mkdir(parents=True)
    path.touch()
    assert problem in flower.problem(test_folder=str(tmp_path / "tests"))


def test_a_run_that_is_there_is_neither_overwritten_nor_resumed_with_other_options(flower):
    run.add_to_run_index(flower.folder, RunEntry("7", str(flower.place), {"rounds": 40}))
    flower.begin(done=3, rounds=40)
    assert "(--resume)" in flower.problem()
    assert "(rounds: 40 there, 60 given)" in flower.problem(resume=True, rounds=60)
    flower.states = [RunState("7", "running", 1.0)]
    assert "run 7 is still going on there" in flower.problem(resume=True)
    assert len(run.read_run_index(flower.folder)) == 1
    assert flower.asked == []


# --- how a run ends ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("begun", [True, False])
def test_a_crash_behind_a_clean_log_is_an_error(flower, begun):
    """How a run ended is read from Flower's list of runs, not from the log."""
    flower.ends = iter(["running", "finished:failed"])
    flower.during = flower.begin if begun else lambda: None
    problem = flower.problem(rounds=2)
    assert "run 7 did not complete (finished:failed: it broke)" in problem
    assert ("--resume" in problem) == begun
    kept = str(flower.folder.server)
    assert flower.asked == [{"rounds": 2, "run-folder": str(flower.place), "resume": False, "server-folder": kept}]


@pytest.mark.parametrize(("begun", "next_step"), [(True, "--resume"), (False, "feddure federate status")])
def test_a_server_that_goes_away_leaves_a_next_step(flower, begun, next_step):
    def runs(number):
        if number is not None:
            raise RunError("nobody answers")
        return []

    flower.runs = runs
    flower.during = flower.begin if begun else lambda: None
    problem = flower.problem()
    assert "the server went away" in problem
    assert next_step in problem


def test_resuming_asks_for_what_was_asked_before(flower):
    flower.ends = iter(["finished:stopped", "finished:stopped"])
    assert "finished:stopped" in flower.problem(method="fedavg", rounds=2)
    flower.begin(method="fedavg", rounds=2)
    assert "finished:stopped" in flower.problem(resume=True)
    assert flower.asked[1].items() >= {"method": "fedavg", "rounds": 2, "resume": True}.items()


def test_a_federation_of_another_version_runs_this_versions_app(flower):
    path = flower.folder.app / "pyproject.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text('[tool.flwr.app.config]\ndataset = "fashion-mini"\n')  # a key that went
    flower.ends = iter(["finished:stopped"])
    flower.problem()
    app = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]
    assert app["components"]["clientapp"] == CLIENT_APP
    assert run_config.read(app["config"]).description == flower.agreed


def test_a_log_cannot_reach_into_the_terminal(own, monkeypatch):
    flwr = own.root / "flwr"
    code = r"print('\x1b[92mINFO \x1b[0m: quiet'); print('site \x1b]0;title\x07\x1b[2Jnorth')"
    flwr.write_text(f"#!{sys.executable}\n{code}\n")
    flwr.chmod(0o755)
    monkeypatch.setattr(run, "program", lambda name: str(flwr))
    shown = []
    run._stream(Control(own), "7", shown.append)
    assert shown[1:] == ["site north"]


@pytest.mark.parametrize(
    ("answers", "lines"), [(("pending", "starting", "running"), 2), (("running",), 0), (("pending", None), 1)]
)
def test_a_run_that_does_not_begin_is_told_until_it_does(own, monkeypatch, answers, lines):
    """None is a server that is gone: whoever watches the run finds that too, and tells it."""
    left, seen, shown = iter(answers), threading.Event(), []

    def states(self, number):
        found = next(left)
        if found == answers[-1]:
            seen.set()
        if found is None:
            raise RunError("nobody answers")
        return [RunState(number, found, 0.0)]

    monkeypatch.setattr(Control, "runs", states)
    monkeypatch.setattr(run, "_START_SECONDS", 0.01)
    with run._reporting_delay(Control(own), "7", own, shown.append):
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "waiting")
        assert seen.wait(30)
        thread.join(30)
    assert not thread.is_alive()
    assert len(shown) == lines
    assert all(str(own.superexec_log) in line for line in shown)


# --- Ctrl-C -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("begun", [True, False])
def test_ctrl_c_stops_the_run(flower, begun):
    def during():
        if begun:
            flower.begin()
        interrupt()

    flower.during = during
    with pytest.raises(Terminated):
        flower.run()
    assert flower.stopped == ["7"]
    assert any("--resume" in line for line in flower.shown) is begun


def test_ctrl_c_while_a_run_is_handed_in_stops_only_the_new_one(flower):
    flower.states = [RunState("1", "running", 1.0)]

    def start(options):
        run.add_to_run_index(flower.folder, RunEntry("2", "/of/somebody/else", {}))
        flower.states += [RunState("2", "running", 1.0), RunState("3", "running", 1.0)]
        interrupt()

    flower.start = start
    with pytest.raises(Terminated):
        flower.run()
    assert flower.stopped == ["3"]


def test_where_nothing_can_be_stopped_the_end_stays_an_end(flower):
    def gone(number):
        raise RunError("the server is gone")

    flower.stop, flower.during = gone, interrupt
    with pytest.raises(Terminated):
        flower.run()
    assert any("the server is gone" in line for line in flower.shown)

    def start(options):
        flower.runs = gone
        interrupt()

    flower.start = start
    with pytest.raises(Terminated):
        flower.run()
    assert "a run may have been started" in flower.shown[-1]


# --- the index of runs, and status ------------------------------------------------------------------------
def test_an_index_that_is_damaged_or_knows_nothing_of_a_run_is_named(own):
    with pytest.raises(RunError, match="/b: not a run of this federation"):
        run.last_options(own, Path("/b"))
    own.run_index.write_text("[")
    with pytest.raises(RunError, match=r"runs\.json: cannot be read"):
        run.read_run_index(own)


def test_status_joins_what_flower_and_the_folders_know(flower, monkeypatch):
    flower.begin(done=2)
    run.add_to_run_index(flower.folder, RunEntry("7", str(flower.place), {}))
    monkeypatch.setattr(Control, "sites", lambda self: [SiteStatus("south", "online", "noon", "1")])
    (flower.place / FAILURE_FILE).write_text('{"error": "the disk is full"}')
    flower.states = [RunState("8", "pending", 0.0), RunState("7", "finished:failed", 9.0)]
    found = status.read_status(flower.folder)
    assert [(site.site, site.status) for site in found.sites] == [("north", "unregistered"), ("south", "online")]
    known = [(each.run, each.round, each.metrics, each.failure) for each in found.runs]
    measured = {"accuracy": 0.5, "macro_f1": 0.4}
    assert known == [("8", None, {}, ""), ("7", 2, measured, "the disk is full")]
    run.add_to_run_index(flower.folder, RunEntry("9", str(flower.place), {}))  # started again: it is not over yet
    assert status.read_status(flower.folder).runs[1].failure == ""
