"""How a claim is judged: the comparisons it rests on, a criterion in words, and the verdict that follows from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from feddure.studies.reproduce_rows import Difference, signed

Verdict = Literal["holds", "does not hold", "undecided", "not measured"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "undecided", "not measured")

NEAR = 3.0
"""Points within which two numbers count as the same; a choice, stated with every criterion that uses it."""

_INTERVAL = "the 95 % interval over seeds"
_UNDECIDED = "undecided where the sign is right but the interval reaches 0, or there is only one seed"
_NAMED = 3  # comparisons that a sentence names


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
    criterion: str
    sentence: str


def all_above(comparisons: Sequence[Comparison]) -> Judgement:
    """Every difference is above 0 by more than chance."""
    return _all(comparisons, "above", lambda found: found.mean > 0, lambda found: found.above)


def all_below(comparisons: Sequence[Comparison]) -> Judgement:
    """Every difference is below 0 by more than chance."""
    return _all(comparisons, "below", lambda found: found.mean < 0, lambda found: found.below)


def some_below(comparisons: Sequence[Comparison]) -> Judgement:
    """At least one difference is below 0 by more than chance."""
    criterion = (
        f"Holds if at least one difference is below 0 with {_INTERVAL} wholly below 0; does not hold if none is below "
        f"0 on average; {_UNDECIDED}."
    )
    measured = _measured(comparisons)
    told = [found for found, difference in measured if difference.below]
    lower = [found for found, difference in measured if difference.mean < 0]
    if told:
        return Judgement("holds", criterion, _count(comparisons, told, "below 0 beyond chance"))
    if len(measured) < len(comparisons):
        return Judgement("not measured", criterion, _progress(comparisons))
    if lower:
        return Judgement("undecided", criterion, _count(comparisons, lower, f"below 0, but {_why_open(lower)}"))
    return Judgement("does not hold", criterion, f"None is below 0; the least: {_least(comparisons)}.")


def as_large(comparison: Comparison) -> Judgement:
    """A gain as large as the paper's."""
    theirs = comparison.paper
    assert theirs is not None
    criterion = (
        f"Holds if our difference is within {NEAR:g} points of the paper's {signed(theirs, 2)} and {_INTERVAL} is "
        f"wholly above 0; does not hold if it is further away; {_UNDECIDED}."
    )
    if comparison.difference is None:
        return Judgement("not measured", criterion, _progress([comparison]))
    ours = comparison.mean
    beside = f"{comparison.name}: ours is {comparison.difference}, the paper's {signed(theirs, 2)}"
    if abs(ours - theirs) > NEAR:
        how = "less" if ours < theirs else "more"
        return Judgement("does not hold", criterion, f"{beside}: {abs(ours - theirs):.1f} points {how}.")
    if not comparison.difference.above:
        return Judgement("undecided", criterion, f"{beside}; {_why_open([comparison])}.")
    return Judgement("holds", criterion, f"{beside}.")


def at_least(comparisons: Sequence[Comparison], least: float) -> Judgement:
    """No difference is lower than this."""
    each = "every difference" if len(comparisons) > 1 else "the difference"
    criterion = f"Holds if {each} is {signed(least, 0)} points or more on average, else it does not."
    return _on_average(comparisons, criterion, lambda mean: mean >= least, f"below {signed(least, 0)}")


def small(comparisons: Sequence[Comparison]) -> Judgement:
    """Every difference is small, whatever its sign."""
    criterion = f"Holds if every difference is at most {NEAR:g} points in size on average, else it does not."
    return _on_average(comparisons, criterion, lambda mean: abs(mean) <= NEAR, f"larger than {NEAR:g} points")


def _all(
    comparisons: Sequence[Comparison],
    side: str,
    right: Callable[[Difference], bool],
    told: Callable[[Difference], bool],
) -> Judgement:
    many = len(comparisons) > 1
    criterion = (
        f"Holds if {'every difference' if many else 'the difference'} is {side} 0 with {_INTERVAL} wholly {side} 0; "
        f"does not hold if {'one' if many else 'it'} is not {side} 0 on average; {_UNDECIDED}."
    )
    measured = _measured(comparisons)
    wrong = [found for found, difference in measured if not right(difference)]
    unsure = [found for found, difference in measured if right(difference) and not told(difference)]
    if wrong:
        return Judgement("does not hold", criterion, _count(comparisons, wrong, f"not {side} 0"))
    if len(measured) < len(comparisons):
        return Judgement("not measured", criterion, _progress(comparisons))
    if unsure:
        return Judgement("undecided", criterion, _count(comparisons, unsure, f"{side} 0, but {_why_open(unsure)}"))
    if many:
        return Judgement("holds", criterion, f"All {len(comparisons)} are; the least: {_least(comparisons)}.")
    return Judgement("holds", criterion, f"{comparisons[0]}.")


def _on_average(
    comparisons: Sequence[Comparison], criterion: str, fits: Callable[[float], bool], otherwise: str
) -> Judgement:
    measured = _measured(comparisons)
    wrong = [found for found, difference in measured if not fits(difference.mean)]
    if wrong:
        return Judgement("does not hold", criterion, _count(comparisons, wrong, otherwise))
    if len(measured) < len(comparisons):
        return Judgement("not measured", criterion, _progress(comparisons))
    return Judgement("holds", criterion, f"{_named(comparisons)}.")


def _measured(comparisons: Sequence[Comparison]) -> list[tuple[Comparison, Difference]]:
    return [(found, found.difference) for found in comparisons if found.difference is not None]


def _count(comparisons: Sequence[Comparison], chosen: Sequence[Comparison], what: str) -> str:
    """How many of the comparisons are so, and the largest of them."""
    if len(comparisons) == 1:
        return f"{chosen[0]}, {what}."
    return f"{len(chosen)} of {len(comparisons)} {'is' if len(chosen) == 1 else 'are'} {what}: {_named(chosen)}."


def _named(comparisons: Sequence[Comparison]) -> str:
    largest = sorted(comparisons, key=lambda found: abs(found.mean), reverse=True)
    more = f"; and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
    return "; ".join(map(str, largest[:_NAMED])) + more


def _least(comparisons: Sequence[Comparison]) -> Comparison:
    return min(comparisons, key=lambda found: abs(found.mean))


def _why_open(comparisons: Sequence[Comparison]) -> str:
    single = all(found.difference is not None and found.difference.seeds < 2 for found in comparisons)
    return "one seed cannot tell it from chance" if single else "the interval reaches 0"


def _progress(comparisons: Sequence[Comparison]) -> str:
    done = len(_measured(comparisons))
    return f"{done} of {len(comparisons)} comparisons measured so far." if done else "Nothing of it is measured yet."
