"""What tests of the command share."""

import sys
import warnings

import pytest

from feddure import cli


@pytest.fixture
def feddure(monkeypatch, capsys, tmp_path):
    """Runs the command in an empty folder; returns its exit code, standard output and standard error."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["feddure", *map(str, arguments)])
        code = 0
        with warnings.catch_warnings():  # the command says itself how warnings are shown
            warnings.simplefilter("default")
            try:
                cli.main()
            except SystemExit as exit:
                code = exit.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call
