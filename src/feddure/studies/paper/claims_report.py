"""The claims as `feddure reproduce` prints and writes them: by preset, and there by what they are judged by."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from feddure.studies.grid.store import Store
from feddure.studies.paper import claims as reproduce_claims
from feddure.studies.paper import numbers as paper_numbers
from feddure.studies.paper import pages, tables, words
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.claims import Claim
from feddure.studies.paper.files import MARK, write_files
from feddure.studies.paper.pages import Page, Section
from feddure.studies.paper.rows import Difference, known, rows
from feddure.studies.paper.verdicts import VERDICTS, Criterion

_COLOURS = {"holds": "green", "does not hold": "red", "undecided": "yellow"}
_SAID = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "undecided": ("is undecided", "are undecided"),
    "not measured": ("is not measured", "are not measured"),
}


def all_claims(store: Store, folder: Path) -> list[Claim]:
    """Every claim, judged for each preset with cells of its own, and the theorems."""
    found = []
    for preset in paper_numbers.PRESETS:
        own = {study: rows(known(study, preset, store), store) for study in reproduce.STUDIES}
        if any(row.measured for table in own.values() for row in table):
            found += reproduce_claims.claims(preset, own)
    return [
        *(found or reproduce_claims.claims(reproduce.Request().preset, {})),
        *reproduce_claims.theorem_claims(folder),
    ]


def show_claims(claims: Sequence[Claim]) -> list[RenderableType]:
    """The verdicts for a terminal; claims without a measurement are counted, not listed."""
    shown: list[RenderableType] = []
    for preset, own in _by_preset(claims):
        shown.append(Text(f"\n{_preset_heading(preset)}", "bold"))
        measured = [claim for claim in own if claim.verdict != "not measured"]
        if measured:
            table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
            table.add_column("claim", ratio=2)
            table.add_column("verdict", no_wrap=True)
            table.add_column("measured", ratio=3)
            for claim in measured:
                verdict = Text(claim.verdict, _COLOURS[claim.verdict])
                table.add_row(Text(claim.says), verdict, Text(claim.judgement.sentence))
            shown.append(table)
        left = len(own) - len(measured)
        if left:
            are = "claim is" if left == 1 else "claims are"
            shown.append(Text(f"{left} {are} not measured yet: see claims.html", "dim"))
    return shown


def write_claims(folder: Path, store: Store) -> list[Path]:
    """Judge every claim by what is measured; writes claims.csv, .md and .html, and the index."""
    found = all_claims(store, folder)
    markdown = [MARK, "# The paper's claims", "", words.ABOUT["claims"] + ".", ""]
    sections = []
    for preset, own in _by_preset(found):
        heading, groups = _preset_heading(preset), _by_criterion(own)
        markdown += [f"## {heading}", "", tally(own), ""]
        for criterion, judged in groups:
            cells = [[claim.says, claim.where, f"**{claim.verdict}**", claim.judgement.sentence] for claim in judged]
            table = tables.table(["claim", "where", "verdict", "measured"], cells, numbers=False)
            markdown += [f"### {criterion.title}", "", criterion.words, "", *table, ""]
        sections.append(Section(heading, text=tally(own), claims=groups))
    lead = (
        "Each claim of the paper's text is judged by the criterion above it. Differences are in points of test "
        "accuracy (mean of last 10 evaluations) on the same seeds, with 95 % intervals by Student's t."
    )
    page = Page("feddure reproduce claims", "The paper's claims", lead, sections)
    contents = {
        "claims.csv": _claims_csv(found).encode(),
        "claims-comparisons.csv": _comparisons_csv(found).encode(),
        "claims.md": "\n".join(markdown).encode(),
        "claims.html": pages.render(page).encode(),
    }
    return write_files(folder, contents)


def tally(claims: Sequence[Claim]) -> str:
    """How many claims have which verdict."""
    counts = [(sum(claim.verdict == verdict for claim in claims), _SAID[verdict]) for verdict in VERDICTS]
    each = ", ".join(f"{number} {said[number > 1]}" for number, said in counts if number)
    return f"Of {len(claims)} claim{'s' * (len(claims) > 1)} {each}."


def _claims_csv(claims: Sequence[Claim]) -> str:
    columns = ["preset", "claim", "says", "where", "verdict", "measured", "criterion", "needs"]
    lines = [
        [claim.preset, claim.name, claim.says, claim.where, claim.verdict, claim.judgement.sentence,
         claim.judgement.criterion.words, f"feddure reproduce {claim.needs}"]
        for claim in claims
    ]  # fmt: skip
    return tables.lines_of(columns, lines)


def _comparisons_csv(claims: Sequence[Claim]) -> str:
    columns = ["preset", "claim", "comparison", "difference", "low", "high", "seeds", "paper"]
    lines = [
        [claim.preset, claim.name, one.name, *_ends(one.difference), "" if one.paper is None else round(one.paper, 2)]
        for claim in claims
        for one in claim.comparisons
    ]
    return tables.lines_of(columns, lines)


def _ends(found: Difference | None) -> list[float | str]:
    if found is None:
        return ["", "", "", 0]
    return [*("" if value is None else round(value, 3) for value in (found.mean, found.low, found.high)), found.seeds]


def _by_preset(claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault(claim.preset, []).append(claim)
    return list(found.items())


def _by_criterion(claims: Sequence[Claim]) -> list[tuple[Criterion, list[Claim]]]:
    """Groups in the order of their first claims; in each, what is measured comes first."""
    found: dict[Criterion, list[Claim]] = {}
    for claim in claims:
        found.setdefault(claim.judgement.criterion, []).append(claim)
    return [
        (criterion, sorted(own, key=lambda claim: claim.verdict == "not measured")) for criterion, own in found.items()
    ]


def _preset_heading(preset: str) -> str:
    return "Theory" if preset == "any" else f"Preset {preset}"
