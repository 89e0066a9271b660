"""What `feddure federate` shows: tables, bars and where things lie."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feddure.flower.app.description import Description

if TYPE_CHECKING:
    from feddure.flower.deploy.check import CheckResult
    from feddure.flower.deploy.layout import ServerFolder
    from feddure.flower.deploy.status import Status
    from feddure.tracking.records import Run

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
_COLOURS = {"online": "green", "offline": "yellow", "unregistered": "red"}
_BAR_WIDTH = 36
_NAMED_FILES = 10


def show_made(folder: "ServerFolder", description: Description, secure: bool) -> None:
    """What `init` made, and what to do next."""
    from feddure.flower.deploy.certificates import AUTHORITY_DAYS, SERVER_DAYS

    console = _plain()
    console.print(f"{folder.root}: the federation '{description.name}'")
    for site in description.sites:
        console.print(f"  {folder.archive(site).relative_to(folder.root)}   hand this to {site}")
    if secure:
        console.print(f"  {folder.authority_key.relative_to(folder.root)}   take this off line; only `renew` needs it")
        console.print(f"The server's certificate holds for {SERVER_DAYS} days, the authority's for {AUTHORITY_DAYS}.")
    else:
        console.print("INSECURE: nothing is encrypted and anybody can join. Never with real data.")
    console.print(f"Next: {folder.readme}, or at once: feddure federate server {folder.root}")


def show_check(found: "CheckResult") -> None:
    """A site's check-up: findings, counts with bars, and unreadable files."""
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found.findings:
        table.add_row(_MARKS[finding.level], finding.what, _text(finding.text))
    console.print(table)
    if found.labelled:
        console.print(_counts(found))
    for file, reason in found.unreadable[:_NAMED_FILES]:
        console.print(f"unreadable: {_text(file)}: {_text(reason)}", soft_wrap=True)
    if len(found.unreadable) > _NAMED_FILES:
        console.print(f"... and {len(found.unreadable) - _NAMED_FILES} more (--json names all)")
    if found.passed:
        console.print(f"\n[bold green]{escape(found.site)} can join.[/]")
    else:
        console.print(f"\n[bold red]{escape(found.site)} cannot join yet:[/] see the problems above.")


def _counts(found: "CheckResult") -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    table.add_column("", no_wrap=True)
    most = max(*found.labelled.values(), 1)
    for name, count in found.labelled.items():
        table.add_row(_text(name), f"{count:,}", f"[blue]{_bar(count / most)}[/]")
    table.add_section()
    ratio = f"{found.unlabelled / max(1, sum(found.labelled.values())):.1f} for each labelled one"
    table.add_row("unlabelled", f"{found.unlabelled:,}", ratio if found.unlabelled else "")
    if found.tests:
        table.add_row("test", f"{found.tests:,}", "stay at this site too")
    return table


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def show_run(finished: "Run") -> None:
    """A completed run: a row a round, and where its results lie."""
    from feddure.simulation.runs import MODEL_FILE, REPORT_FILE
    from feddure.tracking.summary import percent

    table = Table("round", box=SIMPLE_HEAD)
    for name in ("sites", "accuracy", "seconds"):
        table.add_column(name, justify="right")
    seconds = {line["round"]: line["seconds"] for line in finished.timing}
    for record in finished.metrics:
        used = len(record["clients"]) - len(record["left_out"])
        accuracy = (record.get("test") or {}).get("accuracy")
        number = record["round"]
        table.add_row(
            str(number),
            f"{used} of {len(record['clients'])}",
            percent(accuracy) if accuracy is not None else "",
            f"{seconds[number]:.1f}" if number in seconds else "",
        )
    Console(highlight=False).print(table)
    console = _plain()
    console.print(f"report  {finished.folder / REPORT_FILE}")
    console.print(f"model   {finished.folder / MODEL_FILE}")


def show_status(found: "Status", folder: Path) -> None:
    """Sites and runs in lines of fewer than 80 characters; paths below the federation's folder are shown from there."""
    from feddure.tracking.summary import duration, percent

    console = Console(highlight=False, soft_wrap=True)
    if not found.running:
        console.print(f"{escape(found.federation)}: the server does not run on this machine")
        return
    console.print(f"{escape(found.federation)} at {escape(found.server)}: the server runs")
    rows = [("site", "status", "since")]
    for site in found.sites:
        status = "registered, not seen yet" if site.status == "registered" else site.status
        rows.append((_line(site.site), _line(status), _line(site.since)))
    colours = ["default", *(_COLOURS.get(site.status, "default") for site in found.sites)]
    for line in _aligned(rows, colours):
        console.print(line)
    if not found.runs:
        console.print("\nno runs yet")
        return
    head = ("run", "status", "round", "accuracy", "time")
    runs = [
        (
            _line(run.run),
            _line(run.status),
            "" if run.round is None else str(run.round),
            percent(run.accuracy) if run.accuracy is not None else "",
            duration(run.seconds),
        )
        for run in found.runs
    ]
    first, *lines = _aligned([head, *runs], right=2)
    console.print(first)
    for run, line in zip(found.runs, lines, strict=True):
        console.print(line)
        if run.folder:
            # On a line of its own: with it a row would be wider than a terminal.
            console.print(f"    {escape(_line(str(_from(folder, Path(run.folder)))))}")


def _aligned(rows: Sequence[Sequence[str]], colours: Sequence[str] = (), right: int = 99) -> list[str]:
    """Rows as lines of columns, those from `right` on to the right; the second column may have a colour.

    Unlike a table of rich these are never cut, whatever the width of the terminal or pipe.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            escape(cell.rjust(width) if place >= right else cell.ljust(width))
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if colours:
            cells[1] = f"[{colours[number]}]{cells[1]}[/]"
        lines.append(("\n" if not number else "") + "  " + "  ".join(cells).rstrip())
    return lines


def _from(folder: Path, place: Path) -> Path:
    """A path below the federation's folder as the user named that folder; any other as it is."""
    root = folder.resolve()
    return folder / place.relative_to(root) if place.is_relative_to(root) else place


def _line(text: str) -> str:
    """What others wrote, as one line."""
    from feddure.flower.app.sanitize import printable

    return " ".join(printable(text).split())


def print_json(value: Any) -> None:
    """A record as JSON."""
    tree = dataclasses.asdict(value)
    if hasattr(value, "passed"):
        tree["passed"] = value.passed
    json.dump(tree, sys.stdout, indent=2)
    print()


def _text(text: str) -> str:
    """What others wrote, as it may stand in a table."""
    from feddure.flower.app.sanitize import printable

    return escape(printable(text))


def _plain() -> Console:
    return Console(soft_wrap=True, markup=False, highlight=False)
