"""What `feddure federate` shows: tables, bars and where things lie."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.markup import escape
from rich.table import Column, Table

from feddure.cli.tables import folded, listing, numbers, plain_console
from feddure.flower.app.description import Description
from feddure.flower.app.sanitize import one_line
from feddure.terminal import Console

if TYPE_CHECKING:
    from feddure.flower.app.audit import Audit
    from feddure.flower.app.registry import Registration
    from feddure.flower.deploy.check import CheckResult
    from feddure.flower.deploy.layout import ServerFolder
    from feddure.flower.deploy.status import Status
    from feddure.tracking.records import Run

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
_COLOURS = {"online": "green", "offline": "yellow", "unregistered": "red"}
_BAR_WIDTH = 36
_NAMED_FILES = 10


def show_made(folder: "ServerFolder", description: Description) -> None:
    """What `init` made, and what to do next."""
    from feddure.flower.deploy.certificates import AUTHORITY_DAYS, SERVER_DAYS

    console = plain_console()
    console.print(f"{folder.root}: the federation '{description.name}'")
    for site in description.sites:
        console.print(f"  {folder.archive(site).relative_to(folder.root)}   hand this to {site}")
    console.print(f"  {folder.authority_key.relative_to(folder.root)}   take this off line; only `renew` needs it")
    console.print(f"The server's certificate holds for {SERVER_DAYS} days, the authority's for {AUTHORITY_DAYS}.")
    console.print(f"Next: {folder.readme}, or at once: feddure federate server {folder.root}")


def show_check(found: "CheckResult") -> None:
    """A site's check-up: findings, counts with bars, and unreadable files."""
    console = Console(highlight=False)
    table = Table(Column(no_wrap=True), Column(no_wrap=True), folded(), box=None, show_header=False)
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
    table = listing(folded("class"), *numbers("images"), "")
    most = max(*found.labelled.values(), 1)
    for name, count in found.labelled.items():
        table.add_row(_text(name), f"{count:,}", Bar(most, 0, count, width=_BAR_WIDTH, color="blue"))
    table.add_section()
    ratio = f"{found.unlabelled / max(1, sum(found.labelled.values())):.1f} for each labelled one"
    table.add_row("unlabelled", f"{found.unlabelled:,}", ratio if found.unlabelled else "")
    if found.tests:
        table.add_row("test", f"{found.tests:,}", "stay at this site too")
    return table


def show_run(finished: "Run", kept: bool = True) -> None:
    """A completed run: a row a round, and where its results lie if they are kept."""
    from feddure.simulation.runs import MODEL_FILE, REPORT_FILE
    from feddure.tracking.metrics import TITLES, known

    tests = [record.get("test") or {} for record in finished.metrics]
    shown = [name for name in TITLES if any(known(test, name) is not None for test in tests)]
    scores = [Column(TITLES[name], justify="right") for name in shown]  # eight columns in 80 characters
    table = listing("round", *numbers("sites"), *scores, *numbers("seconds"))
    seconds = {line["round"]: line["seconds"] for line in finished.timing}
    for record, test in zip(finished.metrics, tests, strict=True):
        number = record["round"]
        table.add_row(
            str(number),
            f"{len(record['clients']) - len(record['left_out'])} of {len(record['clients'])}",
            *(_percent(known(test, name)) for name in shown),
            f"{seconds[number]:.1f}" if number in seconds else "",
        )
    Console(highlight=False).print(table)
    if kept:
        console = plain_console()
        console.print(f"report  {finished.folder / REPORT_FILE}")
        console.print(f"model   {finished.folder / MODEL_FILE}")


