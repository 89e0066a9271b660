"""Claims: the paper's own numbers make them hold, and each verdict turns with the measurements it rests on."""

import json
import random
from types import SimpleNamespace

import pytest

from feddure.reports.frame import Difference
from feddure.studies.paper.claims import (
    ALL_ABOVE,
    ALL_BELOW,
    AS_LARGE,
    SMALL,
    SOME_BELOW,
    Comparison,
    claims,
    theorem_claims,
)
from feddure.studies.paper.plan import STUDIES, printed

SEEDS = (0, 1, 2)
CHARTS = {"feddure": 60.0, "fedmatch": 50.0, "fedavg-fixmatch": 45.0, "fedavg-matched": 50.0}


def as_the_paper_says():
    """An accuracy for every place: the paper's numbers, and charts that do what its text says."""
    world = {
        (table, *place, None): accuracy for table in ("table1", "table2") for place, accuracy in printed(table).items()
    }
    for dataset in ("cifar10", "fashion-mnist", "cinic10"):
        for setting in ("iid-iid", "iid-dir", "dir-dir"):
            world["table1", dataset, setting, "fedavg-matched", None] = 25.0
    for setting in ("iid-dir", "dir-dir"):
        for method, base in CHARTS.items():
            for value in STUDIES["gamma"].values:
                slope = 2 if method == "feddure" else 10
                world["gamma", "cifar10", setting, method, value] = base + slope * (value - 1.0)
            for place, value in enumerate(STUDIES["labels"].values):
                slope = {"feddure": 2.0, "fedmatch": -1.5 if value > 4 else 1.5}.get(method, 0.0)
                world["labels", "cifar10", setting, method, value] = base + slope * place
    for dataset in ("cifar10", "fashion-mnist"):
        for method, base in CHARTS.items():
            for value, gain in ((2, 0.0), (5, 8.0), (10, 10.0), (20, 11.0)):
                world["clients", dataset, "dir-dir", method, value] = base + gain
    return world


def judged(world, seeds=SEEDS, noise=0.1):
    """The claims by name; each seed differs a little, else there would be no interval."""
    rows = {study: [] for study in STUDIES}
    for place, accuracy in world.items():
        study, dataset, setting, method, value = place
        found = {seed: accuracy + noise * random.Random(f"{place} {seed}").uniform(-1, 1) for seed in seeds}
        row = {"dataset": dataset, "setting": setting, "method": method, "value": value, "options": ""}
        rows[study].append(SimpleNamespace(**row, accuracies=found))
    return {claim.name: claim for claim in claims("aaai24", rows)}


def verdicts(world, **options):
    return {name: claim.verdict for name, claim in judged(world, **options).items()}


