"""What the paper claims in words, and whether our measurements say so too.

A claim is judged by a criterion that is written down with it; comparisons are differences of the mean of the last ten
evaluations on the same seeds (runs of the paper's length have more than ten). The last claims are ours: what is left
of the gains beside labels-only training with as many local steps.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from feddure.studies.paper import verdicts
from feddure.studies.paper.numbers import method_name, printed, setting_name
from feddure.studies.paper.plan import SETTINGS, STUDIES
from feddure.studies.paper.rows import REFERENCE, Row, axis_text, difference
from feddure.studies.paper.verdicts import Comparison, Criterion, Judgement, Verdict
from feddure.tracking.summary import spoken

SEMI_SUPERVISED = ("fedavg-uda", "fedprox-uda", "fedavg-fixmatch", "fedprox-fixmatch", "fedmatch")
"""FedDure's rivals in table 1."""

CHART_RIVALS = ("fedmatch", "fedavg-fixmatch")

COMPARISON, ABLATION = "Performance Comparison", "Ablation Study, Effectiveness of Components"
OURS = "not in the paper: our yardstick"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, judged by what was measured under a preset."""

    name: str
    says: str
    where: str
    needs: str  # the command that measures it
    preset: str
    comparisons: tuple[Comparison, ...]
    judgement: Judgement

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


class Measured:
    """The plain rows of all studies under one preset, by where they stand."""

    def __init__(self, preset: str, rows: Mapping[str, Sequence[Row]]):
        self.preset = preset
        self._rows = {
            (study, row.dataset, row.setting, row.method, row.value): row
            for study, own in rows.items()
            for row in own
            if not row.options
        }

    def accuracies(self, study: str, dataset: str, setting: str, method: str, value: float | None) -> dict[int, float]:
        """By seed; nothing where nothing is measured."""
        row = self._rows.get((study, dataset, setting, method, value))
        return row.accuracies if row else {}

    def compare(
        self, study: str, dataset: str, setting: str, one: str, other: str, value: float | None = None
    ) -> Comparison:
        """One method − another at the same place."""
        found = difference(
            self.accuracies(study, dataset, setting, one, value), self.accuracies(study, dataset, setting, other, value)
        )
        paper = printed(study)
        theirs = [paper.get((dataset, setting, method)) for method in (one, other)]
        names = (method_name(one, study), method_name(other, study))
        where = [setting_name(setting)]
        where += [axis_text(STUDIES[study].axis, value)] if value is not None else []
        apart = None if theirs[0] is None or theirs[1] is None else theirs[0] - theirs[1]
        return Comparison(f"{names[0]} − {names[1]} ({', '.join(where)})", found, apart)

    def change(self, study: str, dataset: str, setting: str, method: str, start: float, end: float) -> Comparison:
        """A method at one point of an axis − itself at another."""
        found = difference(
            self.accuracies(study, dataset, setting, method, end),
            self.accuracies(study, dataset, setting, method, start),
        )
        axis = STUDIES[study].axis
        way = f"{axis_text(axis, start)} to {axis_text(axis, end)}"
        return Comparison(f"{method_name(method)}, {way} ({setting_name(setting)})", found)


def claims(preset: str, rows: Mapping[str, Sequence[Row]]) -> list[Claim]:
    """Every claim about accuracies, judged by the rows of the studies under a preset."""
    measured = Measured(preset, rows)
    return [claim for group in _GROUPS for claim in group(measured)]


def theorem_claims(folder: Path) -> list[Claim]:
    """Both theorems, judged by what `feddure theory` wrote into the folder, if it did."""
    findings = read_theory(folder).get("findings", [])
    criterion = Criterion(
        "The theorems as written",
        "The verdict of `feddure theory`, measured on a small smooth network beside a control.",
    )
    found = []
    for number, says in (
        (1, "Theorem 1: min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖² falls at least as fast as 1/√T"),
        (2, "Theorem 2: C-reg's gradient ‖∇_φ H·L‖² tends to zero"),
    ):
        written = next((one for one in findings if one["theorem"] == number), None)
        if written is None:
            judged = Judgement("not measured", criterion, "Nothing of it is measured yet.")
        else:
            kept = written["verdict"].startswith(("The rate is kept", "It tends to zero"))
            open_one = written["verdict"].startswith("Whether")
            verdict: Verdict = "holds" if kept else "undecided" if open_one else "does not hold"
            judged = Judgement(verdict, criterion, written["verdict"])
        where = "Convergence of Optimization Process"
        found.append(Claim(f"theorem {number}", says, where, "theory", "any", (), judged))
    return found


def read_theory(folder: Path) -> dict[str, Any]:
    """What the study of the theorems found; nothing where it was not measured."""
    try:
        found = json.loads((folder / "theory.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _headline(m: Measured) -> Iterator[Claim]:
    best = "FedDure is ahead of the best semi-supervised rival under DIR-DIR by"
    for dataset, where in (("cifar10", "Introduction, contributions"), ("cinic10", "Introduction, contributions")):
        found, partly = _best_rival(m, dataset, "dir-dir")
        assert found.paper is not None
        says = f"{best} {found.paper:.2f} points on {spoken(dataset)}"
        judge = _first(partial(verdicts.as_large, partly=partly))
        yield _claim(m, f"gain on {spoken(dataset)}", says, where, _table1(dataset), [found], judge)
    found = m.compare("table1", "cifar10", "iid-dir", "feddure", "fedmatch")
    says = "FedDure is ahead of FedMatch by 15.26 points on CIFAR-10 under IID-DIR"
    yield _claim(m, "gain over FedMatch", says, COMPARISON, _table1("cifar10"), [found], _first(verdicts.as_large))


def _state_of_the_art(m: Measured) -> Iterator[Claim]:
    for dataset in ("cifar10", "fashion-mnist", "cinic10"):
        found = [
            m.compare("table1", dataset, setting, "feddure", rival) for setting in SETTINGS for rival in SEMI_SUPERVISED
        ]
        says = f"FedDure is ahead of every semi-supervised rival in every setting on {spoken(dataset)}"
        name = f"first on {spoken(dataset)}"
        yield _claim(m, name, says, COMPARISON, _table1(dataset), found, verdicts.all_above)


def _below_labels_only(m: Measured) -> Iterator[Claim]:
    for dataset in ("cifar10", "fashion-mnist"):
        found = [m.compare("table1", dataset, "dir-dir", rival, "fedavg") for rival in SEMI_SUPERVISED]
        named = [method_name(rival) for rival, one in zip(SEMI_SUPERVISED, found, strict=True) if (one.paper or 0) < 0]
        meant = f"{', '.join(named[:-1])} and {named[-1]}"
        some = f"some semi-supervised methods (in its table {meant})"
        says = f"Under DIR-DIR {some} are worse than FedAvg* on {spoken(dataset)}"
        name = f"worse than FedAvg* on {spoken(dataset)}"
        yield _claim(m, name, says, f"{COMPARISON}; figure 1", _table1(dataset), found, verdicts.some_below)


def _near_supervised(m: Measured) -> Iterator[Claim]:
    rivals = ("fedavg-sl", "fedprox-sl")
    found = [m.compare("table1", "cifar10", "dir-dir", "feddure", rival) for rival in rivals]
    says = "FedDure comes close to fully supervised training on CIFAR-10 under DIR-DIR"
    where = "Introduction; figure 1"
    yield _claim(m, "close to supervised", says, where, _table1("cifar10"), found, verdicts.near_or_above)
    found = [m.compare("table1", "fashion-mnist", "iid-dir", "feddure", "fedavg-sl")]
    says = "FedDure competes with FedAvg-SL on Fashion-MNIST under IID-DIR"
    needs = _table1("fashion-mnist")
    yield _claim(m, "competes with supervised", says, COMPARISON, needs, found, verdicts.near_or_above)


def _components(m: Measured) -> Iterator[Claim]:
    def pairs(*compared: tuple[str, str]) -> list[Comparison]:
        return [m.compare("table2", "cifar10", setting, *pair) for setting in SETTINGS for pair in compared]

    for name, says, found in (
        ("MAML helps", "Baseline+MAML is ahead of the baseline", pairs(("baseline+maml", "fedavg-fixmatch"))),
        (
            "regulators above MAML",
            "Either regulator alone is ahead of Baseline+MAML",
            pairs(("f-reg", "baseline+maml"), ("c-reg", "baseline+maml")),
        ),
        ("C-reg above F-reg", "C-reg alone is ahead of F-reg alone", pairs(("c-reg", "f-reg"))),
        (
            "online above averaged",
            "Regulators of each client are ahead of averaged ones",
            pairs(("f-reg", "avg-f-reg"), ("c-reg", "avg-c-reg")),
        ),
        (
            "both regulators",
            "FedDure with both regulators is ahead of either alone",
            pairs(("feddure", "f-reg"), ("feddure", "c-reg")),
        ),
    ):
        yield _claim(m, name, says, f"{ABLATION}; table 2", "table2", found, verdicts.all_above)
    says = "There is no significant difference between the two regulators"
    found = pairs(("c-reg", "f-reg"))
    yield _claim(m, "regulators alike", says, ABLATION, "table2", found, verdicts.small)


def _heterogeneity(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Impacts of Data Heterogeneity"
    says = "FedDure is ahead of FedMatch and the baseline at every γ"
    yield _claim(m, "first at every γ", says, where, "gamma", _along_axis(m, "gamma"), verdicts.all_above)
    least, most = STUDIES["gamma"].values[0], STUDIES["gamma"].values[-1]
    found = []
    for setting in STUDIES["gamma"].settings:
        for rival in CHART_RIVALS:
            ours, theirs = (
                _gains(*(m.accuracies("gamma", "cifar10", setting, method, value) for value in (least, most)))
                for method in ("feddure", rival)
            )
            name = f"loss of {method_name(rival)} − loss of FedDure, γ = {most:g} to {least:g}"
            found.append(Comparison(f"{name} ({setting_name(setting)})", difference(theirs, ours)))
    says = "FedMatch and the baseline lose more than FedDure where γ is small"
    yield _claim(m, "rivals fall at small γ", says, where, "gamma", found, verdicts.all_above)


def _labels(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Number of Label Data per Client"
    study = STUDIES["labels"]
    says = "FedDure is ahead of FedMatch and the baseline at every share of labels"
    yield _claim(m, "first at every label share", says, where, "labels", _along_axis(m, "labels"), verdicts.all_above)
    found = [
        m.change("labels", "cifar10", setting, "feddure", start, end)
        for setting in study.settings
        for start, end in zip(study.values, study.values[1:], strict=False)
    ]
    says = "FedDure gains steadily with more labels"
    yield _claim(m, "FedDure gains with labels", says, where, "labels", found, verdicts.all_above)
    found = [
        m.change("labels", "cifar10", setting, "fedavg-fixmatch", study.values[0], value)
        for setting in study.settings
        for value in study.values[1:]
    ]
    says = "The baseline stagnates as labels grow"
    yield _claim(m, "baseline stagnates", says, where, "labels", found, verdicts.small)
    found = [m.change("labels", "cifar10", "dir-dir", "fedmatch", 4, value) for value in study.values if value > 4]
    says = "FedMatch falls beyond 4 % labels under DIR-DIR"
    yield _claim(m, "FedMatch falls", says, where, "labels", found, verdicts.all_below)


def _clients(m: Measured) -> Iterator[Claim]:
    where = "Ablation Study, Number of Selected Clients per Round"
    for dataset in STUDIES["clients"].datasets:
        needs = "clients" if dataset == "cifar10" else f"clients --datasets {dataset}"
        found = [m.change("clients", dataset, "dir-dir", "feddure", 2, 20)]
        says = f"FedDure gains with the clients of a round on {spoken(dataset)}"
        yield _claim(m, f"gains with S on {spoken(dataset)}", says, where, needs, found, verdicts.all_above)
        at = [m.accuracies("clients", dataset, "dir-dir", "feddure", value) for value in (2, 5, 10, 20)]
        early, late = _gains(at[0], at[1]), _gains(at[2], at[3])
        name = "half of the gain from S = 2 to 5 − the gain from S = 10 to 20"
        compared = [Comparison(name, difference({seed: gain / 2 for seed, gain in early.items()}, late))]
        says = f"FedDure's gains with the clients of a round level off on {spoken(dataset)}"
        yield _claim(m, f"plateau in S on {spoken(dataset)}", says, where, needs, compared, verdicts.all_above)


def _beyond_labels(m: Measured) -> Iterator[Claim]:
    for dataset in ("cifar10", "fashion-mnist", "cinic10"):
        found = [m.compare("table1", dataset, setting, "feddure", REFERENCE) for setting in SETTINGS]
        says = f"FedDure is ahead of labels-only training with as many local steps on {spoken(dataset)}"
        name = f"unlabelled images help on {spoken(dataset)}"
        yield _claim(m, name, says, OURS, _table1(dataset), found, verdicts.all_above)


_GROUPS: tuple[Callable[[Measured], Iterator[Claim]], ...] = (
    _headline,
    _state_of_the_art,
    _below_labels_only,
    _near_supervised,
    _components,
    _heterogeneity,
    _labels,
    _clients,
    _beyond_labels,
)


def _claim(
    m: Measured,
    name: str,
    says: str,
    where: str,
    needs: str,
    found: Sequence[Comparison],
    judge: Callable[[Sequence[Comparison]], Judgement],
) -> Claim:
    preset = "" if m.preset == "aaai24" else f" --preset {m.preset}"
    return Claim(name, says, where, f"{needs}{preset}", m.preset, tuple(found), judge(found))


def _first(judge: Callable[[Comparison], Judgement]) -> Callable[[Sequence[Comparison]], Judgement]:
    return lambda found: judge(found[0])


def _best_rival(m: Measured, dataset: str, setting: str) -> tuple[Comparison, str]:
    """FedDure beside the best of its rivals, ours and the paper's each by its own numbers.

    The best is known when all are measured. Until then a sentence says how many are, unless one of them alone takes
    the claim away: a better one would only take away more.
    """
    each = {rival: m.compare("table1", dataset, setting, "feddure", rival) for rival in SEMI_SUPERVISED}
    theirs = min(found.paper for found in each.values() if found.paper is not None)
    measured = {rival: found.difference for rival, found in each.items() if found.difference is not None}
    where = setting_name(setting)
    best = min(measured, key=lambda rival: measured[rival].mean, default="")
    if len(measured) < len(each):
        if measured and measured[best].mean < theirs - verdicts.NEAR:
            name = f"FedDure − {method_name(best)}, the best of {len(measured)} rivals measured of {len(each)}"
            return Comparison(f"{name} ({where})", measured[best], theirs), ""
        some = f"{len(measured)} of FedDure's {len(each)} rivals are measured: which is the best is open."
        return Comparison(f"FedDure − best rival ({where})", None, theirs), some if measured else ""
    return Comparison(f"FedDure − {method_name(best)}, its best rival ({where})", measured[best], theirs), ""


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


def _table1(dataset: str) -> str:
    return f"table1 --datasets {dataset}"
