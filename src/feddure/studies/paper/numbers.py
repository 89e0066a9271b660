"""The paper's printed numbers, and its words for methods and settings."""

import csv
from functools import cache
from importlib import resources

from feddure import methods

Place = tuple[str, str, str]
"""Data set, setting and method of a printed number."""

ROUNDS = 200

PRESETS = ("aaai24", "aaai24-fine")
"""The paper's set-up, read in two ways."""

_VARIANTS = {"baseline": "fedavg-fixmatch"}  # table 2 has words of its own


def printed(study: str) -> dict[Place, float]:
    """Accuracies in per cent as the paper prints them for a study, in its order; its charts print none.

    Figure 1 shows how runs of table 1 came to their numbers.
    """
    if study == "figure1":
        return {place: value for place, value in _read("table1").items() if place[:2] == ("cifar10", "dir-dir")}
    return _read(study) if study in ("table1", "table2") else {}


def method_name(method: str, study: str = "") -> str:
    """A method as the paper writes it; the ablation calls one of them its baseline."""
    if study == "table2" and method == "fedavg-fixmatch":
        return "Baseline"
    return methods.title(method)


def setting_name(setting: str) -> str:
    """A setting as the paper writes it."""
    return setting.upper()


@cache
def _read(table: str) -> dict[Place, float]:
    text = (resources.files("feddure.studies.paper") / f"{table}.csv").read_text(encoding="utf-8")
    found = {}
    for line in csv.DictReader(text.splitlines()):
        method = line.get("method") or line["variant"]
        found[line["dataset"], line["setting"], _VARIANTS.get(method, method)] = float(line["accuracy"])
    return found