# What turns each claim: a place, and by how much its accuracy changes.
TURNS = {
    "gain on CIFAR-10": ("table1", "cifar10", "dir-dir", "feddure", None, -8.0),
    "gain on CINIC-10": ("table1", "cinic10", "dir-dir", "fedmatch", None, 8.0),
    "gain over FedMatch": ("table1", "cifar10", "iid-dir", "fedmatch", None, 8.0),
    "first on CIFAR-10": ("table1", "cifar10", "iid-iid", "fedprox-uda", None, 30.0),
    "first on Fashion-MNIST": ("table1", "fashion-mnist", "iid-dir", "fedmatch", None, 5.0),
    "first on CINIC-10": ("table1", "cinic10", "dir-dir", "fedavg-uda", None, 30.0),
    "worse than FedAvg* on CIFAR-10": ("table1", "cifar10", "dir-dir", "fedavg", None, -20.0),
    "worse than FedAvg* on Fashion-MNIST": ("table1", "fashion-mnist", "dir-dir", "fedavg", None, -20.0),
    "close to supervised": ("table1", "cifar10", "dir-dir", "fedprox-sl", None, 5.0),
    "competes with supervised": ("table1", "fashion-mnist", "iid-dir", "feddure", None, -5.0),
    "MAML helps": ("table2", "cifar10", "iid-iid", "baseline+maml", None, -15.0),
    "regulators above MAML": ("table2", "cifar10", "dir-dir", "f-reg", None, -10.0),
    "C-reg above F-reg": ("table2", "cifar10", "iid-dir", "f-reg", None, 2.0),
    "online above averaged": ("table2", "cifar10", "iid-dir", "avg-c-reg", None, 8.0),
    "both regulators": ("table2", "cifar10", "dir-dir", "c-reg", None, 3.0),
    "regulators alike": ("table2", "cifar10", "dir-dir", "c-reg", None, 5.0),
    "first at every γ": ("gamma", "cifar10", "iid-dir", "fedavg-fixmatch", 0.7, 20.0),
    "rivals fall at small γ": ("gamma", "cifar10", "dir-dir", "feddure", 0.3, -9.0),
    "first at every label share": ("labels", "cifar10", "dir-dir", "fedmatch", 2, 15.0),
    "FedDure gains with labels": ("labels", "cifar10", "iid-dir", "feddure", 15, -5.0),
    "baseline stagnates": ("labels", "cifar10", "iid-dir", "fedavg-fixmatch", 20, 6.0),
    "FedMatch falls": ("labels", "cifar10", "dir-dir", "fedmatch", 20, 12.0),
    "gains with S on CIFAR-10": ("clients", "cifar10", "dir-dir", "feddure", 20, -15.0),
    "gains with S on Fashion-MNIST": ("clients", "fashion-mnist", "dir-dir", "feddure", 2, 15.0),
    "plateau in S on CIFAR-10": ("clients", "cifar10", "dir-dir", "feddure", 20, 8.0),
    "plateau in S on Fashion-MNIST": ("clients", "fashion-mnist", "dir-dir", "feddure", 10, -8.0),
    "unlabelled images help on CIFAR-10": ("table1", "cifar10", "dir-dir", "fedavg-matched", None, 40.0),
    "unlabelled images help on Fashion-MNIST": ("table1", "fashion-mnist", "iid-iid", "fedavg-matched", None, 65.0),
    "unlabelled images help on CINIC-10": ("table1", "cinic10", "iid-iid", "fedavg-matched", None, 40.0),
}  # fmt: skip


def turned(name):
    world = as_the_paper_says()
    *place, change = TURNS[name]
    world[tuple(place)] += change
    return world


def test_the_papers_own_numbers_make_every_claim_hold():
    found = verdicts(as_the_paper_says())
    assert found.keys() == TURNS.keys()
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize("name", TURNS)
def test_a_claim_turns_with_its_measurements(name):
    assert verdicts(turned(name))[name] == "does not hold"


SINGLE = {
    "gain on CIFAR-10", "gain over FedMatch", "worse than FedAvg* on CIFAR-10", "worse than FedAvg* on Fashion-MNIST",
    "competes with supervised", "gains with S on CIFAR-10", "gains with S on Fashion-MNIST",
    "plateau in S on CIFAR-10", "plateau in S on Fashion-MNIST",
}  # fmt: skip
"""Claims that one missing measurement leaves without any comparison."""


@pytest.mark.parametrize("name", TURNS)
def test_a_claim_does_not_hold_before_all_of_it_is_measured(name):
    world = as_the_paper_says()
    del world[TURNS[name][:-1]]
    assert verdicts(world)[name] == ("not measured" if name in SINGLE else "undecided")


ABOVE, BELOW, ACROSS = Difference(2.0, 1.0, 3.0, 3), Difference(-2.0, -3.0, -1.0, 3), Difference(-0.6, -3.6, 2.3, 3)


def compared(*differences):
    return [Comparison(name, difference) for name, difference in zip("abcd", differences, strict=False)]


@pytest.mark.parametrize(
    ("criterion", "differences", "verdict", "said"),
    [
        (ALL_ABOVE, [ABOVE, ABOVE], "holds", "+2.0 [+1.0, +3.0]"),
        (ALL_ABOVE, [ABOVE, None], "undecided", "1 measured (of 2)"),
        (ALL_ABOVE, [ABOVE, ACROSS, None], "undecided", "no difference can be told"),
        (ALL_ABOVE, [BELOW, None], "does not hold", "−2.0 [−3.0, −1.0]"),
        (ALL_ABOVE, [None], "not measured", ""),
        (ALL_ABOVE, [ACROSS], "undecided", "no difference can be told"),
        (ALL_ABOVE, [Difference(0.6, -2.4, 3.6, 3)], "undecided", "no difference can be told"),
        (ALL_BELOW, [ACROSS], "undecided", "no difference can be told"),
        (ALL_BELOW, [BELOW], "holds", ""),
        (ALL_BELOW, [BELOW, ABOVE], "does not hold", "b: +2.0"),
        (SMALL, [ABOVE, None], "undecided", "1 of 2"),
        (SMALL, [ABOVE, BELOW], "holds", ""),
        (SMALL, [Difference(13.0, None, None, 1)], "does not hold", "by one seed"),
    ],
)
def test_a_verdict_and_its_sentence_follow_from_the_differences(criterion, differences, verdict, said):
    found, sentence = criterion.judge(compared(*differences))
    assert found == verdict
    assert said in sentence


