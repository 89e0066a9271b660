"""What a run is asked for, what is remembered of it, and what stands in its way."""

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from feddure.errors import ConfigError, RunError
from feddure.flower.app import run_config
from feddure.flower.app.description import Description
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import run, status
from feddure.flower.deploy.control import Control, Node, RunState
from feddure.flower.deploy.layout import ServerFolder, Settings, write_settings
from feddure.flower.deploy.processes import Terminated, free_port
from feddure.flower.deploy.run import Options


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a server ran."""
    monkeypatch.setattr(run, "is_listening", lambda *_: True)
    monkeypatch.setattr(status, "is_listening", lambda *_: True)


def begin(place: Path, agreed: Description, done: int = 0, **options: object) -> None:
    """Leave what a run leaves that was started with these options and did so many rounds."""
    place.mkdir(exist_ok=True)
    found = run_config.read(options | {"description": agreed.to_yaml()}).experiment
    (place / "config.yaml").write_text(found.model_copy(update={"unlabelled_batch": 7}).to_yaml())
    (place / "metrics.jsonl").write_text("".join(json.dumps({"round": 1 + number}) + "\n" for number in range(done)))


def test_options_are_what_the_app_knows(tmp_path: Path) -> None:
    options = Options(
        method="feddure",
        rounds=3,
        seed=1,
        preset="demo",
        sets=("model=cnn", "options={a: 1}"),
        tests=ImageFolder(tmp_path, 12),
        minimum_sites=2,
        wait_seconds=5.0,
        clip_norm=1.0,
        dp_epsilon=0.5,
        dp_delta=1e-6,
    )
    found = run_config.read(options.run_config())
    assert (found.experiment.method, found.experiment.rounds, found.experiment.seed) == ("feddure", 3, 1)
    assert (found.experiment.model, found.experiment.options) == ("cnn", {"a": 1})
    assert (found.tests, found.minimum_sites, found.wait_seconds) == (ImageFolder(tmp_path, 12), 2, 5.0)
    assert (found.clipping_norm, found.dp_epsilon, found.dp_delta) == (1.0, 0.5, 1e-6)


def test_what_is_not_asked_for_is_left_to_the_app() -> None:
    assert Options().run_config() == {}


def test_without_a_server_a_run_says_how_to_start_one(own: ServerFolder) -> None:
    write_settings(own, Settings("127.0.0.1", free_port(), True))
    with pytest.raises(RunError, match=r"no server runs on this machine.*feddure federate server"):
        run.run(own, Options(), own.runs / "a", print)


@pytest.mark.usefixtures("answering")
class TestRefusals:
    def test_a_mistake_in_the_options_starts_no_run(self, own: ServerFolder) -> None:
        with pytest.raises(ConfigError, match="unknown field 'modle'"):
            run.run(own, Options(sets=("modle=cnn",)), own.runs / "a", print)
        assert run.read_run_index(own) == []

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (Options(tests=ImageFolder(Path("nowhere"))), r"--test .*nowhere: there is no such folder"),
            (Options(method="fedur"), "method 'fedur'.*did you mean 'feddure'"),
            (Options(sets=("model=cn",)), "model 'cn'.*did you mean 'cnn'"),
            (Options(dp_epsilon=0.5), "dp-epsilon was given without clip-norm"),
            (Options(dp_epsilon=0.5, clip_norm=1.0), "--dp-epsilon: batch-norm statistics.*--set norm=group"),
            (Options(dp_epsilon=2.0, clip_norm=1.0), "dp-epsilon: 2.0 was given, expected at most 1"),
            (Options(minimum_sites=7), "--minimum-sites 7: the federation 'trees' has 2 sites"),
        ],
    )
    def test_a_run_that_would_fail_is_not_handed_in(
        self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch, options: Options, problem: str
    ) -> None:
        monkeypatch.setattr(Control, "runs", lambda self: [])
        monkeypatch.setattr(Control, "start", lambda self, options: pytest.fail("a run was handed in"))
        with pytest.raises(ConfigError, match=problem):
            run.run(own, options, own.runs / "a", print)

    @pytest.mark.parametrize(
        ("file", "problem"),
        [
            ("elms/1.png", "'elms' is no folder of a class.*did you mean 'elm'"),
            ("1.png", "'1.png' is no folder of a class"),
            ("elm/.hidden", "no file is there"),
        ],
    )
    def test_a_wrong_test_folder(self, own: ServerFolder, tmp_path: Path, file: str, problem: str) -> None:
        path = tmp_path / "tests" / file
        path.parent.mkdir(parents=True)
        path.touch()
        with pytest.raises(ConfigError, match=f"--test .*tests: {problem}"):
            run.run(own, Options(tests=ImageFolder(tmp_path / "tests")), own.runs / "a", print)

    def test_a_run_that_is_there_already(self, own: ServerFolder, agreed: Description) -> None:
        begin(own.runs / "a", agreed)
        with pytest.raises(RunError, match="add --resume"):
            run.run(own, Options(), own.runs / "a", print)

    def test_a_run_is_not_resumed_with_other_options(
        self, own: ServerFolder, agreed: Description, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = own.runs / "a"
        run.add_to_run_index(own, run.RunEntry("7", str(place), {"rounds": 40}))
        begin(place, agreed, done=3, rounds=40)
        monkeypatch.setattr(Control, "runs", lambda self: [])
        with pytest.raises(RunError, match=r"\(rounds: 40 there, 60 given\); resume without those options"):
            run.run(own, Options(resume=True, rounds=60), place, print)
        assert len(run.read_run_index(own)) == 1
        asked: list[dict] = []

        def start(self: Control, options: dict) -> str:
            asked.append(options)
            raise RunError("handed in")

        monkeypatch.setattr(Control, "start", start)
        with pytest.raises(RunError, match="handed in"):
            run.run(own, Options(resume=True), place, print)
        assert asked == [{"rounds": 40, "run-folder": str(place), "resume": True}]

    def test_nothing_to_resume(self, own: ServerFolder) -> None:
        with pytest.raises(RunError, match="no run is there to resume"):
            run.run(own, Options(resume=True), own.runs / "a", print)


@pytest.mark.usefixtures("answering")
class TestEnds:
    """A run that Flower started; how it ended is read from its list of runs, not from the log."""

    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
        found: list[dict] = []
        monkeypatch.setattr(Control, "start", lambda self, options: found.append(options) or "7")
        monkeypatch.setattr(run, "_stream", lambda *_: None)
        monkeypatch.setattr(Control, "runs", lambda self, number=None: [])
        return found

    def end(self, monkeypatch: pytest.MonkeyPatch, *statuses: str) -> None:
        answers = iter(statuses)

        def states(self: Control, number: str | None = None) -> list[RunState]:
            return [RunState("7", next(answers), 1.0, "it broke")] if number else []

        monkeypatch.setattr(Control, "runs", states)
        monkeypatch.setattr(run.time, "sleep", lambda seconds: None)

    @pytest.mark.parametrize("begun", [True, False])
    def test_a_crash_behind_a_clean_log_is_an_error(
        self,
        own: ServerFolder,
        agreed: Description,
        started: list[dict],
        monkeypatch: pytest.MonkeyPatch,
        begun: bool,
    ) -> None:
        self.end(monkeypatch, "running", "finished:failed")
        if begun:
            monkeypatch.setattr(run, "_stream", lambda *_: begin(own.runs / "a", agreed))
        expected = r"run 7 did not complete \(finished:failed: it broke\).*flwr log 7"
        with pytest.raises(RunError, match=expected) as problem:
            run.run(own, Options(rounds=2), own.runs / "a", print)
        assert ("--resume" in str(problem.value)) == begun
        assert started == [{"rounds": 2, "run-folder": str(own.runs / "a"), "resume": False}]

    def test_a_run_whose_program_was_ended_says_where_to_look(
        self, own: ServerFolder, started: list[dict], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def states(self: Control, number: str | None = None) -> list[RunState]:
            return [RunState("7", "finished:failed", 1.0, "Task failed with unknown error.")] if number else []

        monkeypatch.setattr(Control, "runs", states)
        with pytest.raises(RunError, match=r"finished:failed: its program was ended; the server's terminal says why"):
            run.run(own, Options(), own.runs / "a", print)

    @pytest.mark.parametrize(
        ("begun", "next_step"),
        [(True, "go on with: .* --resume"), (False, "see whether the run begins by itself: feddure federate status")],
    )
    def test_a_server_that_goes_away_leaves_a_next_step(
        self, own: ServerFolder, started: list[dict], monkeypatch: pytest.MonkeyPatch, begun: bool, next_step: str
    ) -> None:
        place = own.runs / "a"

        def states(self: Control, number: str | None = None) -> list[RunState]:
            if number is None:
                return []
            if begun:
                place.mkdir()
                (place / "config.yaml").write_text("")
            raise RunError("nobody answers")

        monkeypatch.setattr(Control, "runs", states)
        expected = rf"run 7: the server went away; once it is back, {next_step}.*\nnobody answers"
        with pytest.raises(RunError, match=expected):
            run.run(own, Options(), place, print)

    def test_resuming_asks_for_what_was_asked_before(
        self, own: ServerFolder, agreed: Description, started: list[dict], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = own.runs / "a"
        self.end(monkeypatch, "finished:stopped", "finished:stopped")
        with pytest.raises(RunError, match="finished:stopped"):
            run.run(own, Options(method="fedavg", rounds=2), place, print)
        begin(place, agreed, method="fedavg", rounds=2)
        with pytest.raises(RunError, match="finished:stopped"):
            run.run(own, Options(resume=True), place, print)
        assert started[1] == {"method": "fedavg", "rounds": 2, "run-folder": str(place), "resume": True}


class TestWaiting:
    """What is said of a run that nobody begins."""

    def watch(self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch, *answers: str | None) -> list[str]:
        """What is shown while the run is in these states, one after the other; None is a server that is gone."""
        left, seen, shown = iter(answers), threading.Event(), []

        def states(self: Control, number: str) -> list[RunState]:
            status = next(left)
            if status == answers[-1]:
                seen.set()
            if status is None:
                raise RunError("nobody answers")
            return [RunState(number, status, 0.0)]

        monkeypatch.setattr(Control, "runs", states)
        monkeypatch.setattr(run, "_START_SECONDS", 0.01)
        with run._reporting_delay(Control(own), "7", own, shown.append):
            (thread,) = (thread for thread in threading.enumerate() if thread.name == "waiting")
            assert seen.wait(30)
            thread.join(30)
        assert not thread.is_alive()
        return shown

    def test_it_is_told_until_the_run_begins(self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        shown = self.watch(own, monkeypatch, "pending", "starting", "running")
        assert [line.split("(")[1].split(")")[0] for line in shown] == ["pending", "starting"]
        assert shown[0].startswith("run 7 has not begun after 0 seconds")
        assert "flower-superexec" in shown[0]
        assert str(own.superexec_log) in shown[0]

    def test_a_run_that_begins_needs_no_word(self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.watch(own, monkeypatch, "running") == []

    def test_a_server_that_is_gone_is_left_to_others_to_tell(
        self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert len(self.watch(own, monkeypatch, "pending", None)) == 1

    def test_with_the_end_of_the_watch_the_words_end(self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Control, "runs", lambda self, number: [RunState(number, "pending", 0.0)])
        monkeypatch.setattr(run, "_START_SECONDS", 0.01)
        told = threading.Event()
        with run._reporting_delay(Control(own), "7", own, lambda line: told.set()):
            (thread,) = (thread for thread in threading.enumerate() if thread.name == "waiting")
            assert told.wait(30)
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.usefixtures("answering")
class TestCtrlC:
    """What a run that was started here leaves at the SuperLink."""

    @pytest.fixture
    def stopped(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        found: list[str] = []
        monkeypatch.setattr(Control, "stop", lambda self, number: found.append(number))
        return found

    def interrupted(self, own: ServerFolder, stream: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What is shown of a run that is interrupted while it is watched."""
        monkeypatch.setattr(Control, "runs", lambda self: [])
        monkeypatch.setattr(Control, "start", lambda self, options: "7")
        monkeypatch.setattr(run, "_stream", stream)
        shown: list[str] = []
        with pytest.raises(Terminated):
            run.run(own, Options(), own.runs / "a", shown.append)
        return shown

    def test_while_it_is_watched_the_run_is_stopped(
        self, own: ServerFolder, stopped: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown = self.interrupted(own, ended, monkeypatch)
        assert stopped == ["7"]
        assert not any("--resume" in line for line in shown)

    def test_a_run_that_had_begun_can_be_gone_on_with(
        self, own: ServerFolder, agreed: Description, stopped: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stream(*_: object) -> None:
            begin(own.runs / "a", agreed)
            raise Terminated(signal.SIGINT)

        shown = self.interrupted(own, stream, monkeypatch)
        assert shown[-1].startswith("go on with: feddure federate run")

    def test_while_it_is_handed_in_only_the_new_run_is_stopped(
        self, own: ServerFolder, stopped: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = ["1"]
        monkeypatch.setattr(Control, "runs", lambda self: [RunState(number, "running", 1.0) for number in known])

        def start(self: Control, options: dict) -> str:
            run.add_to_run_index(own, run.RunEntry("2", "/of/somebody/else", {}))
            known.extend(["2", "3"])
            raise Terminated(signal.SIGINT)

        monkeypatch.setattr(Control, "start", start)
        with pytest.raises(Terminated):
            run.run(own, Options(), own.runs / "a", print)
        assert stopped == ["3"]

    def test_a_run_that_cannot_be_stopped_is_told_and_the_end_stays_an_end(
        self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: Control, number: str) -> None:
            raise RunError("the server is gone")

        monkeypatch.setattr(Control, "runs", lambda self: [])
        monkeypatch.setattr(Control, "start", lambda self, options: "7")
        monkeypatch.setattr(Control, "stop", fail)
        monkeypatch.setattr(run, "_stream", ended)
        shown: list[str] = []
        with pytest.raises(Terminated):
            run.run(own, Options(), own.runs / "a", shown.append)
        assert "run 7 could not be stopped: the server is gone" in shown

    def test_a_server_that_is_gone_is_told_and_the_end_stays_an_end(
        self, own: ServerFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = iter([[]])

        def runs(self: Control) -> list[RunState]:
            for answer in answers:
                return answer
            raise RunError("the server is gone")

        monkeypatch.setattr(Control, "runs", runs)
        monkeypatch.setattr(Control, "start", ended)
        shown: list[str] = []
        with pytest.raises(Terminated):
            run.run(own, Options(), own.runs / "a", shown.append)
        assert "a run may have been started" in shown[-1]


def ended(*_: object) -> None:
    raise Terminated(signal.SIGINT)


@pytest.mark.usefixtures("answering")
def test_a_run_that_is_still_going_on_is_not_resumed(
    own: ServerFolder, agreed: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = own.runs / "a"
    begin(place, agreed)
    run.add_to_run_index(own, run.RunEntry("7", str(place), {}))
    monkeypatch.setattr(Control, "runs", lambda self: [RunState("7", "running", 1.0)])
    monkeypatch.setattr(Control, "start", lambda self, options: pytest.fail("a second run was started"))
    with pytest.raises(RunError, match=r"run 7 is still going on there \(running\).*flwr stop 7 federation"):
        run.run(own, Options(resume=True), place, print)


def test_a_log_cannot_reach_into_the_terminal(own: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    code = r"print('\x1b[92mINFO \x1b[0m: quiet'); print('site \x1b]0;title\x07\x1b[2Jnorth')"
    flwr = own.root / "flwr"
    flwr.write_text(f"#!{sys.executable}\n{code}\n")
    flwr.chmod(0o755)
    monkeypatch.setattr(run, "program", lambda name: str(flwr))
    shown: list[str] = []
    run._stream(Control(own), "7", shown.append)
    assert shown[1:] == ["site north"]


def test_a_new_run_folder_is_one_that_is_not_there(own: ServerFolder) -> None:
    assert run.default_run_folder(own, "feddure") == own.runs / "feddure"
    (own.runs / "feddure").mkdir()
    assert run.default_run_folder(own, "feddure") == own.runs / "feddure-2"


def test_the_ledger_keeps_every_start(own: ServerFolder) -> None:
    first, second = run.RunEntry("1", "/a", {"rounds": 1}), run.RunEntry("2", "/a", {"rounds": 2})
    run.add_to_run_index(own, first)
    run.add_to_run_index(own, second)
    assert run.read_run_index(own) == [first, second]
    assert run.last_options(own, Path("/a")) == {"rounds": 2}
    with pytest.raises(RunError, match="/b: not a run of this federation"):
        run.last_options(own, Path("/b"))
    own.run_index.write_text("[")
    with pytest.raises(RunError, match=r"runs\.json: cannot be read"):
        run.read_run_index(own)


@pytest.mark.parametrize(
    ("rounds", "starts", "expected"),
    [
        (40, [("first", 0), ("second", 20), ("did nothing", 40)], "second"),
        (20, [("first", 0), ("did nothing", 20), ("neither", 20)], "first"),
        (0, [("removed", 0), ("removed too", 20), ("again from nothing", 0)], "again from nothing"),
    ],
)
def test_resuming_goes_by_the_last_start_that_did_a_round(
    own: ServerFolder, agreed: Description, rounds: int, starts: list[tuple[str, int]], expected: str
) -> None:
    begin(own.runs / "a", agreed, rounds)
    for name, before in starts:
        run.add_to_run_index(own, run.RunEntry(name, str(own.runs / "a"), {"named": name}, before))
    assert run.last_options(own, own.runs / "a") == {"named": expected}


def test_status_joins_what_flower_and_the_folders_know(
    own: ServerFolder, answering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = own.runs / "a"
    place.mkdir()
    lines = [{"round": 1, "test": {"accuracy": 0.5}}, {"round": 2}]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.add_to_run_index(own, run.RunEntry("7", str(place), {}))
    monkeypatch.setattr(Control, "nodes", lambda self: [Node("south", "1", "online", "noon")])
    monkeypatch.setattr(Control, "runs", lambda self: [RunState("8", "pending", 0.0), RunState("7", "running", 9.0)])
    found = status.read_status(own)
    assert found.running
    assert [(site.site, site.status, site.since) for site in found.sites] == [
        ("north", "unregistered", ""),
        ("south", "online", "noon"),
    ]
    assert [(each.run, each.status, each.round, each.accuracy) for each in found.runs] == [
        ("8", "pending", None, None),
        ("7", "running", 2, 0.5),
    ]


def test_status_without_a_server_says_so(own: ServerFolder) -> None:
    write_settings(own, Settings("127.0.0.1", free_port(), True))
    found = status.read_status(own)
    assert (found.running, found.sites, found.runs) == (False, [], [])
