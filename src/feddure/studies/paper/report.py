"""What `feddure reproduce` writes: tables, claims and theorems as CSV, Markdown, PNG and HTML.

Files are made anew from the measured cells each time; what is not measured yet is named, never filled in.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from feddure import experiments
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports import frame, page
from feddure.reports.page import Group, Section, Table, Text
from feddure.studies.grid.store import Cell, Store
from feddure.studies.paper import figures, plan, rows
from feddure.studies.paper.claims import Claim, Criterion, Verdict, claims, theorem_claims
from feddure.studies.paper.rows import Row
from feddure.studies.theory import measure as theory
from feddure.studies.theory import report as theory_report
from feddure.tracking.summary import display_name

ABOUT = {
    **{name: study.about for name, study in plan.STUDIES.items()},
    "theory": "The two theorems, measured",
    "claims": "What the paper says in words, and whether our measurements say so too",
}
"""All that can be reproduced, in one sentence each."""

_DEFINITIONS = {
    ("fedavg",): "FedAvg* trains on labelled images alone, one pass over them in a round.",
    ("fedavg-matched",): "Labels only trains on them with as many local steps as the semi-supervised methods.",
    ("fedavg-sl", "fedprox-sl"): "Methods with -SL use every training label.",
}
_REMARKS = {
    "figure1": "The paper's numbers are those of its table 1.",
    "table2": "Its baseline is FedAvg-FixMatch. The paper's table 2 and table 1 print different numbers for it under "
    "IID-DIR and IID-IID.",
    "gamma": "The paper prints no numbers for this chart.",
    "labels": "Every client takes 5 local steps at every share of labels. The paper prints no numbers for this chart.",
    "clients": "The paper names no setting for this chart; ours is DIR-DIR. It prints no numbers for it.",
}
_VERDICTS: dict[Verdict, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "undecided": ("is undecided", "are undecided"),
    "not measured": ("is not measured", "are not measured"),
}
"""What is said of one claim and of several."""


# A study: a table or a chart.


def results(cells: Sequence[Cell], store: Store) -> list[Row]:
    """The rows of the study that these cells belong to."""
    return rows.rows(plan.gather(cells, store), store)


def write(found: Sequence[Row], name: str, folder: Path) -> Path:
    """Write a study's files and the index; returns the page."""
    study, preset, seeds = found[0].study, found[0].preset, rows.most_seeds(found)
    frame.write_csv(folder / f"{name}.csv", rows.records(found))
    sections = []
    for place, grid in enumerate(rows.grids(found)):
        parts: list[Any] = [_table(rows.table(grid, seeds))]
        parts += [Text(_definitions(found), "fact")] if place == 0 else []
        beyond = rows.beyond_labels(grid)
        if len(beyond):
            text = "Points beyond labels only, on the same seeds"
            parts += [Text(text + (", with 95 % intervals by Student's t:" if seeds > 1 else ":")), _table(beyond)]
        sections.append(Section(grid.title, parts=parts))
    for heading, lines in rows.unmeasured(found).items():
        if lines:
            listed = Group([Text(line) for line in lines], f"{len(lines)} entries", opened=heading == "Failed")
            sections.append(Section(heading, parts=[listed]))
    setup = f"Preset {preset}: {experiments.about(preset)}"
    throughout = f" All with {found[0].options}." if found[0].options else ""
    lead = f"{setup}{throughout} {_quantity(found, seeds)}"
    footer = frame.provenance(rows.runs_of(found))
    draw = partial(figures.figure, found) if any(row.seeds for row in found) else None
    return _write(folder, name, study, lead, sections, _notes(found), footer, draw)


def _quantity(found: Sequence[Row], seeds: int) -> str:
    """What the numbers of the tables are."""
    spread = f" ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed" if seeds else ""
    if any(0 < len(row.seeds) < seeds for row in found):
        spread += ", or n where there are fewer"
    beside = " (paper, ours − paper)" if any(row.paper is not None for row in found) else ""
    return f"Test accuracy in %, {frame.mean_of(rows.runs_of(found), True)}{spread}{beside}."


def _definitions(found: Sequence[Row]) -> str:
    """What the words and signs in the tables mean, of those that are there."""
    there = {row.method for row in found}
    said = ["Steps: local ones of a client in a round."]
    said += [words for methods, words in _DEFINITIONS.items() if there & set(methods)]
    said += [_REMARKS.get(found[0].study, "") if found[0].preset in plan.PRESETS else ""]
    if any(row.is_dirty for row in found):
        said.append(f"{rows.DIRTY}: measured, at least in part, by code with uncommitted changes.")
    return " ".join(filter(None, said))


def _notes(found: Sequence[Row]) -> list[str]:
    """What a reader must know before the numbers."""
    said = []
    done, left, failed = (sum(len(getattr(row, what)) for row in found) for what in ("seeds", "missing", "failed"))
    if left or not done:
        state = f"{done} of {done + left} cells of this study are measured{f'; {failed} failed' if failed else ''}."
        said.append(f"{state} The others are listed at the end.")
    if rows.most_seeds(found) == 1:
        said.append("One seed has no deviation and no interval: differences of a few points may be chance.")
    rounds = sorted({number for row in found for number in row.measured["rounds"]})
    if any(number != plan.ROUNDS for number in rounds) and any(row.paper is not None for row in found):
        listed = f"{', '.join(map(str, rounds))} round{'s' * (rounds != [1])}"
        said.append(f"{listed}, not the {plan.ROUNDS} of the paper: its numbers do not compare.")
    for panel in rows.panels(found):
        if done and not any(row.seeds for row in found if row.dataset == panel[0].dataset):
            preset = f" --preset {panel[0].preset}" * (panel[0].preset != plan.Request().preset)
            command = f"feddure reproduce {panel[0].study} --datasets {panel[0].dataset}{preset}"
            name = display_name(panel[0].dataset)
            said.append(f"{name} is not measured: its numbers are the paper's. {command} measures it.")
    return list(dict.fromkeys(said))


