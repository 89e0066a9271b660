"""Tables, pages and lines in the terminal."""

import shlex
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Column, Table

from feddure.terminal import Console

if TYPE_CHECKING:
    import pandas as pd

_WIDEST_HEAD = 12  # characters of a line above a column of numbers


def plain_console(stderr: bool = False) -> Console:
    """Prints paths as they are: on one line, and without a meaning for [brackets] and :colons:."""
    return Console(stderr=stderr, soft_wrap=True, markup=False, highlight=False, emoji=False)


def tell_folder(console: Console, what: str, folder: Path) -> None:
    """Where a run or comparison is kept, once it is known to begin."""
    console.print(f"{what} folder: {folder}")
    console.print(f"follow it in a browser: feddure watch {shlex.quote(str(folder))}")


def tell_error(text: str) -> None:
    """The last thing that a command says."""
    console = plain_console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print("".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text))


def listing(*columns: str | Column, title: str | None = None) -> Table:
    """An empty table in the look of all that commands print."""
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def numbers(*names: str) -> list[Column]:
    """Columns whose values are aligned to the right and never broken."""
    return [Column(name, justify="right", no_wrap=True) for name in names]


def folded(name: str = "") -> Column:
    """A column of paths and other long words, which is folded where there is no room."""
    return Column(name, overflow="fold")


def show_page(path: Path) -> None:
    """The Markdown beside a page; formulas keep their _."""
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    Console().print(Markdown(text.replace("_", r"\_")))


def table(title: str, frame: "pd.DataFrame", caption: str = "", numbers_from: int = 99, wrapped: str = "") -> Table:
    """A frame of texts; columns from `numbers_from` on are aligned to the right, and only `wrapped` is wrapped."""
    found = listing(title=escape(title))
    found.caption, found.caption_justify = escape(caption), "left"
    for place, name in enumerate(frame.columns):
        right = place >= numbers_from
        head = fill(str(name), _WIDEST_HEAD, break_long_words=False) if right else str(name)
        found.add_column(escape(head), justify="right" if right else "left", no_wrap=name != wrapped)
    for row in frame.itertuples(index=False):
        found.add_row(*(escape(str(value)) for value in row))
    return found
