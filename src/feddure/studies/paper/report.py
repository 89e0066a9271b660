"""What `feddure reproduce` prints and writes of a study: CSV, Markdown, figure and page.

Files are made anew from the measured cells each time; what is not measured yet is named, never filled in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from feddure import data
from feddure.data.dataset import Dataset
from feddure.reports import style
from feddure.reports.run_report import Table, embed
from feddure.studies.grid.store import Cell, Store
from feddure.studies.paper import figures as reproduce_figures
from feddure.studies.paper import names, pages, tables, words
from feddure.studies.paper import partitions as reproduce_partitions
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.files import make_folder, write_files, write_index
from feddure.studies.paper.pages import Page, Section
from feddure.studies.paper.rows import Row, gather, rows, stem
from feddure.studies.theory import measure as theory
from feddure.studies.theory import report as theory_report
from feddure.tracking.summary import spoken


def show(
    study: str, cells: Sequence[Cell], store: Store, failed: Mapping[str, str] | None = None
) -> list[RenderableType]:
    """A study's tables for a terminal: the methods of which something is measured or was tried in vain."""
    found = rows(gather(study, cells, store), store, failed)
    shared = names.shared(found)
    found = names.without(found, shared)
    begun = {(row.dataset, row.method, row.options) for row in found if row.measured or row.failed}
    listed = [row for row in found if (row.dataset, row.method, row.options) in begun]
    seeds = tables.most_seeds(found)
    preset = f" ({cells[0].preset})" if cells else ""
    shown: list[RenderableType] = [Text(f"{words.ABOUT[study]}{preset}", "bold")]
    if shared:
        shown.append(Text(words.throughout(shared)))
    for grid in tables.grids(listed):
        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("method")
        for column in (*grid.columns, "steps"):
            table.add_column(column, justify="right")
        for name, line in zip(grid.names, grid.entries, strict=True):
            look = "bold" if name == "FedDure" else ""
            table.add_row(Text(name), *(tables.entry(row, seeds) for row in line), tables.steps(line), style=look)
        shown += [Text(f"\n{grid.title}", "bold"), table]
    if listed:
        shown.append(Text(f"\n{words.quantity(listed, seeds)} {words.definitions(listed)}", "dim"))
    return [*shown, Text(words.state(found))]


def write(
    study: str, cells: Sequence[Cell], store: Store, folder: Path, failed: Mapping[str, str] | None = None
) -> list[Path]:
    """Write a study's files, each whole or not at all, and the index; returns their paths, the page last.

    Numbers come first: whatever happens to a figure, they are kept. `failed` says why cells could not be measured, by
    their hashes.
    """
    preset = cells[0].preset if cells else reproduce.Request().preset
    found = rows(gather(study, cells, store), store, failed)
    name = stem(study, cells, preset)
    numbers = {f"{name}.csv": tables.as_csv(found)}
    if study == "figure1":
        numbers[f"{name}-curves.csv"] = _curves(found)
    numbers[f"{name}.md"] = _markdown(study, preset, found, name)
    written = write_files(folder, {file: text.encode() for file, text in numbers.items()})
    figure = reproduce_figures.figure(found) if _has_numbers(found) else None
    drawn = {f"{name}.png": style.render(figure, "png")} if figure else {}
    page = pages.render(_page(study, preset, found, figure)).encode()
    return written + write_files(folder, drawn | {f"{name}.html": page})


def write_partitions(folder: Path, datasets: Iterable[str], data_dir: Path | None = None) -> list[Path]:
    """Deal each data set as FedMatch and the paper do; writes counts, figure and page, and the index."""
    written = []
    for name in datasets:
        written += write_files(folder, _partition_files(data.load(name, data_dir, progress=True)))
    return written


def write_theory(folder: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Measure the theorems unless that was done, which takes minutes; writes its files, a page and the index."""
    make_folder(folder)
    if not (folder / "theory.json").exists():
        study = theory.measure(4096, 3, 16.0, progress=progress or (lambda done, total: None))
        theory_report.write(study, folder, theory_report.summary(study))
    write_index(folder)
    return [folder / name for name in (*theory_report.FILES, "theory.html")]


def _page(study: str, preset: str, found: Sequence[Row], figure: Figure | None) -> Page:
    shared = names.shared(found)
    found = names.without(found, shared)
    seeds = tables.most_seeds(found)
    sections = []
    for place, grid in enumerate(tables.grids(found)):
        beyond = pages.beyond_table(grid)
        text = "Points of accuracy on the same seeds" + (", with 95 % intervals by Student's t." if seeds > 1 else ".")
        heading = "Beyond labels-only training with matched steps"
        sections.append(
            Section(
                grid.title,
                grids=[pages.grid_table(grid, seeds)],
                below=words.definitions(found) if place == 0 else "",
                tables=[(heading, text, beyond)] if beyond else [],
            )
        )
    if failed := tables.failed(found):
        sections.append(Section("Failed", points=failed))
    if left := tables.missing(found):
        sections.append(Section("Not measured yet", list=left))
    quantity = words.quantity(found, seeds, columns=True)
    alt = f"{words.ABOUT[study]}: the numbers of the tables below"
    return Page(
        kicker=f"feddure reproduce {study}",
        title=words.ABOUT[study],
        lead=" ".join(filter(None, [words.setup(preset), words.throughout(shared), quantity])),
        sections=sections,
        notes=words.notes(found),
        pictures=[embed(figure, alt)] if figure else [],
        footer=pages.provenance(found),
    )


def _markdown(study: str, preset: str, found: Sequence[Row], name: str) -> str:
    shared = names.shared(found)
    found = names.without(found, shared)
    quantity = words.quantity(found, tables.most_seeds(found))
    lines = [
        f"# {words.ABOUT[study]}",
        "",
        " ".join(filter(None, [words.setup(preset), words.throughout(shared), quantity])),
        "",
        *(f"> {note}\n" for note in words.notes(found)),
        *([f"![{words.ABOUT[study]}]({name}.png)", ""] if _has_numbers(found) else []),
        tables.markdown(found, words.definitions(found)),
    ]
    if failed := tables.failed(found):
        lines += ["## Failed", "", *(f"- {line}".replace("<", r"\<") for line in failed), ""]
    if left := tables.missing(found):
        lines += ["## Not measured yet", "", *(f"- {line}" for line in left), ""]
    return "\n".join([*lines, *pages.provenance(found), ""])


def _has_numbers(found: Sequence[Row]) -> bool:
    """Whether there is something to draw."""
    return any(row.measured or row.paper is not None for row in found)


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
    for setting, title in reproduce_partitions.DEALT.items():
        dealt = reproduce_partitions.deal(dataset, setting)
        inside, outside = reproduce_partitions.imbalances(dealt, dataset)
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
        "with its unlabelled images, external imbalance compares clients by all their "
        "images; 0 is none, 1 the most. Both are of a whole setting."
    )
    figure = reproduce_partitions.picture(dataset)
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
