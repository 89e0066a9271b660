"""`feddure config` and the command's own manners."""

import subprocess
import sys

import pytest
import yaml

from commands import invoke
from feddure import experiments
from feddure.version import VERSION


def printed(*words):
    return invoke(*words).stdout


def test_presets_are_listed():
    text = printed("config")
    for name in experiments.presets():
        assert name in text


def test_fields_are_listed_with_their_meaning():
    text = printed("config", "--fields")
    for key in ("rounds", "partition.gamma", "server.ema", "engine.lanes"):
        assert key in text
    assert "Number of communication rounds" in " ".join(text.replace("│", " ").split())


def test_a_complete_configuration_that_can_be_used_again(tmp_path):
    text = printed("config", "--preset", "aaai24", "--set", "partition.gamma=0.3")
    (tmp_path / "mine.yaml").write_text(text)
    assert experiments.load(file=tmp_path / "mine.yaml") == experiments.load("aaai24", sets=["partition.gamma=0.3"])
    again = printed("config", "--config", str(tmp_path / "mine.yaml"))
    assert again == text
    assert yaml.safe_load(text)["partition"]["gamma"] == 0.3


@pytest.mark.parametrize("option", ["--version", "--help", "-h"])
def test_the_command_introduces_itself(option):
    assert (VERSION if option == "--version" else "compare") in printed(option)


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
    text = printed("methods")
    assert all(name in text for name in ("fedtutor", "sage", "local", "feddure.*"))
