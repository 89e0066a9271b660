"""`feddure federate` as operators see it; one whole federation with real processes at the end."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from feddure.cli import federate, federate_show
from feddure.errors import ConfigError, FeddureError, RunError
from feddure.flower.app import description
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import layout, server, status
from feddure.flower.deploy import run as runs
from feddure.flower.deploy import site as sites
from feddure.flower.deploy.check import CheckResult, Finding
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import Terminated
from feddure.flower.deploy.status import RunStatus, SiteStatus, Status
from feddure.tracking.summary import percent

COMMANDS = ("init", "renew", "check", "server", "site", "run", "status", "demo")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(federate.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, FeddureError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def init(folder: Path, *more: object, sites: str = "north,south", classes: str = "ash,elm") -> str:
    address = ("--server-address", "127.0.0.1:9", "--size", 8, "--channels", 1)
    return run("init", folder, "--sites", sites, "--classes", classes, *address, *more)


def write_images(root: Path) -> Path:
    for part in ("labelled/ash", "labelled/elm", "unlabelled"):
        (root / part).mkdir(parents=True)
        Image.fromarray(np.zeros((9, 9), np.uint8)).save(root / part / "1.png")
    return root


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example(command: str) -> None:
    assert f"feddure federate {command}" in run(command, "--help")


def test_init_says_what_to_hand_to_whom(tmp_path: Path) -> None:
    said = init(tmp_path / "trees", "--mean", "0.4", "--std", "0.3")
    assert "sites/north.zip   hand this to north" in said
    assert "ca.key   take this off line" in said
    assert "397 days" in said
    found = description.read(tmp_path / "trees" / "federation.yaml")
    assert (found.name, found.mean, found.std, found.server.port) == ("trees", (0.4,), (0.3,), 9)


def test_insecure_must_be_typed(tmp_path: Path) -> None:
    init(tmp_path / "one")
    assert layout.read_settings(ServerFolder(tmp_path / "one")).secure
    assert "INSECURE" in init(tmp_path / "two", "--insecure")
    assert not layout.read_settings(ServerFolder(tmp_path / "two")).secure


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"sites": "north,north"}, "'north' is there more than once"),
        ({"sites": "north,../south"}, r"'\.\./south' was given, expected letters"),
        ({"sites": "north,"}, "'' was given"),
        ({"classes": "ash"}, "expected 2 or more"),
        ({"classes": "ash,a/b"}, "'a/b' cannot be the name of a folder"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, more: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        init(tmp_path / "trees", **more)
    assert not (tmp_path / "trees").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--mean", "a"), "--mean a: expected numbers"),
        (("--mean", "0.1,0.2,0.3"), "mean has 3 number"),
        (("--public-key", "north"), "expected SITE=FILE"),
        (("--public-key", "north=a", "--public-key", "north=b"), "was given a key already"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        init(tmp_path / "trees", *options)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    init(tmp_path / "trees")
    with pytest.raises(ConfigError, match="not empty"):
        init(tmp_path / "trees")


def test_check_draws_counts_names_files_and_fails_without_a_server(tmp_path: Path) -> None:
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


def test_status_and_run_need_the_server(tmp_path: Path) -> None:
    init(tmp_path / "trees", "--control-port", 7)
    assert "the server does not run" in run("status", tmp_path / "trees")
    assert json.loads(run("status", tmp_path / "trees", "--json"))["running"] is False
    with pytest.raises(RunError, match="feddure federate server"):
        run("run", tmp_path / "trees", "--rounds", 1)
    with pytest.raises(ConfigError, match="--resume was given without --out"):
        run("run", tmp_path / "trees", "--resume")


def test_a_run_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[runs.Options, Path]] = []

    def start(folder: ServerFolder, options: runs.Options, place: Path, show: object) -> None:
        asked.append((options, place))
        raise RunError("enough")

    monkeypatch.setattr(runs, "run", start)
    init(tmp_path / "trees")
    with pytest.raises(RunError, match="enough"):
        run("run", tmp_path / "trees", "--method", "fedavg", "--rounds", 3, "--set", "model=cnn", "--clip-norm", 1.5)
    expected = runs.Options(method="fedavg", rounds=3, sets=("model=cnn",), clip_norm=1.5)
    assert asked == [(expected, tmp_path / "trees" / "runs" / "fedavg")]


def test_a_site_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(sites, "join", lambda *given: asked.append((*given[:4], given[5])))
    init(tmp_path / "trees")
    run("site", tmp_path / "trees", "north", "--data", tmp_path, "--device", "cpu", "--dp-epsilon", 0.5)
    run("site", tmp_path / "trees", "north", "--data", f"folder:{tmp_path}?depth=12", "--verbose")
    bundle = ServerFolder(tmp_path / "trees").bundle("north")
    assert asked == [
        (bundle, "north", ImageFolder(tmp_path), {"device": "cpu", "dp-epsilon": 0.5}, False),
        (bundle, "north", ImageFolder(tmp_path, 12), {}, True),
    ]


def test_check_reads_a_sites_12_bit_images(tmp_path: Path) -> None:
    init(tmp_path / "trees")
    images = write_images(tmp_path / "images")
    Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(images / "unlabelled" / "deep.png")
    said = run("check", tmp_path / "trees", "north", "--data", f"folder:{images}?depth=10", code=1)
    assert "unreadable: unlabelled/deep.png: has pixels up to 4095, but depth=10 was given" in " ".join(said.split())
    assert "unreadable:" not in run("check", tmp_path / "trees", "north", "--data", f"folder:{images}?depth=12", code=1)


@pytest.mark.parametrize("columns", [40, 80])
def test_status_is_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    runs_there = tmp_path / "trees" / "runs" / "a-method-with-a-long-name-and-a-number-17"
    found = Status(
        "trees",
        "fed.example.org:9092",
        True,
        [SiteStatus("north", "online", "2026-11-15 11:52:11Z"), SiteStatus("a-southern-site", "registered", "")],
        [RunStatus("16905895414385816397", "finished:completed", 4000.0, str(runs_there), 500, 0.3133)],
    )
    monkeypatch.setattr(status, "read_status", lambda folder: found)
    monkeypatch.chdir(tmp_path)
    said = run("status", "trees")
    for whole in (
        "  a-southern-site  registered, not seen yet",
        "  north            online                    2026-11-15 11:52:11Z",
        f"  16905895414385816397  finished:completed    500   {percent(0.3133)}  1:06 h",
        "    trees/runs/a-method-with-a-long-name-and-a-number-17",
    ):
        assert whole in said.splitlines()
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(("number", "code"), [(2, 0), (15, 143)])
def test_ctrl_c_is_the_good_end_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def serve(*_: object) -> None:
        raise Terminated(number)

    monkeypatch.setattr(server, "serve", serve)
    run("server", tmp_path, code=code)


def test_what_others_say_cannot_reach_into_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = "\x1b]0;title\x07[red]\x1b[2J"
    found = Status(
        "trees", "h:1", True, [SiteStatus("north", nasty, nasty)], [RunStatus("7", nasty, 1.0, "", None, None)]
    )
    federate_show.show_status(found, tmp_path)
    federate_show.show_check(CheckResult("north", [Finding("note", "images", nasty)], unreadable=[(nasty, nasty)]))
    monkeypatch.setattr(server, "serve", lambda folder, host, show: show(f"north says {nasty}"))
    said = capsys.readouterr().out + run("server", tmp_path)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert said.count("[red]") == 7


def test_renew_says_until_when(tmp_path: Path) -> None:
    init(tmp_path / "trees")
    assert "start the server again" in run("renew", tmp_path / "trees")


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


@pytest.mark.timeout(900)  # two dozen processes start, each with Flower or torch to import
def test_a_whole_federation_with_tls_and_keys(tmp_path: Path) -> None:
    """The demo, small: a server, three sites and a round in processes of their own."""
    out = tmp_path / "demo"
    small = ("--rounds", "1", "--labelled", "1", "--unlabelled", "12", "--tests", "2", "--local-steps", "1")
    done = subprocess.run(
        [sys.executable, "-m", "feddure", "federate", "demo", "--out", str(out), *small],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--enable-supernode-auth" in done.stdout
    assert "--auth-supernode-private-key" in done.stdout
    assert "--insecure" not in done.stdout
    for site in ("north", "east", "south"):
        assert f"{site} joined from 127.0.0.1" in done.stdout
        assert f"{site} left" in done.stdout
    (record,) = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(record["federation"]["connected"]) == ["east", "north", "south"]
    assert record["left_out"] == []
    assert 0 <= record["test"]["accuracy"] <= 1
    assert len({entry["pid"] for entry in record["federation"]["sites"]} | {os.getpid()}) == 4
    assert (out / "run" / "model.safetensors").exists()
    assert (out / "run" / "report.html").exists()
    assert left_running(out) == []
