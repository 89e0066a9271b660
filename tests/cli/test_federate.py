"""`feddure federate` as operators see it."""

import json
import zipfile
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import federated
from feddure import experiments
from feddure.cli import federate
from feddure.cli.federate import show
from feddure.errors import ConfigError, FeddureError, RunError
from feddure.flower.app import description, run_config
from feddure.flower.app.audit import Audit, AuditLog
from feddure.flower.app.policy import Answers
from feddure.flower.app.registry import Registry
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import demo, server, status
from feddure.flower.deploy import run as runs
from feddure.flower.deploy import site as sites
from feddure.flower.deploy.check import CheckResult, Finding
from feddure.flower.deploy.control import SiteStatus
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import Terminated
from feddure.flower.deploy.status import RunStatus, Status
from feddure.simulation.server import ImageCounts

DESCRIBED = {"description": federated.DESCRIPTION.to_yaml()}
NO_AUDIT = Audit([], "", "", False)
COMMANDS = ("init", "renew", "check", "server", "site", "approve", "run", "status", "audit", "demo")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments, code=0):
    result = CliRunner().invoke(federate.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, FeddureError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def init(folder, *more):
    usual = ("--sites", "north,south", "--classes", "ash,elm", "--size", 8, "--channels", 1)
    return run("init", folder, *usual, "--server-address", "127.0.0.1:9", *more)


def write_images(root):
    for part in ("labelled/ash", "labelled/elm", "unlabelled"):
        (root / part).mkdir(parents=True)
        Image.fromarray(np.zeros((9, 9), np.uint8)).save(root / part / "1.png")
    return root


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example(command):
    assert f"feddure federate {command}" in run(command, "--help")


def test_init_says_what_to_hand_to_whom(tmp_path):
    said = init(tmp_path / "trees", "--mean", "0.4", "--std", "0.3")
    assert "sites/north.zip   hand this to north" in said
    assert "ca.key   take this off line" in said
    assert "397 days" in said
    found = description.read(tmp_path / "trees" / "federation.yaml")
    assert (found.name, found.mean, found.std, found.server.port) == ("trees", (0.4,), (0.3,), 9)


def test_check_draws_counts_names_files_and_fails_without_a_server(tmp_path):
    init(tmp_path / "trees")
    images = write_images(tmp_path / "images")
    (images / "labelled" / "ash" / "notes.txt").write_text("no image")
    with zipfile.ZipFile(tmp_path / "trees" / "sites" / "north.zip") as archive:
        archive.extractall(tmp_path)
    (tmp_path / "north" / "node.key").chmod(0o600)
    said = run("check", tmp_path / "north", "north", "--data", images, code=1)
    assert "█" in said
    assert "unreadable: labelled/ash/notes.txt" in said
    assert "127.0.0.1:9 refuses" in said
    assert "north cannot join yet" in said
    found = json.loads(run("check", tmp_path / "trees", "north", "--data", images, "--json", code=1))
    assert (found["labelled"], found["unlabelled"], found["passed"]) == ({"ash": 1, "elm": 1}, 1, False)


def test_status_and_run_need_the_server(tmp_path):
    init(tmp_path / "trees", "--control-port", 7)
    assert "the server does not run" in run("status", tmp_path / "trees", code=1)
    assert json.loads(run("status", tmp_path / "trees", "--json", code=1))["running"] is False
    with pytest.raises(RunError, match="feddure federate server"):
        run("run", tmp_path / "trees", "--rounds", 1)
    assert "run folder" not in CliRunner().invoke(federate.app, ["run", str(tmp_path / "trees")]).stdout
    with pytest.raises(ConfigError, match="--resume was given without --out"):
        run("run", tmp_path / "trees", "--resume")


def test_a_run_gets_its_options(tmp_path, monkeypatch):
    asked = []

    def start(folder, options, place, show, resume, round_number):
        asked.append((options, place, resume))
        raise RunError("enough")

    monkeypatch.setattr(runs, "run", start)
    init(tmp_path / "trees")
    given = ("--method", "fedavg", "--rounds", 3, "--set", "model=cnn", "--set", "options={a: 1}", "--clip-norm", 1.5)
    with pytest.raises(RunError, match="enough"):
        run("run", tmp_path / "trees", *given, "--test", f"folder:{tmp_path}?depth=12")
    ((options, place, resume),) = asked
    assert (place, resume) == (tmp_path / "trees" / "runs" / "fedavg", False)
    found = run_config.read(options | DESCRIBED)
    assert (found.experiment.method, found.experiment.rounds, found.experiment.model) == ("fedavg", 3, "cnn")
    assert (found.experiment.options, found.protection.clip_norm) == ({"a": 1}, 1.5)
    assert found.tests == ImageFolder(tmp_path, 12)

    assert (found.experiment.local_steps, found.experiment.server.weight) == (20, "labelled")  # what is not said

    with pytest.raises(RunError, match="enough"):
        run("run", tmp_path / "trees", "--rounds", 3)  # what we would use, where nobody says
    options, place, _ = asked[1]
    assert place == tmp_path / "trees" / "runs" / "fedtutor"
    found = run_config.read(options | DESCRIBED).experiment
    assert (found.method, found.server.weight, found.rounds) == ("fedtutor", "labelled", 3)

    with pytest.raises(RunError, match="enough"):
        run("run", tmp_path / "trees", "--preset", "demo", "--method", "fedavg")
    found = run_config.read(asked[2][0] | DESCRIBED).experiment
    assert (found.method, found.rounds) == ("fedavg", experiments.load("demo").rounds)


def test_a_site_gets_its_options(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sites, "join", lambda *given: asked.append((*given[:4], given[5])))
    init(tmp_path / "trees")
    run("site", tmp_path / "trees", "north", "--data", tmp_path, "--device", "cpu", "--dp-budget", 0.5)
    all_runs = ("--approve", "always")
    run("site", tmp_path / "trees", "north", "--data", f"folder:{tmp_path}?depth=12", "--verbose", *all_runs)
    bundle = ServerFolder(tmp_path / "trees").bundle("north")
    assert asked == [
        (bundle, "north", ImageFolder(tmp_path), {"device": "cpu", "dp-budget": 0.5, "approve": "ask"}, False),
        (bundle, "north", ImageFolder(tmp_path, 12), {"approve": "always"}, True),
    ]


@pytest.mark.parametrize(("number", "code"), [(2, 0), (15, 143)])
def test_ctrl_c_is_the_good_end_of_a_server(tmp_path, monkeypatch, number, code):
    def serve(*_):
        raise Terminated(number)

    monkeypatch.setattr(server, "serve", serve)
    run("server", tmp_path, code=code)


def test_what_others_say_cannot_reach_into_the_terminal(tmp_path, monkeypatch, capsys):
    nasty = "\x1b]0;title\x07[red]\x1b[2J"
    found = Status(
        "trees", "h:1", True, [SiteStatus("north", nasty, nasty)], [RunStatus("7", nasty, 1.0, "", None, None)]
    )
    show.show_status(found, tmp_path)
    show.show_check(CheckResult("north", [Finding("note", "images", nasty)], unreadable=[(nasty, nasty)]))
    monkeypatch.setattr(server, "serve", lambda folder, host, show: show(f"north says {nasty}"))
    said = capsys.readouterr().out + run("server", tmp_path)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert said.count("[red]") == 7


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--sites", "north,../south"), r"'\.\./south' was given, expected letters"),
        (("--classes", "ash"), "expected 2 or more"),
        (("--mean", "a"), "--mean a: expected numbers"),
        (("--public-key", "north"), "expected SITE=FILE"),
        (("--public-key", "north=a", "--public-key", "north=b"), "was given a key already"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        init(tmp_path / "trees", *options)
    assert not (tmp_path / "trees").exists()


def test_a_federation_is_not_overwritten(tmp_path):
    init(tmp_path / "one")
    with pytest.raises(ConfigError, match="not empty"):
        init(tmp_path / "one")
    assert "start the server again" in run("renew", tmp_path / "one")


def test_status_names_sites_and_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    site = SiteStatus("north", "online", "2026-11-15 11:52:11Z")
    folder = tmp_path / "trees" / "runs" / "a-method-with-a-long-name-and-a-number-17"
    about = "16905895414385816397", "finished:completed", 4000.0, str(folder), 500, 0.3133
    done = RunStatus(*about, {"east": [3, 17]}, {"accuracy": 0.3133, "macro_f1": 0.2512}, "no disk")
    found = Status("trees", "fed.example.org:9092", True, [site], [done])
    monkeypatch.setattr(status, "read_status", lambda folder: found)
    said = run("status", tmp_path / "trees")
    told = ("31.33", "failed: run 16905895414385816397: no disk", "east in 2 of 500 rounds")
    for whole in ("north", "2026-11-15 11:52:11Z", *about[:2], str(folder), *told):
        assert whole in said  # never cut, whatever the width


def test_a_finished_run_is_shown_with_all_its_metrics(tmp_path, capsys):
    tested = {"accuracy": 0.5, "balanced_accuracy": 0.45, "macro_f1": 0.4, "auroc": 0.8, "ece": 0.1}
    metrics = [{"round": n, "clients": [0, 1], "left_out": [1], **({"test": tested} if n > 1 else {})} for n in (1, 2)]
    show.show_run(SimpleNamespace(metrics=metrics, timing=[{"round": 1, "seconds": 2.5}], folder=tmp_path))
    said = capsys.readouterr().out
    for name in ("1 of 2", "2.5", "balanced accuracy", "45.00", "macro F1", "40.00", "AUROC", "report.html"):
        assert name in said


@pytest.mark.parametrize("kept", [False, True])
def test_the_demo_names_files_only_where_they_stay(tmp_path, monkeypatch, kept):
    @contextmanager
    def serve(folder, host, say):
        say(f"$ flower-superlink --database {folder.database}")
        say(f"log: {folder.log}")
        yield

    done = SimpleNamespace(metrics=[], timing=[], folder=tmp_path / "demo" / "run")
    monkeypatch.setattr(demo, "_write_sites", lambda folder: ({}, folder))
    monkeypatch.setattr(demo, "initialise", lambda folder, *_, **__: ServerFolder(folder))
    monkeypatch.setattr(demo, "serving", serve)
    monkeypatch.setattr(demo.run, "run", lambda *_: done)
    said = run("demo", *(["--out", tmp_path / "demo"] if kept else []))
    assert "--database" not in said
    for part in (tmp_path / "demo", "superlink.log", "report.html", "model.safetensors"):
        assert (str(part) in said) == kept
    assert ("--out" in said.splitlines()[0]) != kept


def test_the_demo_refuses_a_mistyped_method_before_it_starts_anything(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'fedtutor'"):
        run("demo", "--method", "fedtuttor", "--out", tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("attacker", [False, True])
def test_the_demo_is_a_whole_federation(tmp_path, monkeypatch, attacker):
    """With stand-ins for its processes."""
    done = []

    @contextmanager
    def standing(name):
        done.append(f"start {name}")
        yield SimpleNamespace(ended=False, terminate=lambda: done.append(f"end {name}"))

    def start_run(folder, options, place, show):
        found = run_config.read(options | DESCRIBED)
        tests = len(list(found.tests.path.glob("*/*.png")))
        done.append(("run", found.experiment.rounds, place.name, tests, found.experiment.server.robust))
        return SimpleNamespace(metrics=[])

    monkeypatch.setattr(demo, "serving", lambda *_: standing("server"))
    monkeypatch.setattr(demo.site, "start", lambda bundle, name, *_: standing(name))
    monkeypatch.setattr(demo.run, "run", start_run)
    monkeypatch.setattr(show, "show_run", lambda finished, kept: None)
    monkeypatch.setattr(demo, "replace_program", lambda bundle: done.append(f"{bundle.root.name} is hostile"))
    monkeypatch.setattr(demo, "read_status", lambda folder: Status("demo", "", False, [], []))
    monkeypatch.setattr(demo.audit, "read", lambda log: done.append(f"audit {log.parent.parent.name}") or NO_AUDIT)
    words = ["--attacker"] if attacker else []
    for name, number in {"LABELLED": 1, "UNLABELLED": 12, "TESTS": 2}.items():
        monkeypatch.setattr(demo, name, number)
    run("demo", "--out", tmp_path / "demo", "--rounds", 1, *words)
    sites = ["north", "east", "south"]
    starts, ends = [f"start {name}" for name in ("server", *sites)], [f"end {name}" for name in sites]
    plain = [("run", 1, "run", 20, "none")]
    attacked = ["south is hostile", ("run", 1, "run-undefended", 20, "none"), ("run", 1, "run", 20, "median")]
    audits = [f"audit {name}" for name in ("federation", *sites)]
    assert done == [*starts, *([*attacked, *audits] if attacker else plain), *ends]
    for name in sites:
        assert len(list((tmp_path / "demo" / "images" / name / "labelled").glob("*/*.png"))) == 10
        assert list((tmp_path / "demo" / "images" / name / "unlabelled").glob("*.png"))
    with pytest.raises(ConfigError, match="something is there already"):
        run("demo", "--out", tmp_path / "demo")


def test_an_audit_log_is_verified_and_printed(tmp_path):
    folder = ServerFolder(tmp_path / "trees")
    folder.server.mkdir(parents=True)
    for number in (1, 2):
        sites = [{"site": "north", "not_used": "late", "received": {"bytes": 9, "sha256": "ab" * 32}}]
        AuditLog(folder.server).write("round", round=number, sites=sites)
    said = run("audit", folder.root)
    assert "not_used late, received 9 bytes abababababab" in said
    assert "ok: 2 entries" in said
    path = folder.server / "audit.jsonl"
    path.write_text(path.read_text().replace("late", "good", 1))
    assert "broken: line 2" in run("audit", folder.root, code=1)
    assert json.loads(run("audit", path, "--json", code=1))["problem"]


@pytest.mark.parametrize(("folder", "problem"), [("trees", "the server"), ("trees/sites/north", "the site")])
def test_there_is_no_audit_log_before_the_first_start(tmp_path, folder, problem):
    init(tmp_path / "trees")
    with pytest.raises(RunError, match=f"no audit log yet: {problem} has not"):
        run("audit", tmp_path / folder)
    with pytest.raises(ConfigError, match="neither"):
        run("audit", tmp_path)


def test_approve_lists_what_waits_and_what_was_answered(tmp_path):
    init(tmp_path / "trees")
    assert "no run waits" in run("approve", tmp_path / "trees", "north")
    answers = Answers(ServerFolder(tmp_path / "trees").bundle("north").state)
    for digit in "ab":
        answers.ask(digit * 32, f"run {digit}")
    assert "a" * 32 + "  approved: run a" in run("approve", tmp_path / "trees", "north", "a" * 32)
    said = run("approve", tmp_path / "trees", "north", "b" * 32, "--refuse")
    assert "b" * 32 + "  refused: run b" in said
    assert "no run waits" in said


def test_two_audit_logs_are_compared(tmp_path):
    init(tmp_path / "trees")
    sent = {"bytes": 9, "sha256": "ab" * 32}
    about = {"run": "r", "round": 1}
    folder = ServerFolder(tmp_path / "trees")
    head = AuditLog(folder.server).write("round", **about, sites=[{"site": "north", "sent": sent, "received": sent}])
    state = folder.bundle("north").state
    state.mkdir()
    AuditLog(state).write("trained", **about, site="north", received=sent, sent=sent, servers_log=head)
    assert "ok: both" in run("audit", folder.root, "--against", folder.bundle("north").root)
    AuditLog(state).write("trained", **about, site="north", received=sent, sent=sent, servers_log="cd" * 32)
    said = run("audit", folder.root, "--against", state / "audit.jsonl", code=1)
    assert "ended with another entry" in said


def test_a_site_counts_with_more_images_once_they_are_approved(tmp_path):
    init(tmp_path / "trees")
    registry = Registry(tmp_path / "trees" / "server")
    for claimed in (ImageCounts(5, 6), ImageCounts(50, 6)):
        registry.counts("north", claimed)
    assert "50 labelled" in run("sites", "approve", tmp_path / "trees", "north")
    assert registry.counts("north", ImageCounts(50, 6)) == ImageCounts(50, 6)
