"""`feddure config` and the command's own manners."""

import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from feddure import experiments
from feddure.cli import app
from feddure.version import VERSION


def output(*arguments):
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_presets_are_listed():
    text = output("config")
    for name in experiments.presets():
        assert name in text


def test_fields_are_listed_with_their_meaning():
    text = output("config", "--fields")
    for key in ("rounds", "partition.gamma", "server.ema", "engine.lanes"):
        assert key in text
    assert "Number of communication rounds" in " ".join(text.replace("│", " ").split())


def test_a_complete_configuration_that_can_be_used_again(tmp_path):
    text = output("config", "--preset", "aaai24", "--set", "partition.gamma=0.3")
    (tmp_path / "mine.yaml").write_text(text)
    assert experiments.load(file=tmp_path / "mine.yaml") == experiments.load("aaai24", sets=["partition.gamma=0.3"])
    again = output("config", "--config", str(tmp_path / "mine.yaml"))
    assert again == text
    assert yaml.safe_load(text)["partition"]["gamma"] == 0.3


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"]])
def test_the_command_introduces_itself(arguments):
    assert VERSION in output("--version")
    assert output(*arguments)


def test_a_mistake_is_one_message_and_exit_code_2():
    command = [sys.executable, "-c", "from feddure.cli import main; main()", "config", "--set", "rounds=0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: rounds: 0 was given")
    assert "Traceback" not in done.stderr


def test_help_comes_without_torch():
    """Torch takes seconds to import, and nobody who asks for help should wait for it."""
    code = "import sys, feddure.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_methods_are_listed_with_their_options():
    printed = output("methods")
    assert all(name in printed for name in ("fedtutor", "sage", "local", "feddure.*"))
