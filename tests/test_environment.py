"""What a result says about where it comes from."""

import sys
from pathlib import Path

import pytest

import feddure
from feddure import environment

MAIN = str(Path(feddure.__file__).with_name("__main__.py"))


@pytest.mark.parametrize(
    ("called", "command"),
    [
        (["/usr/bin/feddure", "run", "--out", "my runs"], "feddure run --out 'my runs'"),
        ([MAIN, "theory"], "feddure theory"),  # python -m feddure
        (["somewhere/else/__main__.py", "--fast"], "__main__.py --fast"),
    ],
)
def test_the_command_can_be_given_to_a_shell_again(monkeypatch, called, command):
    monkeypatch.setattr(sys, "argv", called)
    assert environment.describe()["command"] == command
