"""How a claim is judged: the comparisons it rests on, a criterion in words, and the verdict that follows from them.

A sign is told only by an interval that lies wholly on one side of 0, for a claim and against it alike; a mean whose
interval crosses 0 decides nothing. A claim of which only a part is measured can be refuted, but does not hold yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from feddure.studies.paper.rows import Difference, signed

Verdict = Literal["holds", "does not hold", "undecided", "not measured"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "undecided", "not measured")

NEAR = 3.0
"""Points within which two numbers count as the same; a choice, stated with every criterion that uses it."""

_INTERVAL = "the 95 % interval over seeds"
_PART = "or only a part is measured"
_NOTHING = "Nothing of it is measured yet."
_NAMED = 3  # comparisons that a sentence names


class Criterion(NamedTuple):
    """What a claim needs to hold; claims of the same kind share it."""

    title: str
    words: str


@dataclass(frozen=True)
class Comparison:
    """One difference that a claim rests on; None where it is not measured."""

    name: str
    difference: Difference | None
    paper: float | None = None  # the paper's own difference

    @property
    def mean(self) -> float:
        assert self.difference is not None
        return self.difference.mean

    def __str__(self) -> str:
        ours = "not measured" if self.difference is None else str(self.difference)
        return f"{self.name}: {ours}" + ("" if self.paper is None else f" (paper {signed(self.paper, 2)})")


@dataclass(frozen=True)
class Judgement:
    """A verdict with its criterion and a sentence that says why."""

    verdict: Verdict
    criterion: Criterion
    sentence: str


def all_above(comparisons: Sequence[Comparison]) -> Judgement:
    """Every difference is above 0 by more than chance."""
    return _all(comparisons, "above", lambda found: found.above, lambda found: found.below)


def all_below(comparisons: Sequence[Comparison]) -> Judgement:
    """Every difference is below 0 by more than chance."""
    return _all(comparisons, "below", lambda found: found.below, lambda found: found.above)


def some_below(comparisons: Sequence[Comparison]) -> Judgement:
    """At least one difference is below 0 by more than chance, of those that are below 0 in the paper.

    Other methods may be below 0 here; the sentence names them, but they are not what the paper speaks of.
    """
    criterion = Criterion(
        "Some differences below 0",
        f"Counted are the differences that the paper's own table puts below 0. Holds if for at least one of them "
        f"{_INTERVAL} lies wholly below 0; does not hold if for all of them it lies wholly above 0; undecided "
        f"otherwise: no difference can be told, {_PART}.",
    )
    counted = [found for found in comparisons if found.paper is not None and found.paper < 0]
    others = _but(_measured(comparisons), counted)
    them = "it" if len(others) == 1 else "them"
    beside = f" Not counted, as the paper has {them} above 0: {_named(others)}." if others else ""
    if any(found.difference is not None and found.difference.below for found in others):
        beside += " Read literally the claim holds, by what is not counted."
    measured = _measured(counted)
    lower = [found for found, difference in measured if difference.below]
    higher = [found for found, difference in measured if difference.above]
    if not measured:
        return Judgement("not measured", criterion, _NOTHING)
    if lower:
        return Judgement("holds", criterion, _count(counted, lower, "wholly below 0") + beside)
    if len(higher) == len(counted):
        return Judgement("does not hold", criterion, _count(counted, higher, "wholly above 0") + beside)
    return Judgement("undecided", criterion, _untold(counted, _but(measured, higher), "above") + beside)


def as_large(comparison: Comparison, partly: str = "") -> Judgement:
    """A gain as large as the paper's; `partly` says what is measured where that is not enough for a difference."""
    theirs = comparison.paper
    assert theirs is not None
    criterion = Criterion(
        "A gain as large as the paper's",
        f"Holds if our difference is within {NEAR:g} points of the paper's and {_INTERVAL} lies wholly above 0; does "
        f"not hold if it is further away; undecided if it is as near but its interval reaches 0, there is one seed, "
        f"{_PART}.",
    )
    if comparison.difference is None:
        return Judgement("undecided" if partly else "not measured", criterion, partly or _NOTHING)
    ours = comparison.mean
    beside = f"{comparison.name}: ours is {comparison.difference}, the paper's {signed(theirs, 2)}"
    if abs(ours - theirs) > NEAR:
        how = "less" if ours < theirs else "more"
        return Judgement("does not hold", criterion, f"{beside}: {abs(ours - theirs):.1f} points {how}.")
    if not comparison.difference.above:
        return Judgement("undecided", criterion, f"{beside}; {_why_open([comparison])}.")
    return Judgement("holds", criterion, f"{beside}.")


def near_or_above(comparisons: Sequence[Comparison]) -> Judgement:
    """No difference is far below 0."""
    criterion = Criterion(
        "No difference far below 0",
        f"Holds if every difference is {signed(-NEAR, 0)} points or more on average; does not hold if one is less; "
        f"undecided if only a part is measured.",
    )
    return _on_average(comparisons, criterion, lambda mean: mean >= -NEAR, f"below {signed(-NEAR, 0)}")


