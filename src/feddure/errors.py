"""What this package raises when the user can do something about it."""

import difflib
from collections.abc import Iterable


class FeddureError(Exception):
    """A mistake in the input: the message says what was given, what was expected and what to do."""


class DataError(FeddureError):
    """A data set is missing, damaged or not what it claims to be."""


class ConfigError(FeddureError):
    """A configuration cannot be used as written."""


class RunError(FeddureError):
    """A run folder or a checkpoint cannot be used as asked."""


class FeddureWarning(UserWarning):
    """Something went on in a way the user should know about."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: the known name that looks most like this one; nothing where none does."""
    lower = {other.lower(): other for other in known}
    close = sorted((other for other in lower if len(name) > 2 and name.lower() in other), key=len)
    close = close or difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; did you mean '{lower[close[0]]}'?" if close else ""


def first_line(problem: Exception) -> str:
    """An exception's kind and the first line of what it says."""
    return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0] or 'no message'}"
