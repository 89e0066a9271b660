"""What the fields and values of experiments are called in tables and figures."""

from collections.abc import Mapping
from typing import Any

from feddure.tracking.summary import display_name

_NAMES = ("method", "dataset", "model")
"""Fields whose values are names that say by themselves what they are."""


def combination(case: str, values: Mapping[str, Any]) -> str:
    """A combination by its case, if there are any, and its values."""
    return ", ".join([*([case] if case else []), *(part(key, value) for key, value in values.items())])


def part(key: str, value: Any) -> str:
    """A value as a part of a name: FedDure, DIR-DIR, or learning rate 0.001."""
    alone = key in _NAMES or _is_the_papers(key, value)
    return shown(key, value) if alone else f"{axis(key)} {shown(key, value)}"


def shown(key: str, value: Any) -> str:
    """A value in a column that has the field's name."""
    if _is_the_papers(key, value):
        return str(value).upper()
    if key in _NAMES:
        return display_name(value)
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def axis(key: str) -> str:
    """A field as tables and figures call it: its last word, as 'learning rate' for optimizer.learning_rate."""
    section, _, name = key.rpartition(".")
    name = name.replace("_", " ")
    return name if section in ("", "partition", "optimizer", "options") else f"{section} {name}"


def data_size(count: float) -> str:
    """Bytes as people write them: 1.87 kB."""
    unit = 0
    while count >= 999.5 and unit < 4:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def _is_the_papers(key: str, value: Any) -> bool:
    """A setting of the paper is known by its name; a bare 'fedmatch' or 'sites' would not be seen to be a setting."""
    return key == "partition.setting" and "-" in value