def test_without_any_measurement_nothing_holds_and_every_claim_says_how_to_measure_it():
    found = claims("aaai24", {})
    assert {claim.verdict for claim in found} == {"not measured"}
    assert {claim.needs.split()[0] for claim in found} == {"table1", "table2", "gamma", "labels", "clients"}
    assert all(claim.needs.endswith("--preset aaai24-fine") for claim in claims("aaai24-fine", {}))


def test_one_seed_leaves_claims_about_signs_undecided():
    found = judged(as_the_paper_says(), seeds=(0,))
    assert found["first on CIFAR-10"].verdict == "undecided"
    assert "one seed cannot tell a difference from chance" in found["first on CIFAR-10"].sentence
    assert verdicts(turned("first on CIFAR-10"), seeds=(0,))["first on CIFAR-10"] == "undecided"


@pytest.mark.parametrize(("left_out", "which"), [(0, "its best rival"), (1, "the best of 4 rivals measured of 5")])
def test_the_best_rival_is_the_best_of_our_own_measurements_and_refutes_a_gain_before_all_are_there(left_out, which):
    world = as_the_paper_says()
    world["table1", "cifar10", "dir-dir", "fedprox-uda", None] = 50.0
    for method in ("fedmatch",)[:left_out]:
        del world["table1", "cifar10", "dir-dir", method, None]
    claim = judged(world)["gain on CIFAR-10"]
    assert claim.comparisons[0].name == f"FedDure − FedProx-UDA, {which} (DIR-DIR)"
    assert claim.comparisons[0].paper == pytest.approx(12.17)
    assert claim.verdict == "does not hold"


WORSE, WORSE_TOO = Comparison("a", ABOVE, -4.0), Comparison("b", None, -1.0)


@pytest.mark.parametrize(
    ("compared", "verdict", "literally"),
    [
        ([Comparison("a", BELOW, -4.0), WORSE_TOO], "holds", False),
        ([WORSE_TOO, Comparison("other", BELOW, 5.0)], "not measured", False),
        ([WORSE, WORSE_TOO, Comparison("other", BELOW, 5.0)], "undecided", True),
        ([WORSE, Comparison("other", BELOW, 5.0)], "does not hold", True),
        ([WORSE, Comparison("other", ABOVE, 5.0)], "does not hold", False),
    ],
)
def test_worse_methods_are_those_that_the_paper_has_worse(compared, verdict, literally):
    found, sentence = SOME_BELOW.judge(compared)
    assert found == verdict
    assert ("Read literally the claim holds" in sentence) == literally


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (Difference(11.0, 9.0, 13.0, 3), "holds"),
        (Difference(11.0, -1.0, 23.0, 3), "undecided"),
        (Difference(11.0, None, None, 1), "undecided"),
        (Difference(8.0, 7.0, 9.0, 3), "does not hold"),
        (Difference(16.0, 15.0, 17.0, 3), "does not hold"),
        (None, "not measured"),
    ],
)
def test_a_gain_is_as_large_as_the_papers_within_three_points(ours, verdict):
    found, sentence = AS_LARGE.judge([Comparison("gain", ours, paper=12.17)])
    assert found == verdict
    assert ours is None or str(ours) in sentence


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("The rate is kept, and with θ frozen it is kept too: trivial.", "holds"),
        ("The rate is not there: it stays.", "does not hold"),
        ("Whether it tends to zero is open: it falls slowly.", "undecided"),
    ],
)
def test_theorems_are_judged_by_what_theory_wrote(tmp_path, said, verdict):
    assert {claim.verdict for claim in theorem_claims(tmp_path)} == {"not measured"}
    (tmp_path / "theory.json").write_text(json.dumps({"findings": [{"theorem": 1, "verdict": said}]}))
    first, second = theorem_claims(tmp_path)
    assert (first.verdict, first.sentence) == (verdict, said)
    assert second.verdict == "not measured"
