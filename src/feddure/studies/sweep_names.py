"""What the fields, values and combinations of a sweep are called in its tables and figures."""

from collections.abc import Mapping
from typing import Any

from feddure.studies.paper.numbers import setting_name
from feddure.tracking.summary import spoken

_SPOKEN = ("method", "dataset", "model")
"""Fields whose values are names that say by themselves what they are."""


def combination(case: str, values: Mapping[str, Any]) -> str:
    """A combination by its case, if there are any, and its values."""
    return ", ".join([*([case] if case else []), *(part(key, value) for key, value in values.items())])


def part(key: str, value: Any) -> str:
    """A value as a part of a name: FedDure, DIR-DIR, or learning rate 0.001."""
    if key in _SPOKEN or _is_the_papers(key, value):
        return shown(key, value)
    return f"{axis_name(key)} {written(value)}"


def shown(key: str, value: Any) -> str:
    """A value in a column that has the field's name."""
    if _is_the_papers(key, value):
        return setting_name(value)
    return spoken(value) if key in _SPOKEN else written(value)


def axis_name(key: str) -> str:
    """A field as tables and figures call it: its last word, as 'learning rate' for optimizer.learning_rate."""
    section, _, name = key.rpartition(".")
    spoken_name = name.replace("_", " ")
    return spoken_name if section in ("", "partition", "optimizer", "options") else f"{section} {spoken_name}"


def written(value: Any) -> str:
    """A value as tables and figures show it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_the_papers(key: str, value: Any) -> bool:
    """A setting of the paper is known by its name; a bare 'fedmatch' or 'sites' would not be seen to be a setting."""
    return key == "partition.setting" and "-" in value