# Claims.


def all_claims(store: Store) -> list[Claim]:
    """Every claim, judged for each preset with cells of its own, and the theorems."""
    measured = plan.measured_experiments(store)
    found = []
    for preset in plan.PRESETS:
        own = {study: rows.rows(plan.measured_for(study, preset, measured), store) for study in plan.STUDIES}
        if any(row.seeds for table in own.values() for row in table):
            found += claims(preset, own)
    return [*(found or claims(plan.Request().preset, {})), *theorem_claims(store.folder)]


def write_claims(found: Sequence[Claim], folder: Path) -> Path:
    """Write claims.csv, claims-comparisons.csv with what they rest on, and a page; returns the page."""
    frame.write_csv(
        folder / "claims.csv",
        pd.DataFrame(
            {
                "preset": claim.preset,
                "claim": claim.name,
                "says": claim.says,
                "where": claim.where,
                "verdict": claim.verdict,
                "measured": claim.sentence,
                "criterion": claim.criterion.words,
                "needs": f"feddure reproduce {claim.needs}",
            }
            for claim in found
        ),
    )
    frame.write_csv(folder / "claims-comparisons.csv", _comparisons(found))
    sections = []
    for preset, of_preset in groupby(found, key=lambda claim: claim.preset):
        own = list(of_preset)
        parts: list[Any] = []
        groups: dict[Criterion, list[Claim]] = {}
        for claim in own:
            groups.setdefault(claim.criterion, []).append(claim)
        for criterion, judged in groups.items():
            judged.sort(key=lambda claim: claim.verdict == "not measured")
            lines = [[claim.says, claim.verdict, claim.sentence, claim.where] for claim in judged]
            parts += [Text(criterion.title, "heading"), Text(criterion.words)]
            parts.append(Table(["claim", "verdict", "measured", "where"], lines, kind="prose"))
        sections.append(Section("Theory" if preset == "any" else f"Preset {preset}", tally(own), parts))
    lead = (
        "Each claim of the paper's text is judged by the criterion above it. Differences are in points of test "
        "accuracy (mean of last 10 evaluations) on the same seeds, with 95 % intervals by Student's t; "
        "claims-comparisons.csv has them all."
    )
    return _write(folder, "claims", "claims", lead, sections)


def tally(found: Sequence[Claim]) -> str:
    """How many claims have which verdict."""
    numbers = Counter(claim.verdict for claim in found)
    each = [f"{numbers[name]} {said[numbers[name] > 1]}" for name, said in _VERDICTS.items() if name in numbers]
    return f"Of {len(found)} claim{'s' * (len(found) > 1)} {', '.join(each)}."


def _comparisons(found: Sequence[Claim]) -> pd.DataFrame:
    lines = []
    for claim in found:
        for one in claim.comparisons:
            ends = (getattr(one.difference, name, None) for name in ("mean", "low", "high"))
            numbers = [None if value is None else round(value, 3) for value in ends]
            seeds = one.difference.n if one.difference else 0
            paper = None if one.paper is None else round(one.paper, 2)
            lines.append([claim.preset, claim.name, one.name, *numbers, seeds, paper])
    columns = ["preset", "claim", "comparison", "difference", "low", "high", "seeds", "paper"]
    return pd.DataFrame(lines, columns=columns)


# The theorems.


def write_theory(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Measure the theorems unless that was done, which takes minutes; writes its files and the index."""
    if not (folder / "theory.json").exists():
        study = theory.measure(progress=progress)
        theory_report.write(study, folder, theory_report.summary(study))
    write_index(folder)
    return folder / "theory.html"


# Files.


def write_index(folder: Path) -> None:
    """index.html: links to everything that lies in the folder; what `feddure theory` found has a page then."""
    found = theory_report.read(folder)
    if found.get("findings") and not (folder / "theory.html").exists():
        theory_report.write_page(folder, found)
    links = []
    for name, about in ABOUT.items():
        for key in sorted({path.stem for path in folder.glob(f"{name}*") if path.suffix in (".html", ".md")}):
            files = [f"{key}.{end}" for end in ("html", "md", "png", "csv") if (folder / f"{key}.{end}").exists()]
            links.append((key, about, files))
    lead = "The tables, charts and claims of the paper, measured, with its numbers beside ours."
    title = "FedDure, reproduced"
    index = page.render("index.html.j2", kicker="feddure reproduce", title=title, lead=[("", lead)], links=links)
    write_whole(folder / "index.html", index.encode(), RunError)


def _write(folder: Path, name: str, study: str, *said: Any, **more: Any) -> Path:
    """Write a page and the index; returns the page."""
    path = page.write(folder, name, f"feddure reproduce {study}", ABOUT[study], *said, **more)
    write_index(folder)
    return path


def _table(found: pd.DataFrame) -> Table:
    return page.table(found, numbers_from=1, marked=frozenset({"FedDure"}))
