"""What `feddure theory` left in a folder, as a page in the look of the studies."""

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

from feddure.reports.run_report import Picture, Table
from feddure.studies.paper.claims import read_theory
from feddure.studies.paper.pages import Page, Section
from feddure.studies.theory.findings import Fit
from feddure.studies.theory.measure import SMALLEST
from feddure.studies.theory.report import slope

_DOTS_PER_PIXEL = 2  # the figure is drawn for screens with fine dots


def theory_page(folder: Path, about: str) -> Page | None:
    """Findings, figure and notes, where they lie in the folder."""
    report = read_theory(folder)
    if not report.get("findings"):
        return None
    settings, where = report["settings"], report["environment"]
    columns = ["quantity", "first", "last", "slope", "control", "its slope"]
    sections = []
    for number in (1, 2):
        own = [found for found in report["findings"] if found["theorem"] == number]
        verdicts = [f"{found['quantity']}. {found['verdict']}" for found in own]
        table = Table(columns, [_line(found) for found in own])
        sections.append(Section(f"Theorem {number}", tables=[("", "", table)], points=verdicts))
    reading = (
        f"First and last: geometric means over {settings['seeds']} seeds at {SMALLEST} and {settings['largest']}. "
        "Slopes: least squares of logarithms over that range ± standard error, one intercept per seed."
    )
    sections[0] = sections[0]._replace(below=reading)
    sections.append(Section("What it means", points=[*report["notes"], *report["meaning"]]))
    return Page(
        "feddure reproduce theory",
        about,
        "Both theorems on a small smooth network and full batches, each quantity beside a control that learns less.",
        sections,
        pictures=_picture(folder / "theory.png"),
        footer=[f"Measured on {where['cpu']}, {where['cores']} cores, with torch {where['torch']}."],
    )


def _line(found: dict[str, Any]) -> list[str]:
    ends = [f"{found[end]:.1e}" for end in ("first", "last")]
    fits = [slope(Fit(**found[name])) for name in ("fit", "control_fit")]
    return [found["quantity"], *ends, fits[0], found["control"], fits[1]]


def _picture(path: Path) -> list[Picture]:
    if not path.exists():
        return []
    content = path.read_bytes()
    across, up = Image.open(io.BytesIO(content)).size
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    alt = "The theorems' quantities and their controls against the number of steps"
    return [Picture(source, alt, across // _DOTS_PER_PIXEL, up // _DOTS_PER_PIXEL)]
