"""The allowlist at a site: feddure's own app, and no other code."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND
from flwr.supernode.runtime import run_clientapp

from feddure.errors import RunError
from feddure.flower.app import CLIENT_APP
from feddure.flower.app.client import app
from feddure.flower.app.run_config import write_app
from feddure.flower.deploy import allowlist
from feddure.flower.deploy.allowlist import ForeignCode, check_app


def naming(component, publisher="feddure", name="feddure-federation", version="0.1.0"):
    return (
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
        f'[tool.flwr.app]\npublisher = "{publisher}"\n'
        f'[tool.flwr.app.components]\nclientapp = "{component}"\n'
    )


def test_the_app_that_a_run_writes_passes(tmp_path, agreed):
    write_app(tmp_path, agreed)
    check_app(build_fab_from_disk(tmp_path))


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The allowlist has started Flower's program for client apps."""
    for name in ("install_from_fab", "get_load_client_app_fn"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", lambda: None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    allowlist.main()


@pytest.mark.usefixtures("started")
def test_flower_installs_apps_where_the_allowlist_looks(capsys):
    run_clientapp.install_from_fab(archive(OWN), skip_prompt=True)
    with pytest.raises(ForeignCode):
        run_clientapp.install_from_fab(archive(("pyproject.toml", naming("os:system"))), skip_prompt=True)
    assert "problem: refused" in capsys.readouterr().out


@pytest.mark.usefixtures("started")
def test_a_server_cannot_name_another_app_than_the_one_that_was_looked_at(tmp_path, monkeypatch):
    """Flower makes the folder of the app that it loads of what the server says of the run."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    other, known = tmp_path / "other", tmp_path / "home" / "apps" / "a.b.1"
    for folder in (other, known):
        folder.mkdir(parents=True)
    config = naming("intruder:app").replace("[tool.flwr.app]", 'description = "x"\nlicense = "x"\n[tool.flwr.app]')
    (other / "pyproject.toml").write_text(config + 'serverapp = "intruder:app"\n')
    (other / "intruder.py").write_text("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    load = run_clientapp.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load("a/b", "1/../../../other/", "") is app
    assert "intruder" not in sys.modules


def test_a_supernode_finds_the_allowlist_in_place_of_flowers_programs(tmp_path):
    programs = allowlist.write_wrappers(tmp_path / "programs")
    there = {path.name for path in Path(sys.executable).parent.glob("flwr-*")}
    assert {path.name for path in programs.iterdir()} >= there
    assert "flwr-clientapp" in there
    assert all(os.access(path, os.X_OK) for path in programs.iterdir())
    refused = subprocess.run([programs / "flwr-agentapp"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "client apps of feddure only" in refused.stderr
    (tmp_path / "flwr.py").write_text("raise SystemExit('a module of the current folder')")
    command = [programs / "flwr-clientapp", "--help"]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Run a Flower ClientApp" in asked.stdout, asked.stderr


def test_programs_that_flower_starts_are_replaced_wherever_python_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python3"))
    programs = allowlist.write_wrappers(tmp_path / "programs")
    assert {path.name for path in programs.iterdir()} == set(TASK_TYPE_TO_COMMAND.values())


def test_a_flower_that_does_not_name_its_programs_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.delattr("flwr.supercore.constant.TASK_TYPE_TO_COMMAND")
    with pytest.raises(RunError, match="cannot be protected"):
        allowlist.write_wrappers(tmp_path / "programs")


def test_a_place_that_programs_cannot_be_started_from_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "chmod", lambda *_: None)  # as on a mount that keeps no modes
    with pytest.raises(RunError, match=r"noexec\?\); unpack the bundle elsewhere"):
        allowlist.write_wrappers(tmp_path / "programs")


def test_a_search_path_that_leads_around_the_allowlist_is_refused(tmp_path):
    programs = allowlist.write_wrappers(tmp_path / "programs")
    flowers = str(Path(sys.executable).parent)
    allowlist.check_path(programs, os.pathsep.join([str(programs), flowers]))
    with pytest.raises(RunError, match="feddure's own is not what would be started"):
        allowlist.check_path(programs, os.pathsep.join([flowers, str(programs)]))
    (programs / allowlist.CLIENT_PROGRAM).chmod(0o644)
    with pytest.raises(RunError, match=r"flwr-clientapp: feddure's own is not what would be started"):
        allowlist.check_path(programs, os.pathsep.join([str(programs), flowers]))


def archive(*entries):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return content.getvalue()


OWN = ("pyproject.toml", naming(CLIENT_APP))
REFUSED = {
    "code under feddure's name": archive(OWN, ("feddure/__init__.py", "import os")),
    "other code": archive(("pyproject.toml", naming("os:system"))),
    "empty": b"",
    "no archive": b"no archive",
    "no project": archive(),
    "no TOML": archive(("pyproject.toml", "[")),
    "another publisher": archive(("pyproject.toml", naming(CLIENT_APP, publisher="somebody"))),
    "another name": archive(("pyproject.toml", naming(CLIENT_APP, name="something"))),
    "a path for a version": archive(("pyproject.toml", naming(CLIENT_APP, version="1/../../../elsewhere"))),
    "no version": archive(("pyproject.toml", naming(CLIENT_APP, version=""))),
    "a bomb": archive(OWN, (".info/CONTENT", b"0" * 5_000_000)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_other_app_is_refused(kind):
    with pytest.raises(ForeignCode):
        check_app(REFUSED[kind])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_app_that_holds_a_file_twice_is_refused():
    with pytest.raises(ForeignCode):
        check_app(archive(("pyproject.toml", naming("os:system")), OWN))
