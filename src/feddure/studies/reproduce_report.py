"""What `feddure reproduce` prints and writes: each study as CSV, Markdown, figure and page, the claims, and an index.

Files are made anew from the measured cells each time; what is not measured yet is named, never filled in.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from feddure import data
from feddure.data.dataset import Dataset
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.studies import paper_numbers, reproduce, reproduce_claims, reproduce_figures, theory, theory_report
from feddure.studies import reproduce_pages as pages
from feddure.studies import reproduce_tables as tables
from feddure.studies import reproduce_words as words
from feddure.studies.cells import Cell, Store
from feddure.studies.reproduce_claims import Claim
from feddure.studies.reproduce_pages import Page, Section
from feddure.studies.reproduce_rows import Difference, Row, gather, known, rows, stem
from feddure.studies.reproduce_verdicts import VERDICTS
from feddure.tracking import style
from feddure.tracking.report import Table, embed
from feddure.tracking.summary import spoken

_MARK = "<!-- Written by feddure reproduce; it is made anew each time. -->"
_COLOURS = {"holds": "green", "does not hold": "red", "undecided": "yellow", "not measured": "dim"}


def show(study: str, cells: Sequence[Cell], store: Store) -> list[RenderableType]:
    """A study's tables for a terminal: the methods of which something is measured."""
    found = rows(gather(study, cells, store), store)
    begun = {(row.dataset, row.method, row.options) for row in found if row.measured}
    seeds = tables.most_seeds(found)
    preset = f" ({cells[0].preset})" if cells else ""
    shown: list[RenderableType] = [Text(f"{words.ABOUT[study]}{preset}", "bold")]
    for grid in tables.grids([row for row in found if (row.dataset, row.method, row.options) in begun]):
        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("method")
        for column in (*grid.columns, "steps"):
            table.add_column(column, justify="right")
        for name, line in zip(grid.names, grid.entries, strict=True):
            look = "bold" if name == "FedDure" else ""
            table.add_row(Text(name), *(tables.entry(row, seeds) for row in line), tables.steps(line), style=look)
        shown += [Text(f"\n{grid.title}", "bold"), table]
    return [*shown, Text("\n" + words.reading(found, seeds), "dim"), Text(words.state(found))]


