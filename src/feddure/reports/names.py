"""What experiments, their fields and their values are called in tables and figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from feddure import experiments
from feddure.config import Experiment
from feddure.tracking.summary import display_name

_NAMES = ("method", "dataset", "model")
"""Fields whose values are names that say by themselves what they are."""

_FIRST = ("method", "dataset", "partition.setting", "partition.gamma", "model", "local_steps", "seed")
"""Fields that tell runs apart at a glance; any other may follow."""


def labels(shown: Sequence[Experiment], names: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[str]:
    """A short name for each experiment: what tells it apart, and for equal ones their `names` or numbers."""
    trees = [experiments.flat(experiment) for experiment in shown]
    different = [key for key in experiments.differences(shown) if key not in ignore] if shown else []
    # Where nothing else names the method, a single one still does.
    chosen = ["method"] if len({tree["method"] for tree in trees}) == 1 else []

    def named(keys: Sequence[str]) -> list[str]:
        return [
            combination("", {key: tree[key] for key in keys if experiments.counts(one, key)})
            for one, tree in zip(shown, trees, strict=True)
        ]

    found = named(chosen)
    for key in sorted(different, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
        longer = named([*chosen, key])
        if len(set(longer)) > len(set(found)):  # else the name would only be longer
            chosen, found = [*chosen, key], longer
    endings = names if len(set(names)) == len(trees) else [f"run {number}" for number in range(1, len(trees) + 1)]
    twice = {label for label in found if found.count(label) > 1}
    return [f"{label} ({ending})" if label in twice else label for label, ending in zip(found, endings, strict=True)]


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


def listed(names: Sequence[str], most: int = 8, comma: str = ", ") -> str:
    """Names as a sentence lists them: a, b and c, or a, b and 3 more."""
    first = [*names[:most], f"{len(names) - most} more"] if len(names) > most else list(names)
    return " and ".join([*filter(None, [comma.join(first[:-1])]), *first[-1:]])


def data_size(count: float) -> str:
    """Bytes as people write them: 1.87 kB."""
    unit = 0
    while count >= 999.5 and unit < 4:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def _is_the_papers(key: str, value: Any) -> bool:
    """A setting of the paper is known by its name; a bare 'fedmatch' or 'sites' would not be seen to be a setting."""
    return key == "partition.setting" and "-" in value
