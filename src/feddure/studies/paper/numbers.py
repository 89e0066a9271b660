"""The paper's printed numbers, and its words for methods."""

import csv
from functools import cache
from importlib import resources

from feddure import methods

Place = tuple[str, str, str]
"""Data set, setting and method of a printed number."""

ROUNDS = 200

PRESETS = ("aaai24", "aaai24-fine")
"""The paper's set-up, read in two ways."""


@cache
def printed(study: str) -> dict[Place, float]:
    """Accuracies in per cent as the paper prints them for a study, in its order; its charts print none.

    Figure 1 shows how runs of table 1 came to their numbers.
    """
    if study == "figure1":
        return {place: value for place, value in printed("table1").items() if place[:2] == ("cifar10", "dir-dir")}
    if study not in ("table1", "table2"):
        return {}
    text = (resources.files("feddure.studies.paper") / f"{study}.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(text.splitlines())
    return {(line["dataset"], line["setting"], line["method"]): float(line["accuracy"]) for line in lines}


def method_name(method: str, study: str = "") -> str:
    """A method as the paper writes it; the ablation calls one of them its baseline."""
    return "Baseline" if (study, method) == ("table2", "fedavg-fixmatch") else methods.title(method)