def show_status(found: "Status", folder: Path) -> None:
    """Sites and runs; paths below the federation's folder are shown from there."""
    from feddure.tracking.summary import duration

    console = Console(highlight=False, width=200)  # in a narrow pipe nothing is to be cut
    if not found.running:
        console.print(f"{escape(found.federation)}: the server does not run on this machine")
        return
    console.print(f"{escape(found.federation)} at {escape(found.server)}: the server runs")
    table = listing("site", "status", "since", "images")
    for site in found.sites:
        status = "registered, not seen yet" if site.status == "registered" else site.status
        colour = _COLOURS.get(site.status, "default")
        table.add_row(
            _text(site.site), f"[{colour}]{_text(status)}[/]", _text(site.since), _images(found.images.get(site.site))
        )
    console.print(table)
    if not found.runs:
        console.print("\nno runs yet")
        return
    table = listing("run", "status", *numbers("round", "accuracy", "time"), "folder")
    for run in found.runs:
        table.add_row(
            _text(run.run),
            _text(run.status),
            "" if run.round is None else str(run.round),
            _percent(run.accuracy),
            duration(run.seconds),
            _text(str(_from(folder, Path(run.folder)))) if run.folder else "",
        )
    console.print()
    console.print(table)
    for run in found.runs:
        if run.failure:
            console.print(f"[bold red]failed[/]: run {_text(run.run)}: {_text(run.failure)}")
        if run.suspicious:
            often = ", ".join(
                f"{site} in {len(rounds)} of {run.round} rounds" for site, rounds in run.suspicious.items()
            )
            console.print(f"[yellow]suspicious[/] in run {_text(run.run)}: {_text(often)}")


def show_audit(found: "Audit") -> None:
    """An audit log's entries, and whether they are what was written."""
    console = Console(highlight=False, width=200)  # in a narrow pipe nothing is to be cut
    table = listing("time", "event", "what")
    for entry in found.entries:
        facts = {key: value for key, value in entry.items() if key not in ("time", "event", "before", "sites")}
        table.add_row(_text(entry.get("time", "")), _text(entry["event"]), _text(_facts(facts)))
        for site in entry["sites"] if isinstance(entry.get("sites"), list) else ():
            table.add_row("", "", _text(_facts(site) if isinstance(site, dict) else str(site)))
    console.print(table)
    if found.torn:
        console.print("the last line was being written when its process ended; the next entry vouches for it")
    if found.problem:
        console.print(f"[bold red]broken[/]: {escape(found.problem)}; up to there it is what was written")
    else:
        console.print(f"[green]ok[/]: {len(found.entries)} entries in one chain; the last is {found.head}")


def show_comparison(problems: list[str]) -> None:
    """Where two audit logs are broken or disagree."""
    console = plain_console()
    for problem in problems:
        console.print(one_line(problem))
    if not problems:
        console.print("ok: both logs are whole, and agree on every message")


def _facts(facts: dict[str, Any]) -> str:
    """Facts on one line; of a message its bytes and the beginning of its hash."""
    parts = []
    for key, value in facts.items():
        if isinstance(value, dict) and "sha256" in value:
            value = f"{value.get('bytes')} bytes {str(value['sha256'])[:12]}"
        elif isinstance(value, str) and key in ("experiment", "servers_log"):
            value = value[:12]
        parts.append(f"{key} {value}")
    return ", ".join(parts)


def _images(registered: "Registration | None") -> str:
    """What counts for a site, and what it says where that is something else."""
    if registered is None:
        return ""
    counts, claimed = registered.counts, registered.claimed
    text = f"{counts.labelled:,} labelled, {counts.unlabelled:,} unlabelled"
    if claimed is None:
        return text
    return f"{text} [yellow](says {claimed.labelled:,} and {claimed.unlabelled:,}: `federate sites approve`)[/]"


def _percent(share: float | None) -> str:
    from feddure.tracking.summary import percent

    return "" if share is None else percent(share)


def _from(folder: Path, place: Path) -> Path:
    """A path below the federation's folder as the user named that folder; any other as it is."""
    root = folder.resolve()
    return folder / place.relative_to(root) if place.is_relative_to(root) else place


def print_json(value: Any) -> None:
    """A record as JSON."""
    tree = dataclasses.asdict(value)
    if hasattr(value, "passed"):
        tree["passed"] = value.passed
    json.dump(tree, sys.stdout, indent=2)
    print()


def _text(text: str) -> str:
    """What others wrote, as one line of a table."""
    return escape(one_line(text, 2000))
