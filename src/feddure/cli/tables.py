"""Tables, pages and lines in the terminal."""

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    import pandas as pd

_WIDEST_HEAD = 12  # characters of a line above a column of numbers


def plain_console(stderr: bool = False) -> Console:
    """Prints paths as they are: on one line, and without a meaning for [brackets] and :colons:."""
    return Console(stderr=stderr, soft_wrap=True, markup=False, highlight=False, emoji=False)


def tell_error(text: str) -> None:
    """The last thing that a command says."""
    console = plain_console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print("".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text))


def show_page(path: Path) -> None:
    """The Markdown beside a page; formulas keep their _."""
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    Console().print(Markdown(text.replace("_", r"\_")))


def table(
    title: str, frame: "pd.DataFrame", caption: str | None = None, numbers_from: int = 99, wrapped: str = ""
) -> Table:
    """A frame of texts; columns from `numbers_from` on are aligned to the right, and only `wrapped` is wrapped."""
    found = Table(
        title=escape(title),
        title_justify="left",
        caption=caption and escape(caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for place, name in enumerate(frame.columns):
        right = place >= numbers_from
        head = fill(str(name), _WIDEST_HEAD, break_long_words=False) if right else str(name)
        found.add_column(escape(head), justify="right" if right else "left", no_wrap=name != wrapped)
    for row in frame.itertuples(index=False):
        found.add_row(*(escape(str(value)) for value in row))
    return found
