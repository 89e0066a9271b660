"""What the paper claims in words, and whether our measurements say so too.

A claim rests on comparisons: differences of the mean of the last ten evaluations on the same seeds. It is judged by a
criterion that is written down with it. A sign is told only by an interval that lies wholly on one side of 0, for a
claim and against it alike; a mean whose interval crosses 0 decides nothing. A claim of which only a part is measured
can be refuted, but does not hold yet. The last claims are ours: what is left of the gains beside labels-only training
with as many local steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Literal, NamedTuple

from feddure.reports.frame import Difference, paired, signed
from feddure.studies.paper.plan import SETTINGS, STUDIES, axis_text, method_name, printed
from feddure.studies.paper.rows import Row
from feddure.studies.plan import REFERENCE
from feddure.studies.theory import report as theory
from feddure.tracking.summary import display_name

SEMI_SUPERVISED = ("fedavg-uda", "fedprox-uda", "fedavg-fixmatch", "fedprox-fixmatch", "fedmatch")
"""FedDure's rivals in table 1."""

CHART_RIVALS = ("fedmatch", "fedavg-fixmatch")
TABLE1_DATASETS = ("cifar10", "fashion-mnist", "cinic10")

NEAR = 3.0
"""Points within which two numbers count as the same; a choice, stated with every criterion that uses it."""

Verdict = Literal["holds", "does not hold", "undecided", "not measured"]
Judged = tuple[Verdict, str]
"""A verdict, and a sentence that says why."""

_NOT_MEASURED: Judged = ("not measured", "Nothing of it is measured yet.")
_INTERVAL = "the 95 % interval over seeds"
_PART = "or only a part is measured"
_NAMED = 3  # comparisons that a sentence names


@dataclass(frozen=True)
class Comparison:
    """One difference that a claim rests on; None where it is not measured."""

    name: str
    difference: Difference | None
    paper: float | None = None  # the paper's own difference
    partly: str = ""  # what is measured where that is not enough for a difference

    def __str__(self) -> str:
        ours = "not measured" if self.difference is None else str(self.difference)
        return f"{self.name}: {ours}" + ("" if self.paper is None else f" (paper {signed(self.paper, 2)})")


Comparisons = Sequence[Comparison]


