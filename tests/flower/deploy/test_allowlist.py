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
from feddure.flower.deploy import allowlist
from feddure.flower.deploy.allowlist import ForeignCode, check_app
from feddure.flower.deploy.layout import ServerFolder


def packed(**files: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/").replace("_toml", ".toml"), text)
    return content.getvalue()


def naming(component: str, publisher: str = "feddure", name: str = "feddure-federation", version: str = "0.1.0") -> str:
    return (
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
        f'[tool.flwr.app]\npublisher = "{publisher}"\n'
        f'[tool.flwr.app.components]\nclientapp = "{component}"\n'
    )


def test_the_app_that_init_writes_passes(made: ServerFolder) -> None:
    check_app(build_fab_from_disk(made.app))


def test_an_app_that_brings_code_is_refused_even_under_feddures_name() -> None:
    with pytest.raises(ForeignCode, match="brings files along"):
        check_app(packed(pyproject_toml=naming(allowlist.CLIENT_APP), feddure____init__="import os"))


def test_an_app_that_names_other_code_is_refused() -> None:
    with pytest.raises(ForeignCode, match="names 'os:system'"):
        check_app(packed(pyproject_toml=naming("os:system")))


@pytest.mark.parametrize(
    "content", [b"", b"no archive", packed(), packed(pyproject_toml="["), packed(pyproject_toml="")]
)
def test_an_app_that_cannot_be_read_is_refused(content: bytes) -> None:
    with pytest.raises(ForeignCode, match="cannot be read"):
        check_app(content)


@pytest.mark.parametrize(
    "other",
    [
        {"publisher": "somebody"},
        {"name": "something"},
        {"version": "1/../../../elsewhere"},
        {"version": ""},
        {"version": "1 2"},
    ],
)
def test_an_app_of_another_name_or_with_a_path_for_a_version_is_refused(other: dict[str, str]) -> None:
    with pytest.raises(ForeignCode, match=r"the run's app (is|has the version)"):
        check_app(packed(pyproject_toml=naming(allowlist.CLIENT_APP, **other)))


def test_an_app_that_unpacks_to_much_is_refused() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", naming(allowlist.CLIENT_APP))
        archive.writestr(".info/CONTENT", b"0" * 5_000_000)
    with pytest.raises(ForeignCode, match="5,000,000 bytes"):
        check_app(content.getvalue())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_app_that_holds_a_file_twice_is_refused() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pyproject.toml", naming("os:system"))
        archive.writestr("pyproject.toml", naming(allowlist.CLIENT_APP))
    with pytest.raises(ForeignCode, match="brings files along"):
        check_app(content.getvalue())


def test_flower_installs_apps_where_the_allowlist_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[bytes] = []
    monkeypatch.setattr(run_clientapp, "install_from_fab", lambda content, **_: installed.append(content))
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", lambda: None)
    allowlist.main()
    own = packed(pyproject_toml=naming(allowlist.CLIENT_APP))
    run_clientapp.install_from_fab(own, skip_prompt=True)
    with pytest.raises(ForeignCode):
        run_clientapp.install_from_fab(packed(pyproject_toml=naming("os:system")), skip_prompt=True)
    assert installed == [own]


def test_a_supernode_finds_the_allowlist_in_place_of_flowers_programs(tmp_path: Path) -> None:
    programs = allowlist.write_wrappers(tmp_path / "programs")
    there = {path.name for path in Path(sys.executable).parent.glob("flwr-*")}
    assert {path.name for path in programs.iterdir()} >= there
    assert "flwr-clientapp" in there
    assert all(os.access(path, os.X_OK) for path in programs.iterdir())
    refused = subprocess.run([programs / "flwr-agentapp"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "client apps of feddure only" in refused.stderr
    asked = subprocess.run([programs / "flwr-clientapp", "--help"], capture_output=True, text=True, check=False)
    assert "Run a Flower ClientApp" in asked.stdout


def test_programs_that_flower_starts_are_replaced_wherever_python_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python3"))
    programs = allowlist.write_wrappers(tmp_path / "programs")
    assert {path.name for path in programs.iterdir()} == set(TASK_TYPE_TO_COMMAND.values())


def test_a_flower_that_does_not_name_its_programs_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("flwr.supercore.constant.TASK_TYPE_TO_COMMAND")
    with pytest.raises(RunError, match="cannot be protected"):
        allowlist.write_wrappers(tmp_path / "programs")


def test_a_place_that_programs_cannot_be_started_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: None)  # as on a mount that keeps no modes
    with pytest.raises(RunError, match=r"noexec\?\); unpack the bundle elsewhere"):
        allowlist.write_wrappers(tmp_path / "programs")


def test_a_search_path_that_leads_around_the_allowlist_is_refused(tmp_path: Path) -> None:
    programs = allowlist.write_wrappers(tmp_path / "programs")
    flowers = str(Path(sys.executable).parent)
    allowlist.check_path(programs, os.pathsep.join([str(programs), flowers]))
    with pytest.raises(RunError, match="feddure's own is not what would be started"):
        allowlist.check_path(programs, os.pathsep.join([flowers, str(programs)]))
    (programs / allowlist.CLIENT_PROGRAM).chmod(0o644)
    with pytest.raises(RunError, match=r"flwr-clientapp: feddure's own is not what would be started"):
        allowlist.check_path(programs, os.pathsep.join([str(programs), flowers]))


def test_modules_of_the_current_folder_do_not_get_into_the_allowlist(tmp_path: Path) -> None:
    programs = allowlist.write_wrappers(tmp_path / "programs")
    here = tmp_path / "here"
    here.mkdir()
    (here / "flwr.py").write_text("raise SystemExit('a module of the current folder')")
    command = [programs / allowlist.CLIENT_PROGRAM, "--help"]
    asked = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert "Run a Flower ClientApp" in asked.stdout, asked.stderr


def test_a_refused_app_is_told_at_the_site(capsys: pytest.CaptureFixture[str]) -> None:
    install = allowlist._checked(lambda *_: pytest.fail("it was installed"))
    with pytest.raises(ForeignCode):
        install(packed(pyproject_toml=naming("os:system")))
    assert capsys.readouterr().out.startswith("feddure: problem: refused: the run's app names 'os:system'")