def write(study: str, cells: Sequence[Cell], store: Store, folder: Path) -> list[Path]:
    """Write a study's files, each whole or not at all, and the index; returns their paths, the page last."""
    preset = cells[0].preset if cells else reproduce.Request().preset
    found = rows(gather(study, cells, store), store)
    name = stem(study, cells, preset)
    contents: dict[str, bytes] = {f"{name}.csv": tables.as_csv(found).encode()}
    if study == "figure1":
        contents[f"{name}-curves.csv"] = _curves(found).encode()
    if found:
        contents[f"{name}.png"] = style.render(reproduce_figures.figure(found), "png")
    contents[f"{name}.md"] = _markdown(study, preset, found, name).encode()
    contents[f"{name}.html"] = pages.render(_page(study, preset, found)).encode()
    return _write(folder, contents)


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
    """The verdicts for a terminal."""
    shown: list[RenderableType] = []
    for preset, own in _by_preset(claims):
        table = RichTable("claim", "verdict", "measured", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for claim in own:
            colour = _COLOURS[claim.verdict]
            table.add_row(Text(claim.says), Text(claim.verdict, colour), Text(claim.judgement.sentence))
        shown += [Text(f"\n{_preset_heading(preset)}", "bold"), table]
    return shown


def write_claims(folder: Path, store: Store) -> list[Path]:
    """Judge every claim by what is measured; writes claims.csv, .md and .html, and the index."""
    found = all_claims(store, folder)
    columns = ["preset", "claim", "says", "where", "verdict", "measured", "criterion", "needs"]
    lines = [
        [claim.preset, claim.name, claim.says, claim.where, claim.verdict, claim.judgement.sentence,
         claim.judgement.criterion, f"feddure reproduce {claim.needs}"]
        for claim in found
    ]  # fmt: skip
    comparisons = [
        [claim.preset, claim.name, one.name, *_ends(one.difference), "" if one.paper is None else round(one.paper, 2)]
        for claim in found
        for one in claim.comparisons
    ]
    heads = ["preset", "claim", "comparison", "difference", "low", "high", "seeds", "paper"]
    markdown = [_MARK, "# The paper's claims", "", words.ABOUT["claims"] + ".", ""]
    sections = []
    for preset, own in _by_preset(found):
        heading = _preset_heading(preset)
        cells = [[claim.says, claim.where, f"**{claim.verdict}**", claim.judgement.sentence] for claim in own]
        markdown += [
            f"## {heading}",
            "",
            *tables.table(["claim", "where", "verdict", "measured"], cells, numbers=False),
            "",
        ]
        criteria = dict.fromkeys(f"- {claim.name}: {claim.judgement.criterion}" for claim in own)
        markdown += ["Criteria:", "", *criteria, ""]
        sections.append(Section(heading, text=_tally(own), claims=own))
    lead = (
        "Each claim of the paper's text is judged by a criterion that stands beside it. Differences are in points of "
        "test accuracy (mean of the last 10 evaluations) on the same seeds, with 95 % intervals by Student's t."
    )
    page = Page("feddure reproduce claims", "The paper's claims", lead, sections)
    contents = {
        "claims.csv": tables.lines_of(columns, lines).encode(),
        "claims-comparisons.csv": tables.lines_of(heads, comparisons).encode(),
        "claims.md": "\n".join(markdown).encode(),
        "claims.html": pages.render(page).encode(),
    }
    return _write(folder, contents)


def write_partitions(folder: Path, datasets: Iterable[str], data_dir: Path | None = None) -> list[Path]:
    """Deal each data set as FedMatch and the paper do; writes counts, figure and page, and the index."""
    written = []
    for name in datasets:
        written += _write(folder, _partition_files(data.load(name, data_dir, progress=True)))
    return written


def write_theory(folder: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Measure the theorems unless that was done, which takes minutes; writes the study's four files, and the index."""
    _make(folder)
    if not (folder / "theory.json").exists():
        study = theory.measure(4096, 3, 16.0, progress=progress or (lambda done, total: None))
        theory_report.write(study, folder, theory_report.summary(study))
    write_index(folder)
    return [folder / name for name in theory_report.FILES]


def write_index(folder: Path) -> list[Path]:
    """index.html and README.md: links to everything that lies in the folder."""
    links = []
    for name, about in words.ABOUT.items():
        there = sorted(path.name for path in folder.glob(f"{name}*") if path.suffix in (".html", ".md"))
        for key in dict.fromkeys(entry.rpartition(".")[0] for entry in there):
            files = [f"{key}.{end}" for end in ("html", "md", "png", "csv") if (folder / f"{key}.{end}").exists()]
            links.append((key, about, files))
    lead = "The tables, charts and claims of the paper, measured, with its numbers beside ours."
    page = Page("feddure reproduce", "FedDure, reproduced", lead, [Section("What is here", links=links)])
    readme = [_MARK, "# FedDure, reproduced", "", lead, "", "| | | files |", "|---|---|---|"]
    for key, about, files in links:
        listed = ", ".join(f"[{file.rpartition('.')[2]}]({file})" for file in files)
        readme.append(f"| [{key}]({files[0]}) | {about} | {listed} |")
    readme += [
        "",
        "`results.csv` has a line for each measured cell, `cells/` all of it with curves and diagnostics.",
        "",
    ]
    contents = {"index.html": pages.render(page).encode()}
    if not (folder / "README.md").exists() or (folder / "README.md").read_bytes().startswith(_MARK.encode()):
        contents["README.md"] = "\n".join(readme).encode()
    for name, content in contents.items():
        write_whole(folder / name, content, RunError)
    return [folder / name for name in contents]


def _page(study: str, preset: str, found: Sequence[Row]) -> Page:
    seeds = tables.most_seeds(found)
    sections = []
    for grid in tables.grids(found):
        beyond = pages.beyond_table(grid)
        text = "Points of accuracy on the same seeds" + (", with 95 % intervals by Student's t." if seeds > 1 else ".")
        heading = "Beyond labels-only training with as many steps"
        sections.append(
            Section(
                grid.title,
                grids=[pages.grid_table(grid, seeds)],
                tables=[(heading, text, beyond)] if beyond else [],
            )
        )
    left = tables.missing(found)
    if left:
        sections.append(Section("Not measured yet", list=left))
    alt = f"{words.ABOUT[study]}: ours and the paper's numbers, which the tables below hold"
    return Page(
        kicker=f"feddure reproduce {study}",
        title=words.ABOUT[study],
        lead=f"{words.setup(preset)} {words.reading(found, seeds)}",
        sections=sections,
        notes=words.notes(found),
        pictures=[embed(reproduce_figures.figure(found), alt)] if found else [],
        footer=pages.provenance(found),
    )


def _markdown(study: str, preset: str, found: Sequence[Row], name: str) -> str:
    lines = [
        f"# {words.ABOUT[study]}",
        "",
        f"{words.setup(preset)} {words.reading(found, tables.most_seeds(found))}",
        "",
        *(f"> {note}\n" for note in words.notes(found)),
        *([f"![{words.ABOUT[study]}]({name}.png)", ""] if found else []),
        tables.markdown(found),
    ]
    left = tables.missing(found)
    if left:
        lines += ["## Not measured yet", "", *(f"- {line}" for line in left), ""]
    return "\n".join([*lines, *pages.provenance(found), ""])


def _curves(found: Sequence[Row]) -> str:
    """The curves of a figure: accuracies in per cent, mean and deviation over seeds."""
    lines = []
    for row in found:
        if row.measured:
            rounds, values = reproduce_figures.seed_curves(row)
            for place, number in enumerate(rounds):
                column = values[:, place]
                deviation = round(float(column.std(ddof=1)), 3) if len(column) > 1 else ""
                lines.append(
                    [row.dataset, row.setting, row.method, row.options, int(number), len(column),
                     round(float(column.mean()), 3), deviation]
                )  # fmt: skip
    columns = ["dataset", "setting", "method", "options", "round", "seeds", "accuracy_mean", "accuracy_sd"]
    return tables.lines_of(columns, lines)


def _partition_files(dataset: Dataset) -> dict[str, bytes]:
    name, classes = f"partitions-{dataset.name}", len(dataset.classes)
    counts_lines, summary_lines = [], []
    for setting, title in reproduce_figures.DEALT.items():
        dealt = reproduce_figures.deal(dataset, setting)
        inside, outside = reproduce_figures.imbalances(dealt, dataset)
        for kind, counts in zip(("labelled", "unlabelled"), dealt.counts(dataset.labels, classes), strict=True):
            counts_lines += [[setting, kind, client, *map(int, row)] for client, row in enumerate(counts)]
            sizes, absent = counts.sum(axis=1), (counts == 0).sum(axis=1)
            summary_lines.append(
                [title, kind, f"{sizes.sum():,}", f"{sizes.min():,}–{sizes.max():,}", f"{absent.mean():.1f}",
                 f"{inside:.2f}", f"{outside:.2f}"]
            )  # fmt: skip
    heads = ["setting", "images", "number", "per client", "absent classes", "internal", "external imbalance"]
    lead = (
        f"{spoken(dataset.name)} dealt to 100 clients with seed 0. Internal imbalance compares a client's labelled "
        "with its unlabelled images, external imbalance compares clients; 0 is none, 1 the most."
    )
    figure = reproduce_figures.partitions(dataset)
    table = Table(heads, summary_lines)
    page = Page(
        "feddure reproduce partitions",
        words.ABOUT["partitions"],
        lead,
        [Section("In numbers", tables=[("", "", table)])],
        pictures=[embed(figure, "Labelled and unlabelled images of each class on the first clients")],
    )
    markdown = [f"# {words.ABOUT['partitions']}", "", lead, "", f"![{words.ABOUT['partitions']}]({name}.png)", ""]
    return {
        f"{name}.csv": tables.lines_of(["setting", "images", "client", *dataset.classes], counts_lines).encode(),
        f"{name}.png": style.render(figure, "png"),
        f"{name}.md": "\n".join([*markdown, *tables.table(heads, summary_lines), ""]).encode(),
        f"{name}.html": pages.render(page).encode(),
    }


def _ends(found: Difference | None) -> list[float | str]:
    if found is None:
        return ["", "", "", 0]
    return [*("" if value is None else round(value, 3) for value in (found.mean, found.low, found.high)), found.seeds]


def _by_preset(claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault(claim.preset, []).append(claim)
    return list(found.items())


def _tally(claims: Sequence[Claim]) -> str:
    """How many claims have which verdict."""
    each = zip(VERDICTS, ("hold", "do not hold", "are undecided", "are not measured"), strict=True)
    found = [(sum(claim.verdict == verdict for claim in claims), said) for verdict, said in each]
    return f"Of {len(claims)} claims {', '.join(f'{number} {said}' for number, said in found if number)}."


def _preset_heading(preset: str) -> str:
    return "Theory" if preset == "any" else f"Preset {preset}"


def _write(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    _make(folder)
    for name, content in contents.items():
        write_whole(folder / name, content, RunError)
    write_index(folder)
    return [folder / name for name in contents]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: the folder cannot be made ({problem.strerror})") from None
