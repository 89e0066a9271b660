"""The guard at a site: feddure's own app, and no other code."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supernode.runtime import run_clientapp

from feddure.deployment import guard
from feddure.deployment.guard import ForeignCode, expect_own_app
from feddure.deployment.layout import ServerFolder


def packed(**files: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/").replace("_toml", ".toml"), text)
    return content.getvalue()


def naming(component: str) -> str:
    return f'[tool.flwr.app.components]\nclientapp = "{component}"\n'


def test_the_app_that_init_writes_passes(made: ServerFolder) -> None:
    expect_own_app(build_fab_from_disk(made.app))


def test_an_app_that_brings_code_is_refused_even_under_feddures_name() -> None:
    with pytest.raises(ForeignCode, match="brings files along"):
        expect_own_app(packed(pyproject_toml=naming(guard.CLIENT_APP), feddure____init__="import os"))


def test_an_app_that_names_other_code_is_refused() -> None:
    with pytest.raises(ForeignCode, match="names os:system"):
        expect_own_app(packed(pyproject_toml=naming("os:system")))


@pytest.mark.parametrize(
    "content", [b"", b"no archive", packed(), packed(pyproject_toml="["), packed(pyproject_toml="")]
)
def test_an_app_that_cannot_be_read_is_refused(content: bytes) -> None:
    with pytest.raises(ForeignCode, match="cannot be read"):
        expect_own_app(content)


def test_flower_installs_apps_where_the_guard_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[bytes] = []
    monkeypatch.setattr(run_clientapp, "install_from_fab", lambda content, **_: installed.append(content))
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", lambda: None)
    guard.main()
    own = packed(pyproject_toml=naming(guard.CLIENT_APP))
    run_clientapp.install_from_fab(own, skip_prompt=True)
    with pytest.raises(ForeignCode):
        run_clientapp.install_from_fab(packed(pyproject_toml=naming("os:system")), skip_prompt=True)
    assert installed == [own]


def test_a_supernode_finds_the_guard_in_place_of_flowers_programs(tmp_path: Path) -> None:
    programs = guard.write_programs(tmp_path / "programs")
    there = {path.name for path in Path(sys.executable).parent.glob("flwr-*")}
    assert {path.name for path in programs.iterdir()} == there
    assert "flwr-clientapp" in there
    assert all(os.access(path, os.X_OK) for path in programs.iterdir())
    refused = subprocess.run([programs / "flwr-agentapp"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "client apps of feddure only" in refused.stderr
    asked = subprocess.run([programs / "flwr-clientapp", "--help"], capture_output=True, text=True, check=False)
    assert "Run a Flower ClientApp" in asked.stdout