def small(comparisons: Sequence[Comparison]) -> Judgement:
    """Every difference is small, whatever its sign."""
    criterion = Criterion(
        "Every difference small",
        f"Holds if every difference is at most {NEAR:g} points in size on average; does not hold if one is larger; "
        f"undecided if only a part is measured.",
    )
    return _on_average(comparisons, criterion, lambda mean: abs(mean) <= NEAR, f"larger than {NEAR:g} points")


def _all(
    comparisons: Sequence[Comparison],
    side: str,
    right: Callable[[Difference], bool],
    wrong: Callable[[Difference], bool],
) -> Judgement:
    opposite = {"above": "below", "below": "above"}[side]
    criterion = Criterion(
        f"Every difference {side} 0",
        f"Holds if for every difference {_INTERVAL} lies wholly {side} 0; does not hold if for one of them it lies "
        f"wholly {opposite} 0; undecided otherwise: no difference can be told, {_PART}.",
    )
    measured = _measured(comparisons)
    against = [found for found, difference in measured if wrong(difference)]
    told = [found for found, difference in measured if right(difference)]
    if not measured:
        return Judgement("not measured", criterion, _NOTHING)
    if against:
        return Judgement("does not hold", criterion, _count(comparisons, against, f"wholly {opposite} 0"))
    if len(told) < len(measured):
        return Judgement("undecided", criterion, _untold(comparisons, _but(measured, told), side))
    if len(measured) < len(comparisons):
        return Judgement("undecided", criterion, f"So far as it goes: {_count(comparisons, told, f'wholly {side} 0')}")
    if len(comparisons) > 1:
        return Judgement("holds", criterion, f"All {len(comparisons)} are; the least: {_least(comparisons)}.")
    return Judgement("holds", criterion, f"{comparisons[0]}.")


def _on_average(
    comparisons: Sequence[Comparison], criterion: Criterion, fits: Callable[[float], bool], otherwise: str
) -> Judgement:
    measured = _measured(comparisons)
    wrong = [found for found, difference in measured if not fits(difference.mean)]
    if not measured:
        return Judgement("not measured", criterion, _NOTHING)
    if wrong:
        return Judgement("does not hold", criterion, _count(comparisons, wrong, otherwise))
    shown = _named([found for found, _ in measured])
    if len(measured) < len(comparisons):
        return Judgement("undecided", criterion, f"{len(measured)} of {len(comparisons)} are measured: {shown}.")
    return Judgement("holds", criterion, f"{shown}.")


def _measured(comparisons: Sequence[Comparison]) -> list[tuple[Comparison, Difference]]:
    return [(found, found.difference) for found in comparisons if found.difference is not None]


def _but(measured: Sequence[tuple[Comparison, Difference]], told: Sequence[Comparison]) -> list[Comparison]:
    return [found for found, _ in measured if found not in told]


def _count(comparisons: Sequence[Comparison], chosen: Sequence[Comparison], what: str) -> str:
    """How many of the comparisons are so, and the largest of them."""
    what += ", by one seed" if _by_one_seed(chosen) else ""
    if len(comparisons) == 1:
        return f"{chosen[0]}, {what}."
    return f"{len(chosen)} {_of(comparisons)} {'is' if len(chosen) == 1 else 'are'} {what}: {_named(chosen)}."


def _untold(comparisons: Sequence[Comparison], open_ones: Sequence[Comparison], side: str) -> str:
    """Of how many comparisons the seeds tell no sign, the largest of them, and on which side the others are."""
    if len(comparisons) == 1:
        return f"{open_ones[0]}: {_why_open(open_ones)}."
    told = len(_measured(comparisons)) - len(open_ones)
    others = f" The other {'one is' if told == 1 else f'{told} are'} wholly {side} 0." if told else ""
    every = "both" if len(comparisons) == 2 else f"all {len(comparisons)}"
    each = every if len(open_ones) == len(comparisons) else f"{len(open_ones)} {_of(comparisons)}"
    return f"For {each} {_why_open(open_ones)}: {_named(open_ones)}.{others}"


def _of(comparisons: Sequence[Comparison]) -> str:
    done = len(_measured(comparisons))
    return f"of {done}" if done == len(comparisons) else f"of the {done} measured (of {len(comparisons)})"


def _named(comparisons: Sequence[Comparison]) -> str:
    largest = sorted(comparisons, key=lambda found: abs(found.mean), reverse=True)
    more = f"; and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
    return "; ".join(map(str, largest[:_NAMED])) + more


def _least(comparisons: Sequence[Comparison]) -> Comparison:
    return min(comparisons, key=lambda found: abs(found.mean))


def _why_open(comparisons: Sequence[Comparison]) -> str:
    return "one seed cannot tell a difference from chance" if _by_one_seed(comparisons) else "no difference can be told"


def _by_one_seed(comparisons: Sequence[Comparison]) -> bool:
    return all(found.difference is not None and found.difference.seeds < 2 for found in comparisons)
