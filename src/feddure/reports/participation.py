"""Which sites of a federation took part in a run, from its records: for the operator of the server."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from feddure.tracking.records import Run
from feddure.tracking.summary import NOTHING, percent


@dataclass(frozen=True)
class Participation:
    """A row a site, and sentences on what went wrong with some of them."""

    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def participation(run: Run) -> Participation | None:
    """How often each site was drawn, answered and failed; None where the run had no sites of a real federation."""
    rounds = [record["federation"] for record in run.metrics if "federation" in record]
    if not rounds or run.experiment.partition.setting != "sites":
        return None
    about = {site["site"]: site for site in run.federation.get("sites", ())}
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in (*run.federation.get("names", ()), *about)}
    away: Counter[str] = Counter()
    for found in rounds:
        away.update(found["drawn_but_away"])
        for entry in found["sites"]:
            drawn.setdefault(entry["site"], []).append(entry)
    columns = ["site", "labelled", "unlabelled", "unreadable", "drawn", "took part", "away", "failed", "own test"]
    rows = [_row(name, about.get(name, {}), entries, away[name]) for name, entries in drawn.items()]
    notes = [f"{name} was never connected." for name in drawn if name not in about]
    notes += [f"Last problem of {name}: {last}" for name, entries in drawn.items() if (last := _last_problem(entries))]
    notes += [f"Refused: {reason}" for reason in dict.fromkeys(why for found in rounds for why in found["refused"])]
    return Participation(columns, rows, notes)


def _row(name: str, about: dict[str, Any], entries: list[dict[str, Any]], away: int) -> list[str]:
    problems = [entry["problem"] for entry in entries if "problem" in entry]
    tests = [entry["test_of_received_model"] for entry in entries if "test_of_received_model" in entry]
    accuracy = tests[-1].get("accuracy") if tests else None
    counts = [f"{about[kind]:,}" if kind in about else NOTHING for kind in ("labelled", "unlabelled", "unreadable")]
    taken = (len(entries), len(entries) - len(problems), away, len(problems) - away)
    return [name, *counts, *(f"{count:,}" for count in taken), percent(accuracy, 1)]


def _last_problem(entries: list[dict[str, Any]]) -> str:
    return next((entry["problem"] for entry in reversed(entries) if "problem" in entry), "")
