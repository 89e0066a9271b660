"""Pages in one style, as HTML and as Markdown. HTML needs nothing beside itself, and no network.

Pages read without script; with it charts tell values, and their legends hide lines.

A page is a heading with what to know first, headline numbers, and sections made of the parts below. Templates of
other pages extend `page.html.j2`.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports import style
from feddure.version import VERSION

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Of _ and * those that can begin emphasis, of ] those that can end a link's text, of \ those that would undo the rest.
_MARKUP = re.compile(r"[|<]|(?<![^\W_])_|(?<!\w)\*|\*(?=\w)|\](?=[(\[])|\\(?=[!-/:-@\[-`{-~])")
MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", ">": "▶", "<": "◀"}


@dataclass(frozen=True)
class Picture:
    """A figure as the page embeds it, and how to read it."""

    alt: str
    width: int
    height: int
    caption: str = ""
    reading: str = ""
    svg: str = ""
    values: str = ""  # that can be pointed at, as JSON


@dataclass(frozen=True)
class Table:
    """Column names, and rows whose first cell names them; `marked` rows are highlighted."""

    columns: list[str]
    rows: list[list[str]]
    marked: frozenset[str] = frozenset()
    numbers_from: int = 99  # columns from here on are aligned to the right
    formats: Sequence[style.LineStyle | None] = ()  # of the rows' lines in figures
    kind: str = "runs"  # or fields, of a configuration, or prose, of sentences

    @property
    def swatches(self) -> list[tuple[str, str] | None]:
        """Colour and sign of each row."""
        known = [fmt or {} for fmt in self.formats]
        return [(style.themed(fmt["color"]), MARKS.get(fmt["marker"], "●")) if fmt else None for fmt in known]


@dataclass(frozen=True)
class Text:
    """A paragraph; a `fact` is small."""

    text: str
    kind: str = "above"


@dataclass(frozen=True)
class Code:
    """Text for a terminal or a file."""

    text: str


@dataclass(frozen=True)
class Files:
    """Links that save texts from the page, by name."""

    text: str
    files: dict[str, str]

    def links(self) -> list[tuple[str, str]]:
        """Names and data URIs."""
        encoded = {name: base64.b64encode(text.encode(errors="replace")) for name, text in self.files.items()}
        return [(name, f"data:text/plain;base64,{code.decode()}") for name, code in encoded.items()]


@dataclass(frozen=True)
class Group:
    """Parts side by side, or folded away under a summary."""

    parts: Sequence[Any]
    summary: str = ""
    opened: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it."""

    heading: str
    text: str = ""
    parts: Sequence[Any] = ()


def page(
    kicker: str,
    title: str,
    lead: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    notes: Sequence[str] = (),
    cards: Sequence[tuple[str, str, str]] = (),
    footer: Sequence[str] = (),
) -> str:
    """A page as HTML: `lead` has paragraphs with what they are about, `cards` (what, value, note)."""
    about: dict[str, Any] = {"title": title, "lead": lead, "notes": notes, "cards": cards, "footer": footer}
    return render("page.html.j2", kicker=kicker, sections=sections, **about)


def write(
    folder: Path,
    name: str,
    kicker: str,
    title: str,
    lead: str,
    sections: Sequence[Section],
    notes: Sequence[str] = (),
    footer: Sequence[str] = (),
    draw: "Callable[[], Figure] | None" = None,
) -> Path:
    """Write a page as Markdown, its figure and HTML, each whole or not at all; `kicker` is the command that asks."""
    command = " ".join(kicker.split()[:2])
    blocks = [f"<!-- Written by {command}; it is made anew each time. -->\n# {title}", lead]
    blocks += [*(f"> {note}" for note in notes), *([f"![{title}]({name}.png)"] if draw else [])]
    for section in sections:
        blocks += [f"## {section.heading}", section.text, *map(markdown, section.parts)]
    text = "\n\n".join(filter(None, [*blocks, *footer])) + "\n"
    write_whole(folder / f"{name}.md", text.encode(), RunError)  # even if the figure fails
    if draw:
        figure = draw()
        write_whole(folder / f"{name}.png", style.render(figure, "png"), RunError)
        sections = [Section("", parts=[embed(figure, f"{title}: the numbers of the tables")]), *sections]
    path, html = folder / f"{name}.html", page(kicker, title, [("", lead)], sections, notes, footer=footer)
    write_whole(path, html.encode(), RunError)
    return path


def markdown(part: Any) -> str:
    """A part as Markdown."""
    if isinstance(part, Table):
        marks = ["---" if place < part.numbers_from else "---:" for place in range(len(part.columns))]
        head, *lines = [list(map(escaped, line)) for line in (part.columns, *part.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))
    if isinstance(part, Group):
        return "\n".join(f"- {escaped(one.text)}" for one in part.parts)
    return f"### {escaped(part.text)}" if part.kind == "heading" else escaped(part.text)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, even in a table."""
    return " ".join(_MARKUP.sub(r"\\\g<0>", text).splitlines())


def render(template: str, live: str = "", **content: Any) -> str:
    """A template of this package with its content; all text is escaped.

    No script runs but `page.js`; on a `live` page another one of this package does too, and may ask the page's server.
    """
    loader = _environment().loader
    assert loader is not None
    text = "".join(loader.get_source(_environment(), name)[0] for name in ("page.js", live) if name)
    allowed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    policy += "; connect-src 'self'" * bool(live)
    about = {"version": VERSION, "policy": policy, "script": text, "dark": style.DARK}
    return _environment().get_template(template).render(about | content)


def embed(figure: "Figure", alt: str, caption: str = "", reading: str = "") -> Picture:
    """A figure as a page can hold it."""
    from feddure.reports import inline  # matplotlib, which the live page does without

    across, up = figure.get_size_inches()
    drawn = inline.svg(figure)
    found = inline.values(figure)  # where axes lie is known now
    values = json.dumps(found, separators=(",", ":"), allow_nan=False) if found["panels"] else ""
    return Picture(alt, round(100 * across), round(100 * up), caption, reading, drawn, values)


def table(frame: "pd.DataFrame", **about: Any) -> Table:
    """A frame of texts as a page shows it."""
    rows = [[str(value) for value in row] for row in frame.itertuples(index=False)]
    return Table([str(name) for name in frame.columns], rows, **about)


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("feddure.reports")
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters["kind"] = lambda part: type(part).__name__
    return made
