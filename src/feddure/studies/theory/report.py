"""The study of the theorems as files: every number, the findings, the figure and a page to read."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from feddure import environment
from feddure.errors import ConfigError
from feddure.files import write_whole
from feddure.reports import style
from feddure.studies.theory import findings, mathematics
from feddure.studies.theory.figures import figure
from feddure.studies.theory.findings import Finding, Fit
from feddure.studies.theory.measure import SMALLEST, Record, Study

FILES = ("theory.csv", "theory.json", "theory.png", "theory.md")

MEANING = (
    "Trivial by construction: ∇_θ L_s(φ_{t+1}(θ)) = −η_s (∂²(H·L)/∂φ∂θ)ᵀ ∇L_s(φ_{t+1}), so with η_s = e/T its square "
    "carries T⁻² whatever θ does.",
    "Bound by construction: under the theorems' steps θ goes at most T · c/√T · e/T · G = c·e·G/√T and φ at most k·G, "
    "where G bounds the gradients: the larger T is, the less θ can move, while φ's way cannot grow with T.",
    "Not shown: anything about mini-batches, Adam, ReLU, batch normalisation, hard labels, several clients, or "
    "accuracy; and a finite range of T says nothing certain about a limit.",
)
"""What needs no measurement to be known, and what this measurement does not touch."""


def summary(study: Study) -> dict[str, Any]:
    """Findings, notes and settings as plain values."""
    return {
        "environment": environment.describe(),
        "settings": {
            "dataset": "fashion-mini",
            "labelled": mathematics.LABELLED,
            "unlabelled": mathematics.UNLABELLED,
            "hidden_units": mathematics.HIDDEN,
            "largest": study.largest,
            "seeds": study.seeds,
            **study.constants._asdict(),
        },
        "findings": [
            {**found._asdict(), "fit": found.fit._asdict(), "control_fit": found.control_fit._asdict()}
            for found in findings.findings(study)
        ],
        "notes": findings.notes(study),
        "meaning": list(MEANING),
        "step_times_curvature": study.step_times_curvature,
        "perturbations": [perturbation._asdict() for perturbation in study.perturbations],
    }


def write(study: Study, folder: Path, report: dict[str, Any]) -> None:
    """Write the four files into the folder, each whole or not at all, and touch nothing else there."""
    contents = (
        table_of_records(study).encode(),
        (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode(),
        style.render(figure(study), "png"),
        page(study, report).encode(),
    )
    for name, content in zip(FILES, contents, strict=True):
        write_whole(folder / name, content, ConfigError)


def table_of_records(study: Study) -> str:
    """Every record as a line of CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Record._fields)
    writer.writerows(study.records)
    return text.getvalue()


def page(study: Study, report: dict[str, Any]) -> str:
    """The findings as Markdown."""
    about = report["environment"]
    lines = [
        "# The two theorems, measured",
        "",
        "| theorem | quantity | first | last | slope ± se | control | its slope ± se | verdict |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(found) for found in findings.findings(study)),
        "",
        f"First and last: geometric means over the seeds ({study.seeds}) at {SMALLEST} and {study.largest}. "
        "Slopes: least squares of logarithms over that range, one intercept per seed.",
        "",
        "![the figure](theory.png)",
        "",
        *(f"- {note}" for note in (*report["notes"], *report["meaning"])),
        "",
        f"`{about['command']}`, feddure {about['feddure']}, Python {about['python']}, torch {about['torch']}, "
        f"{about['cpu']}, {about['cores']} cores.",
        "",
    ]
    return "\n".join(lines)


def slope(fitted: Fit) -> str:
    """A slope and its error as a cell."""
    error = "–" if fitted.error is None else f"{fitted.error:.2f}"
    return f"{fitted.slope:+.2f} ± {error}".replace("-", "−")


def _row(found: Finding) -> str:
    cells = (
        str(found.theorem),
        found.quantity,
        f"{found.first:.1e}",
        f"{found.last:.1e}",
        slope(found.fit),
        found.control,
        slope(found.control_fit),
        found.verdict,
    )
    return f"| {' | '.join(cells)} |"
