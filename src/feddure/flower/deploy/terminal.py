"""Text of others, made fit for the operator's terminal."""

import re

_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, characters: int = 2000) -> str:
    """A text without anything that a terminal would obey: lines of printable characters, at most so many.

    Sites and logs are not trusted to leave the operator's title, clipboard and earlier lines alone.
    """
    shortened = text if len(text) <= characters else f"{text[:characters]} … ({len(text) - characters:,} more)"
    return "".join(_shown(character) for character in _ESCAPE_SEQUENCE.sub("", shortened))


def _shown(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return " " if character.isspace() else _REPLACEMENT
