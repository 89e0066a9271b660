"""Pages of the studies in the look of all reports: files that need nothing beside themselves, no network, no script."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jinja2

from feddure.reports.run_report import Picture, Table
from feddure.studies.paper import tables
from feddure.studies.paper.claims import Claim
from feddure.studies.paper.rows import Row
from feddure.studies.paper.tables import Grid
from feddure.studies.paper.verdicts import Criterion
from feddure.version import VERSION


class GridTable(NamedTuple):
    """A study's table as the page shows it: lines of name, mark, (ours, paper, difference) per column, and steps."""

    columns: list[str]
    grouped: bool
    lines: list[tuple[str, bool, list[tuple[str, str, str]], str]]


class Section(NamedTuple):
    """A heading with what stands below it."""

    heading: str
    text: str = ""
    grids: Sequence[GridTable] = ()
    below: str = ""  # what the words in them mean
    tables: Sequence[tuple[str, str, Table]] = ()  # with headings and what to read in them
    claims: Sequence[tuple[Criterion, Sequence[Claim]]] = ()  # by what they are judged by
    links: Sequence[tuple[str, str, list[str]]] = ()  # name, what it is, files
    points: Sequence[str] = ()
    list: Sequence[str] = ()  # folded


class Page(NamedTuple):
    """All that a page says."""

    kicker: str
    title: str
    lead: str
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    footer: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML."""
    loaders = [jinja2.PackageLoader("feddure.reports")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("reproduce.html.j2").render(page=page, version=VERSION)


def grid_table(grid: Grid, seeds: int) -> GridTable:
    """A study's table with the paper's numbers where it has any; FedDure is marked."""
    grouped = any(row is not None and row.paper is not None for line in grid.entries for row in line)
    lines = []
    for name, line in zip(grid.names, grid.entries, strict=True):
        entries = [(tables.accuracy(row, seeds), tables.paper(row), tables.from_paper(row)) for row in line]
        lines.append((name, name == "FedDure", entries, tables.steps(line)))
    return GridTable(grid.columns, grouped, lines)


def beyond_table(grid: Grid) -> Table | None:
    """What unlabelled images are worth, where labels-only training with as many steps was measured."""
    lines = tables.beyond_labels(grid)
    return Table(["method", *grid.columns], lines, frozenset({"FedDure"})) if lines else None


def provenance(rows: Iterable[Row]) -> list[str]:
    """Where the numbers come from."""
    found = [measurement.columns() for row in rows for measurement in row.measured.values()]

    def every(name: str) -> str:
        return ", ".join(dict.fromkeys(str(columns[name]).replace(";", ",") for columns in found if columns[name]))

    commit = f", commit {every('commit')}" if every("commit") else ""
    return [f"Measured on {every('hardware')} with {every('versions')}{commit}."] if found else []
