"""`feddure theory`: both theorems of the paper, measured beside controls."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from feddure.cli.options import AsJson, expect_writable, make_folder_of
from feddure.cli.tables import show_page
from feddure.errors import ConfigError
from feddure.terminal import Console


def theory(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the five files.")] = Path("runs/theory"),
    largest: Annotated[
        int, typer.Option("--largest", metavar="T", help="The largest T, a power of two from 128; the least is 64.")
    ] = 4096,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds: images and starting points.")] = 3,
    e: Annotated[float, typer.Option("--e", help="The theorems' constant e (and k) in η_s = min(1, e/T).")] = 16.0,
    as_json: AsJson = False,
) -> None:
    """Measure the paper's two theorems on a small smooth network, each beside a control.

    Theorem 1 bounds the least squared gradient of the labelled loss through one step of C-reg; Theorem 2 says that
    C-reg's own gradient vanishes. Writes theory.csv, theory.json, theory.md, theory.png and theory.html, and says which
    rates are there, and which of them a frozen model shows too.

    Examples:

    ```text
    feddure theory                                   # a few minutes on one core
    feddure theory --largest 512 --seeds 1           # a quick look
    feddure theory --e 4 --out runs/theory-e4        # do the verdicts depend on e?
    feddure theory --out runs/theory-5 --seeds 5 --json > findings.json
    ```
    """
    from feddure.studies.theory import measure as study
    from feddure.studies.theory import report as theory_report

    study.horizons(largest)
    if not 0 < e < float("inf"):
        raise ConfigError(f"--e {e:g}: expected a number above 0, for example 16")
    expect_writable(out / theory_report.FILES[0], "--out")
    make_folder_of(out / theory_report.FILES[0], "--out")
    with theory_progress() as progress:
        measured = study.measure(largest, seeds, e, progress=progress)
    report = theory_report.summary(measured)
    theory_report.write(measured, out, report)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        show_page(out / "theory.html")
        for name in theory_report.FILES:
            print(f"wrote {out / name}")


@contextmanager
def theory_progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, as a function of what is done and of all there is."""
    columns = TextColumn("lane steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
