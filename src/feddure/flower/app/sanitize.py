"""What a site says to the server: without paths and names on its way out, and harmless on its way in."""

from typing import Any, TypeVar

from feddure.errors import FeddureError

SAID = "feddure: "
"""How every line begins that is meant for the person at this end; the rest of a log is Flower's."""
_PUBLIC = "public"
_Error = TypeVar("_Error", bound=FeddureError)


def plain(text: Any, most: int = 300) -> str:
    """A text that may come from anyone, as one line of printable characters and of bounded length."""
    found = str(text)[: most + 1]
    found = "".join(character if character.isprintable() else " " for character in found)
    return found if len(found) <= most else found[: most - 1] + "…"


def say(text: str) -> None:
    """A line in the log of this process: `flwr log` shows the server's, `feddure federate site` a site's."""
    print(f"{SAID}{plain(text, 2000)}", flush=True)


def sayable(error: _Error, public: str = "") -> _Error:
    """The error, with what the server may be told of it: `public`, or all of it where it names nothing of the site."""
    setattr(error, _PUBLIC, public or str(error))
    return error


def public_text(error: BaseException) -> str:
    """What the server is told of an error; the text itself may name folders, files and so patients."""
    return getattr(error, _PUBLIC, "") or f"{type(error).__name__} at the site; its log has the details"
