"""What the pages of the studies say in sentences."""

from collections.abc import Sequence

from feddure import config
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper import tables
from feddure.studies.paper.numbers import ROUNDS
from feddure.studies.paper.rows import Row, mean_of
from feddure.tracking.summary import spoken

ABOUT = {
    **{name: study.about for name, study in reproduce.STUDIES.items()},
    "partitions": "Who owns which images: FedMatch's Batch-NonIID beside DIR-DIR",
    "theory": "The two theorems, measured",
    "claims": "What the paper says in words, and whether our measurements say so too",
}
"""All that can be reproduced, in one sentence each."""

_WORDS = {
    ("fedavg",): "FedAvg* trains on labelled images alone, one pass over them in a round.",
    ("fedavg-matched",): "FedAvg* with matched steps trains on labelled images alone, with as many local steps as the "
    "semi-supervised methods.",
    ("fedavg-sl", "fedprox-sl"): "Methods with -SL use every training label.",
}
_REMARKS = {
    "table2": "Its baseline is FedAvg-FixMatch.",
    "gamma": "The paper prints no numbers for this chart.",
    "labels": "Every client takes 5 local steps at every share of labels. The paper prints no numbers for this chart.",
    "clients": "The paper names no setting for this chart; ours is DIR-DIR. It prints no numbers for it.",
}
_OF_THE_PAPER = {
    "figure1": "The paper's numbers are those of its table 1.",
    "table2": "The paper's table 2 and table 1 print different numbers for it under IID-DIR and IID-IID.",
}
"""Remarks on numbers of the paper, where there are any."""


def setup(preset: str) -> str:
    """What a preset is."""
    return f"Preset {preset}: {config.about(preset)}"


def throughout(options: Sequence[str]) -> str:
    """What all rows change, said once; nothing where they share nothing."""
    return f"All with {', '.join(options)}." if options else ""


def quantity(found: Sequence[Row], seeds: int, columns: bool = False) -> str:
    """What the numbers of the tables are; the paper's stand in brackets, or in columns of their own."""
    spread = f" ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed" if seeds else ""
    if any(0 < len(row.seeds) < seeds for row in found):
        spread += ", or n where there are fewer"
    beside = " (paper, ours − paper)" if _has_paper(found) and not columns else ""
    return f"Test accuracy in %, {mean_of(found)}{spread}{beside}."


def definitions(found: Sequence[Row]) -> str:
    """What the words in the tables mean, of those that are there."""
    study = found[0].study if found else ""
    there = {row.method for row in found}
    said = [words for methods, words in _WORDS.items() if there & set(methods)]
    remarks = [_REMARKS.get(study, ""), _OF_THE_PAPER.get(study, "") if _has_paper(found) else ""]
    steps = "Steps: local ones of a client in a round." if found else ""
    return " ".join(text for text in (steps, *said, *remarks) if text)


def state(found: Sequence[Row]) -> str:
    """How much of a study is measured."""
    done, left = sum(len(row.seeds) for row in found), sum(len(row.missing) for row in found)
    counted = {row.dataset for row in found if row.seeds or row.missing}
    others = [spoken(dataset) for dataset in dict.fromkeys(row.dataset for row in found) if dataset not in counted]
    aside = f" ({', '.join(others)} not counted)" if others and counted else ""
    failed = sum(len(row.failed) for row in found)
    vain = f"; {failed} failed" if failed else ""
    return f"{done} of {done + left} cells of this study are measured{vain}{aside}."


def notes(found: Sequence[Row]) -> list[str]:
    """What a reader must know before the numbers."""
    said = []
    done, left = sum(len(row.seeds) for row in found), sum(len(row.missing) for row in found)
    if left or not done:
        said.append(f"{state(found)} The others are listed at the end.")
    if tables.most_seeds(found) == 1:
        said.append("One seed has no deviation and no interval: differences of a few points may be chance.")
    rounds = sorted({measurement.rounds for row in found for measurement in row.measured.values()})
    if any(number != ROUNDS for number in rounds) and _has_paper(found):
        listed = f"{', '.join(map(str, rounds))} round{'s' * (rounds != [1])}"
        said.append(f"{listed}, not the {ROUNDS} of the paper: its numbers do not compare.")
    for dataset in dict.fromkeys(row.dataset for row in found):
        own = [row for row in found if row.dataset == dataset]
        if not any(row.measured for row in own) and done:
            preset = f" --preset {own[0].preset}" * (own[0].preset != reproduce.Request().preset)
            command = f"feddure reproduce {own[0].study} --datasets {dataset}{preset}"
            said.append(f"{spoken(dataset)} is not measured: its numbers are the paper's. {command} measures it.")
    return said


def _has_paper(found: Sequence[Row]) -> bool:
    return any(row.paper is not None for row in found)
