"""The package as people install it: an sdist that can be tested, and a wheel made from it in a fresh environment."""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from feddure.version import VERSION

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "feddure"
NOT_SOURCE = (".*", "__pycache__", "*.egg-info", "build", "dist", "site", "runs")


def done(*command, **options):
    """What a command printed; where it fails, its own words are the error."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both files."""
    copy, out = tmp_path_factory.mktemp("source") / "feddure", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def tracked(folder):
    """Files of a folder that are no by-products."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_the_sdist_holds_all_that_make_test_reads(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    folders = ("src/feddure", "tests", "examples", "docs", "tools", "benchmarks", "results")
    wanted = set().union(*(tracked(ROOT / folder) for folder in folders))
    wanted |= {"Makefile", "constraints.txt", "pyproject.toml", "README.md", "CHANGELOG.md", "mkdocs.yml", "LICENSE"}
    assert not wanted - names


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked(SOURCE)}
    assert {"feddure/py.typed", "feddure/data/embedded/fashion-mini.npz", "feddure/presets/demo.yaml"} <= names


def test_the_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    binaries = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python", "--disable-pip-version-check", "--quiet"]
    done(*pip, "install", "--no-deps", "--no-index", wheel)
    # Dependencies are those of this environment; its own feddure is not seen, being named by a .pth file there.
    (packages,) = (tmp_path / "env").rglob("site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FEDDURE_DATA")}
    alone = {"env": clean, "cwd": tmp_path}
    assert done(binaries / "feddure", "--version", **alone).strip() == f"feddure {VERSION}"
    where = done(binaries / "python", "-c", "import feddure; print(feddure.__file__)", **alone)
    assert Path(where.strip()).is_relative_to(packages)
    # A run needs a preset, the embedded images and the report's templates.
    quick = ("--set", "rounds=1", "--set", "local_steps=1")
    done(binaries / "feddure", "run", "--preset", "demo", *quick, "--out", "one", **alone)
    assert (tmp_path / "one" / "report.html").is_file()


def test_versions_agree():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION}, " in (ROOT / "CHANGELOG.md").read_text()