class Criterion(NamedTuple):
    """What a claim needs to hold; claims of the same kind share it."""

    title: str
    words: str
    judge: Callable[[Comparisons], Judged]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, judged by what was measured under a preset."""

    name: str
    says: str
    where: str
    needs: str  # the study that measures it, with options
    preset: str
    criterion: Criterion
    comparisons: Comparisons
    verdict: Verdict
    sentence: str


# How a claim is judged.


def _one_sided(side: str, opposite: str) -> Criterion:
    def judge(comparisons: Comparisons) -> Judged:
        measured, told, against = _measured(comparisons), _on(side, comparisons), _on(opposite, comparisons)
        if not measured:
            return _NOT_MEASURED
        if against:
            return "does not hold", _count(comparisons, against, f"wholly {opposite} 0")
        if len(told) < len(measured):
            return "undecided", _untold(comparisons, _but(measured, told), side)
        if len(measured) < len(comparisons):
            return "undecided", _count(comparisons, told, f"wholly {side} 0")
        every = f"All {len(comparisons)} are; the least: " if len(comparisons) > 1 else ""
        return "holds", f"{every}{min(comparisons, key=_size)}."

    words = (
        f"Holds if for every difference {_INTERVAL} lies wholly {side} 0; does not hold if for one of them it lies "
        f"wholly {opposite} 0; undecided otherwise: no difference can be told, {_PART}."
    )
    return Criterion(f"Every difference {side} 0", words, judge)


def _judge_some_below(comparisons: Comparisons) -> Judged:
    """Other methods may be below 0 here; the sentence names them, but they are not what the paper speaks of."""
    counted = [found for found in comparisons if found.paper is not None and found.paper < 0]
    others = _but(_measured(comparisons), counted)
    them = "it" if len(others) == 1 else "them"
    beside = f" Not counted, as the paper has {them} above 0: {_named(others)}." if others else ""
    if _on("below", others):
        beside += " Read literally the claim holds, by what is not counted."
    measured, lower, higher = _measured(counted), _on("below", counted), _on("above", counted)
    if not measured:
        return _NOT_MEASURED
    if lower:
        return "holds", _count(counted, lower, "wholly below 0") + beside
    if len(higher) == len(counted):
        return "does not hold", _count(counted, higher, "wholly above 0") + beside
    return "undecided", _untold(counted, _but(measured, higher), "above") + beside


def _judge_as_large(comparisons: Comparisons) -> Judged:
    (comparison,) = comparisons
    ours, theirs = comparison.difference, comparison.paper
    assert theirs is not None
    if ours is None:
        return ("undecided", comparison.partly) if comparison.partly else _NOT_MEASURED
    beside = f"{comparison.name}: ours is {ours}, the paper's {signed(theirs, 2)}"
    if abs(ours.mean - theirs) > NEAR:
        how = "less" if ours.mean < theirs else "more"
        return "does not hold", f"{beside}: {abs(ours.mean - theirs):.1f} points {how}."
    return ("holds", f"{beside}.") if ours.above else ("undecided", f"{beside}; {_why_open(comparisons)}.")


def _on_average(title: str, words: str, fits: Callable[[float], bool], otherwise: str) -> Criterion:
    def judge(comparisons: Comparisons) -> Judged:
        measured = _measured(comparisons)
        wrong = [found for found in measured if found.difference and not fits(found.difference.mean)]
        if not measured:
            return _NOT_MEASURED
        if wrong:
            return "does not hold", _count(comparisons, wrong, otherwise)
        if len(measured) < len(comparisons):
            return "undecided", f"{len(measured)} of {len(comparisons)} are measured: {_named(measured)}."
        return "holds", f"{_named(measured)}."

    return Criterion(title, f"{words}; undecided if only a part is measured.", judge)


ALL_ABOVE = _one_sided("above", "below")
ALL_BELOW = _one_sided("below", "above")
SOME_BELOW = Criterion(
    "Some differences below 0",
    f"Counted are the differences that the paper's own table puts below 0. Holds if for at least one of them "
    f"{_INTERVAL} lies wholly below 0; does not hold if for all of them it lies wholly above 0; undecided "
    f"otherwise: no difference can be told, {_PART}.",
    _judge_some_below,
)
AS_LARGE = Criterion(
    "A gain as large as the paper's",
    f"Holds if our difference is within {NEAR:g} points of the paper's and {_INTERVAL} lies wholly above 0; does "
    f"not hold if it is further away; undecided if it is as near but its interval reaches 0, there is one seed, "
    f"{_PART}.",
    _judge_as_large,
)
NEAR_OR_ABOVE = _on_average(
    "No difference far below 0",
    f"Holds if every difference is {signed(-NEAR, 0)} points or more on average; does not hold if one is less",
    lambda mean: mean >= -NEAR,
    f"below {signed(-NEAR, 0)}",
)
SMALL = _on_average(
    "Every difference small",
    f"Holds if every difference is at most {NEAR:g} points in size on average; does not hold if one is larger",
    lambda mean: abs(mean) <= NEAR,
    f"larger than {NEAR:g} points",
)
THEOREM = Criterion(
    "The theorems as written",
    "The verdict of `feddure theory`, measured on a small smooth network beside a control.",
    lambda _: _NOT_MEASURED,  # there are no accuracies to judge it by
)


def _measured(comparisons: Comparisons) -> list[Comparison]:
    return [found for found in comparisons if found.difference is not None]


def _on(side: str, comparisons: Comparisons) -> list[Comparison]:
    """Those whose whole interval is above or below 0."""
    return [found for found in comparisons if found.difference is not None and getattr(found.difference, side)]


def _but(comparisons: Comparisons, others: Comparisons) -> list[Comparison]:
    return [found for found in comparisons if found not in others]


def _count(comparisons: Comparisons, chosen: Comparisons, what: str) -> str:
    """How many of the comparisons are so, and the largest of them."""
    what += ", by one seed" if _by_one_seed(chosen) else ""
    if len(comparisons) == 1:
        return f"{chosen[0]}, {what}."
    return f"{len(chosen)} {_of(comparisons)} {'is' if len(chosen) == 1 else 'are'} {what}: {_named(chosen)}."


def _untold(comparisons: Comparisons, open_ones: Comparisons, side: str) -> str:
    """Of how many comparisons the seeds tell no sign, the largest of them, and on which side the others are."""
    told = len(_measured(comparisons)) - len(open_ones)
    others = f" The other {'one is' if told == 1 else f'{told} are'} wholly {side} 0." if told else ""
    every = {1: "it", 2: "both"}.get(len(comparisons), f"all {len(comparisons)}")
    each = every if len(open_ones) == len(comparisons) else f"{len(open_ones)} {_of(comparisons)}"
    return f"For {each} {_why_open(open_ones)}: {_named(open_ones)}.{others}"


def _of(comparisons: Comparisons) -> str:
    done = len(_measured(comparisons))
    return f"of {done}" if done == len(comparisons) else f"of the {done} measured (of {len(comparisons)})"


def _named(comparisons: Comparisons) -> str:
    largest = sorted(comparisons, key=_size, reverse=True)
    more = f"; and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
    return "; ".join(map(str, largest[:_NAMED])) + more


def _size(comparison: Comparison) -> float:
    return abs(comparison.difference.mean) if comparison.difference else 0.0


def _why_open(comparisons: Comparisons) -> str:
    return "one seed cannot tell a difference from chance" if _by_one_seed(comparisons) else "no difference can be told"


def _by_one_seed(comparisons: Comparisons) -> bool:
    return all(found.difference is not None and found.difference.n < 2 for found in comparisons)


# What the paper claims.


class Measured:
    """The rows of all studies under one preset, and the claims that they judge."""

    def __init__(self, preset: str, rows: Mapping[str, Sequence[Row]]):
        self.preset = preset
        self._accuracies = {
            (study, row.dataset, row.setting, row.method, row.value): row.accuracies
            for study, own in rows.items()
            for row in own
        }

    def at(self, study: str, dataset: str, setting: str, method: str, value: float | None) -> dict[int, float]:
        """Accuracies by seed; nothing where nothing is measured."""
        return self._accuracies.get((study, dataset, setting, method, value), {})

    def compare(
        self, study: str, dataset: str, setting: str, one: str, other: str, value: float | None = None
    ) -> Comparison:
        """One method − another at the same place."""
        ours, theirs = (self.at(study, dataset, setting, method, value) for method in (one, other))
        names = " − ".join(method_name(method, study) for method in (one, other))
        point = "" if value is None else f", {axis_text(study, value)}"
        papers = [printed(study).get((dataset, setting, method)) for method in (one, other)]
        apart = None if papers[0] is None or papers[1] is None else papers[0] - papers[1]
        return Comparison(f"{names} ({setting.upper()}{point})", paired(ours, theirs), apart)

    def change(self, study: str, dataset: str, setting: str, method: str, start: float, end: float) -> Comparison:
        """A method at one point of an axis − itself at another."""
        before, after = (self.at(study, dataset, setting, method, value) for value in (start, end))
        way = f"{axis_text(study, start)} to {axis_text(study, end)}"
        return Comparison(f"{method_name(method)}, {way} ({setting.upper()})", paired(after, before))

    def claim(
        self, name: str, says: str, where: str, needs: str, found: Comparisons, criterion: Criterion = ALL_ABOVE
    ) -> Claim:
        needs += "" if self.preset == "aaai24" else f" --preset {self.preset}"
        return Claim(name, says, where, needs, self.preset, criterion, found, *criterion.judge(found))


def claims(preset: str, rows: Mapping[str, Sequence[Row]]) -> list[Claim]:
    """Every claim about accuracies, judged by the rows of the studies under a preset."""
    measured = Measured(preset, rows)
    groups = (_table1, _table2, _gamma, _labels, _clients, _beyond_labels)
    return [claim for group in groups for claim in group(measured)]


def theorem_claims(folder: Path) -> list[Claim]:
    """Both theorems, judged by what `feddure theory` wrote into the folder, if it did."""
    findings = theory.read(folder).get("findings", [])
    found = []
    for number, says in (
        (1, "Theorem 1: min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖² falls at least as fast as 1/√T"),
        (2, "Theorem 2: C-reg's gradient ‖∇_φ H·L‖² tends to zero"),
    ):
        sentence = next((one["verdict"] for one in findings if one["theorem"] == number), "")
        judged: Judged = ("does not hold", sentence) if sentence else _NOT_MEASURED
        if sentence.startswith(("The rate is kept", "It tends to zero")):
            judged = "holds", sentence
        elif sentence.startswith("Whether"):
            judged = "undecided", sentence
        where = "Convergence of Optimization Process"
        found.append(Claim(f"theorem {number}", says, where, "theory", "any", THEOREM, (), *judged))
    return found


def _table1(m: Measured) -> Iterator[Claim]:
    where, introduced = "Performance Comparison", "Introduction, contributions"
    for dataset in ("cifar10", "cinic10"):
        name, found = display_name(dataset), _best_rival(m, dataset, "dir-dir")
        best = "FedDure is ahead of the best semi-supervised rival under DIR-DIR by"
        says = f"{best} {found.paper:.2f} points on {name}"
        yield m.claim(f"gain on {name}", says, introduced, _needs(dataset), [found], AS_LARGE)
    compared = [m.compare("table1", "cifar10", "iid-dir", "feddure", "fedmatch")]
    says = "FedDure is ahead of FedMatch by 15.26 points on CIFAR-10 under IID-DIR"
    yield m.claim("gain over FedMatch", says, where, _needs("cifar10"), compared, AS_LARGE)
    for dataset in TABLE1_DATASETS:
        places = product(SETTINGS, ["feddure"], SEMI_SUPERVISED)
        compared = [m.compare("table1", dataset, *place) for place in places]
        says = f"FedDure is ahead of every semi-supervised rival in every setting on {display_name(dataset)}"
        yield m.claim(f"first on {display_name(dataset)}", says, where, _needs(dataset), compared)
    for dataset in ("cifar10", "fashion-mnist"):
        rivals = {rival: m.compare("table1", dataset, "dir-dir", rival, "fedavg") for rival in SEMI_SUPERVISED}
        *worse, last = [method_name(rival) for rival, one in rivals.items() if (one.paper or 0) < 0]
        some = f"some semi-supervised methods (in its table {', '.join(worse)} and {last})"
        says = f"Under DIR-DIR {some} are worse than FedAvg* on {display_name(dataset)}"
        name, compared = f"worse than FedAvg* on {display_name(dataset)}", list(rivals.values())
        yield m.claim(name, says, f"{where}; figure 1", _needs(dataset), compared, SOME_BELOW)
    compared = [m.compare("table1", "cifar10", "dir-dir", "feddure", rival) for rival in ("fedavg-sl", "fedprox-sl")]
    says = "FedDure comes close to fully supervised training on CIFAR-10 under DIR-DIR"
    yield m.claim("close to supervised", says, "Introduction; figure 1", _needs("cifar10"), compared, NEAR_OR_ABOVE)
    compared = [m.compare("table1", "fashion-mnist", "iid-dir", "feddure", "fedavg-sl")]
    says = "FedDure competes with FedAvg-SL on Fashion-MNIST under IID-DIR"
    yield m.claim("competes with supervised", says, where, _needs("fashion-mnist"), compared, NEAR_OR_ABOVE)


def _table2(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Effectiveness of Components"
    for name, says, *pairs in (
        ("MAML helps", "Baseline+MAML is ahead of the baseline", ("baseline+maml", "fedavg-fixmatch")),
        ("regulators above MAML", "Either regulator alone is ahead of Baseline+MAML",
         ("f-reg", "baseline+maml"), ("c-reg", "baseline+maml")),
        ("C-reg above F-reg", "C-reg alone is ahead of F-reg alone", ("c-reg", "f-reg")),
        ("online above averaged", "Regulators of each client are ahead of averaged ones",
         ("f-reg", "avg-f-reg"), ("c-reg", "avg-c-reg")),
        ("both regulators", "FedDure with both regulators is ahead of either alone",
         ("feddure", "f-reg"), ("feddure", "c-reg")),
    ):  # fmt: skip
        found = [m.compare("table2", "cifar10", setting, *pair) for setting in SETTINGS for pair in pairs]
        yield m.claim(name, says, f"{where}; table 2", "table2", found)
    says = "There is no significant difference between the two regulators"
    found = [m.compare("table2", "cifar10", setting, "c-reg", "f-reg") for setting in SETTINGS]
    yield m.claim("regulators alike", says, where, "table2", found, SMALL)


def _gamma(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Impacts of Data Heterogeneity"
    says = "FedDure is ahead of FedMatch and the baseline at every γ"
    yield m.claim("first at every γ", says, where, "gamma", _along_axis(m, "gamma"))
    least, most = STUDIES["gamma"].values[0], STUDIES["gamma"].values[-1]
    found = []
    for setting in STUDIES["gamma"].settings:
        for rival in CHART_RIVALS:
            ours, theirs = (
                _gains(*(m.at("gamma", "cifar10", setting, method, value) for value in (least, most)))
                for method in ("feddure", rival)
            )
            name = f"loss of {method_name(rival)} − loss of FedDure, γ = {most:g} to {least:g}"
            found.append(Comparison(f"{name} ({setting.upper()})", paired(theirs, ours)))
    says = "FedMatch and the baseline lose more than FedDure where γ is small"
    yield m.claim("rivals fall at small γ", says, where, "gamma", found)


def _labels(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Number of Label Data per Client"
    settings, values = STUDIES["labels"].settings, STUDIES["labels"].values

    def changes(method: str, setting: str, *ways: tuple[float, float]) -> list[Comparison]:
        return [m.change("labels", "cifar10", setting, method, *way) for way in ways]

    says = "FedDure is ahead of FedMatch and the baseline at every share of labels"
    yield m.claim("first at every label share", says, where, "labels", _along_axis(m, "labels"))
    found = [one for setting in settings for one in changes("feddure", setting, *pairwise(values))]
    yield m.claim("FedDure gains with labels", "FedDure gains steadily with more labels", where, "labels", found)
    ways = [(values[0], value) for value in values[1:]]
    found = [one for setting in settings for one in changes("fedavg-fixmatch", setting, *ways)]
    yield m.claim("baseline stagnates", "The baseline stagnates as labels grow", where, "labels", found, SMALL)
    found = changes("fedmatch", "dir-dir", *((4, value) for value in values if value > 4))
    says = "FedMatch falls beyond 4 % labels under DIR-DIR"
    yield m.claim("FedMatch falls", says, where, "labels", found, ALL_BELOW)


def _clients(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Number of Selected Clients per Round"
    for dataset in STUDIES["clients"].datasets:
        needs = "clients" if dataset == "cifar10" else f"clients --datasets {dataset}"
        found = [m.change("clients", dataset, "dir-dir", "feddure", 2, 20)]
        says = f"FedDure gains with the clients of a round on {display_name(dataset)}"
        yield m.claim(f"gains with S on {display_name(dataset)}", says, where, needs, found)
        at = [m.at("clients", dataset, "dir-dir", "feddure", value) for value in (2, 5, 10, 20)]
        half = {seed: gain / 2 for seed, gain in _gains(at[0], at[1]).items()}
        name = "half of the gain from S = 2 to 5 − the gain from S = 10 to 20"
        found = [Comparison(name, paired(half, _gains(at[2], at[3])))]
        says = f"FedDure's gains with the clients of a round level off on {display_name(dataset)}"
        yield m.claim(f"plateau in S on {display_name(dataset)}", says, where, needs, found)


def _beyond_labels(m: Measured) -> Iterator[Claim]:
    for dataset in TABLE1_DATASETS:
        found = [m.compare("table1", dataset, setting, "feddure", REFERENCE) for setting in SETTINGS]
        says = f"FedDure is ahead of labels-only training with as many local steps on {display_name(dataset)}"
        name = f"unlabelled images help on {display_name(dataset)}"
        yield m.claim(name, says, "not in the paper: our yardstick", _needs(dataset), found)


def _best_rival(m: Measured, dataset: str, setting: str) -> Comparison:
    """FedDure beside the best of its rivals, ours and the paper's each by its own numbers.

    The best is known when all are measured. Until then a sentence says how many are, unless one of them alone takes
    the claim away: a better one would only take away more.
    """
    each = {rival: m.compare("table1", dataset, setting, "feddure", rival) for rival in SEMI_SUPERVISED}
    theirs = min(found.paper for found in each.values() if found.paper is not None)
    measured = {rival: found.difference for rival, found in each.items() if found.difference is not None}
    if not measured:
        return Comparison(f"FedDure − best rival ({setting.upper()})", None, theirs)
    best = min(measured, key=lambda rival: measured[rival].mean)
    which = "its best rival"
    if len(measured) < len(each):
        if measured[best].mean >= theirs - NEAR:
            partly = f"{len(measured)} of FedDure's {len(each)} rivals are measured: which is the best is open."
            return Comparison(f"FedDure − best rival ({setting.upper()})", None, theirs, partly)
        which = f"the best of {len(measured)} rivals measured of {len(each)}"
    return Comparison(f"FedDure − {method_name(best)}, {which} ({setting.upper()})", measured[best], theirs)


def _along_axis(m: Measured, study: str) -> list[Comparison]:
    return [
        m.compare(study, "cifar10", setting, "feddure", rival, value)
        for setting in STUDIES[study].settings
        for value in STUDIES[study].values
        for rival in CHART_RIVALS
    ]


def _gains(start: Mapping[int, float], end: Mapping[int, float]) -> dict[int, float]:
    """How much each seed gains on the way."""
    return {seed: end[seed] - start[seed] for seed in start.keys() & end.keys()}


def _needs(dataset: str) -> str:
    return f"table1 --datasets {dataset}"
