"""The files of a reproduction's folder: each whole or not at all, and an index that links what lies there."""

from pathlib import Path

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.studies.paper import pages, words
from feddure.studies.paper.pages import Page, Section
from feddure.studies.paper.theory_page import theory_page

MARK = "<!-- Written by feddure reproduce; it is made anew each time. -->"


def write_files(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Write files by name, and the index; returns their paths."""
    make_folder(folder)
    for name, content in contents.items():
        write_whole(folder / name, content, RunError)
    write_index(folder)
    return [folder / name for name in contents]


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: the folder cannot be made ({problem.strerror})") from None


def write_index(folder: Path) -> list[Path]:
    """index.html and README.md: links to everything that lies in the folder; theory's findings become a page first."""
    theory = theory_page(folder, words.ABOUT["theory"])
    if theory is not None:
        write_whole(folder / "theory.html", pages.render(theory).encode(), RunError)
    links = []
    for name, about in words.ABOUT.items():
        for key in sorted({path.stem for path in folder.glob(f"{name}*") if path.suffix in (".html", ".md")}):
            files = [f"{key}.{end}" for end in ("html", "md", "png", "csv") if (folder / f"{key}.{end}").exists()]
            links.append((key, about, files))
    lead = "The tables, charts and claims of the paper, measured, with its numbers beside ours."
    page = Page("feddure reproduce", "FedDure, reproduced", lead, [Section("What is here", links=links)])
    readme = [MARK, "# FedDure, reproduced", "", lead, "", "| | | files |", "|---|---|---|"]
    for key, about, every in links:
        files = [file for file in every if not file.endswith(".html")] or every  # Markdown leads on to Markdown
        listed = ", ".join(f"[{file.rpartition('.')[2]}]({file})" for file in files)
        readme.append(f"| [{key}]({files[0]}) | {about} | {listed} |")
    readme += [
        "",
        "`results.csv` has a line for each study and measured cell, `cells.jsonl` all with curves and diagnostics.",
        "",
    ]
    contents = {"index.html": pages.render(page).encode()}
    if not (folder / "README.md").exists() or (folder / "README.md").read_bytes().startswith(MARK.encode()):
        contents["README.md"] = "\n".join(readme).encode()
    for name, content in contents.items():
        write_whole(folder / name, content, RunError)
    return [folder / name for name in contents]
