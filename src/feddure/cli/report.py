"""`feddure report`: one HTML file about one run or several."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; default: report.html in the only run, or in this folder."),
    ] = None,
) -> None:
    """Write a self-contained HTML report of one run, or a comparison of several.

    Examples:

    ```text
    feddure report runs/demo                 # writes runs/demo/report.html
    feddure report runs/feddure runs/fixmatch --out comparison.html
    ```
    """
    from feddure.reports.run_report import write_report  # matplotlib takes a second: only when it is needed

    print(write_report(runs, out or (runs[0] if len(runs) == 1 else Path()) / "report.html"))
