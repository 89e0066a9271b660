"""What rows are called in figures: names that fit their room, and what all rows share said once."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from feddure.studies.paper.numbers import method_name
from feddure.studies.paper.rows import REFERENCE, Row

MOST_LINES = 8
"""Of a name; the tables have the rest of it."""

_BETWEEN_OPTIONS = re.compile(r" (?=[A-Za-z_][\w.]*=)")  # a value may have spaces of its own
_MAY_END_A_LINE = ".:=_/,-"
_HINTED = 1.1  # letters are drawn on whole pixels, which makes lines this much longer at the most
_KINDS = {
    "fedavg": "FedAvg*: labels only",
    REFERENCE: "FedAvg*: labels only, matched steps",
    "fedavg-sl": "FedAvg-SL: fully supervised",
    "fedprox-sl": "FedProx-SL: fully supervised",
}


def shared(rows: Iterable[Row]) -> tuple[str, ...]:
    """The options that all rows have, in the order of the first."""
    options = [_BETWEEN_OPTIONS.split(row.options) if row.options else [] for row in rows]
    return tuple(part for part in options[0] if all(part in own for own in options)) if options else ()


def without(rows: Iterable[Row], options: Sequence[str]) -> list[Row]:
    """The rows with these options left out of their names."""
    found = []
    for row in rows:
        left = [part for part in _BETWEEN_OPTIONS.split(row.options) if part not in options]
        found.append(replace(row, options=" ".join(left)))
    return found


def in_words(method: str, options: str) -> str:
    """A method's name with what it learns from, where that is not the rule."""
    return _KINDS.get(method, method_name(method)) + (f", {options}" if options else "")


def fitted(text: str, width: float, size: float = 9, weight: str = "normal", most: int = MOST_LINES) -> list[str]:
    """The text in lines no wider than this many inches: broken at spaces, and inside of words that are wider alone.

    Fits text of 9 points unless told; what needs more than `most` lines ends in an ellipsis.
    """

    def fits(part: str) -> bool:
        return inches([part], size, weight) <= width

    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if fits(joined):
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while not fits(word) and len(word) > 1 and len(lines) <= most:
            letters = next(count for count in range(1, len(word)) if not fits(word[: count + 1]))
            ends = [place for place in range(letters // 2 + 1, letters + 1) if word[place - 1] in _MAY_END_A_LINE]
            cut = max(ends, default=letters)
            lines[-1:] = [word[:cut], ""]
            word = word[cut:]
        lines[-1] = word
        if len(lines) > most:
            break
    if len(lines) > most:
        last = lines[most - 1]
        while last and not fits(f"{last}…"):
            last = last[:-1]
        lines = [*lines[: most - 1], f"{last}…"]
    return lines


def inches(lines: Iterable[str], size: float = 9, weight: str = "normal") -> float:
    """The width of the widest line in a figure, at most."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    widths = [text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] for line in lines]
    return max(widths, default=0.0) / 72 * _HINTED


def drawn(lines: Iterable[str]) -> str:
    """Lines as one text for matplotlib, which would read a formula between dollar signs."""
    return "\n".join(lines).replace("$", r"\$")


def write(canvas: Figure, down: float, lines: Iterable[str], **look: Any) -> None:
    """Lines of text, where there are any, this far below the top, in inches."""
    across, up = canvas.get_size_inches()
    text = drawn(lines)
    if text:
        canvas.text(0.12 / across, 1 - down / up, text, va="top", **look)
