"""Texts between sites and server: nothing private on the way out, harmless where they are shown."""

import os
import re
from typing import Any, TypeVar

from feddure.errors import FeddureError

LOG_MARK = "FEDDURE_LOG_MARK"
"""Of the environment: a word of a site's own, without which a line of its log is not shown as one of feddure's."""
_PUBLIC = "public"
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_Error = TypeVar("_Error", bound=FeddureError)


def printable(text: str, limit: int = 2000) -> str:
    """Lines without anything that a terminal would obey: sites and logs must leave titles and earlier lines alone."""
    cut = text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more)"
    return "".join(_shown(character) for character in _ESCAPE_SEQUENCE.sub("", cut))


def one_line(text: Any, limit: int = 300) -> str:
    """A text that may come from anyone, as one printable line of bounded length."""
    return printable(str(text), limit).replace("\n", " ")


def _shown(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"


def log_prefix(mark: str = "") -> str:
    """How every line begins that is meant for the person at this end; the rest of a log is Flower's."""
    return f"feddure {mark}: " if mark else "feddure: "


def log(text: str) -> None:
    """A line in the log of this process: `flwr log` shows the server's, `feddure federate site` a site's."""
    print(f"{log_prefix(os.environ.get(LOG_MARK, ''))}{one_line(text, 2000)}", flush=True)


def disclosed(error: _Error, text: str = "") -> _Error:
    """The error, with what the server may be told of it: `text`, or all of it where it names nothing of the site."""
    setattr(error, _PUBLIC, text or str(error))
    return error


def public_text(error: BaseException) -> str:
    """What the server is told of an error; its message may name folders, files and so patients."""
    return getattr(error, _PUBLIC, "") or f"{type(error).__name__} at the site; its log has the details"
