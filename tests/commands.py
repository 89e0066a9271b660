"""Commands as people type them, and the tables that they write."""

import csv
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from feddure import cli


def invoke(*words: object, exit_code: int = 0) -> Result:
    """What `feddure` prints; a mistake is raised as the error that it makes its message of."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
