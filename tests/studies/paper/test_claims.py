"""Claims: the paper's own numbers make them hold, and each verdict turns with the measurements it rests on."""

import json
import random

import pytest

import synthetic
from feddure.studies.paper.claims import claims, theorem_claims
from feddure.studies.paper.numbers import printed
from feddure.studies.paper.plan import STUDIES
from feddure.studies.paper.rows import Difference
from feddure.studies.paper.verdicts import Comparison, all_above, all_below, as_large, small, some_below

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
    """The verdicts by claim; each seed differs a little, else there would be no interval."""
    rows = {study: [] for study in STUDIES}
    for place, accuracy in world.items():
        study, dataset, setting, method, value = place
        found = {seed: accuracy + noise * random.Random(f"{place} {seed}").uniform(-1, 1) for seed in seeds}
        rows[study].append(synthetic.row(study, method, found, dataset=dataset, setting=setting, value=value))
    return {claim.name: claim for claim in claims("aaai24", rows)}


def verdicts(world, **options):
    return {name: claim.verdict for name, claim in judged(world, **options).items()}


# What turns each claim: places (None fits all) and by how much.
TURNS = {
    "gain on CIFAR-10": [("table1", "cifar10", "dir-dir", "feddure", None, -8.0)],
    "gain on CINIC-10": [("table1", "cinic10", "dir-dir", "fedmatch", None, 8.0)],
    "gain over FedMatch": [("table1", "cifar10", "iid-dir", "fedmatch", None, 8.0)],
    "first on CIFAR-10": [("table1", "cifar10", "iid-iid", "fedprox-uda", None, 30.0)],
    "first on Fashion-MNIST": [("table1", "fashion-mnist", "iid-dir", "fedmatch", None, 5.0)],
    "first on CINIC-10": [("table1", "cinic10", "dir-dir", "fedavg-uda", None, 30.0)],
    "worse than FedAvg* on CIFAR-10": [("table1", "cifar10", "dir-dir", "fedavg", None, -20.0)],
    "worse than FedAvg* on Fashion-MNIST": [("table1", "fashion-mnist", "dir-dir", "fedavg", None, -20.0)],
    "close to supervised": [("table1", "cifar10", "dir-dir", "fedprox-sl", None, 5.0)],
    "competes with supervised": [("table1", "fashion-mnist", "iid-dir", "feddure", None, -5.0)],
    "MAML helps": [("table2", "cifar10", "iid-iid", "baseline+maml", None, -15.0)],
    "regulators above MAML": [("table2", "cifar10", "dir-dir", "f-reg", None, -10.0)],
    "C-reg above F-reg": [("table2", "cifar10", "iid-dir", "f-reg", None, 2.0)],
    "online above averaged": [("table2", "cifar10", "iid-dir", "avg-c-reg", None, 8.0)],
    "both regulators": [("table2", "cifar10", "dir-dir", "c-reg", None, 3.0)],
    "regulators alike": [("table2", "cifar10", "dir-dir", "c-reg", None, 5.0)],
    "first at every γ": [("gamma", "cifar10", "iid-dir", "fedavg-fixmatch", 0.7, 20.0)],
    "rivals fall at small γ": [("gamma", "cifar10", "dir-dir", "feddure", 0.3, -9.0)],
    "first at every label share": [("labels", "cifar10", "dir-dir", "fedmatch", 2, 15.0)],
    "FedDure gains with labels": [("labels", "cifar10", "iid-dir", "feddure", 15, -5.0)],
    "baseline stagnates": [("labels", "cifar10", "iid-dir", "fedavg-fixmatch", 20, 6.0)],
    "FedMatch falls": [("labels", "cifar10", "dir-dir", "fedmatch", 20, 12.0)],
    "gains with S on CIFAR-10": [("clients", "cifar10", "dir-dir", "feddure", 20, -15.0)],
    "gains with S on Fashion-MNIST": [("clients", "fashion-mnist", "dir-dir", "feddure", 2, 15.0)],
    "plateau in S on CIFAR-10": [("clients", "cifar10", "dir-dir", "feddure", 20, 8.0)],
    "plateau in S on Fashion-MNIST": [("clients", "fashion-mnist", "dir-dir", "feddure", 10, -8.0)],
    "unlabelled images help on CIFAR-10": [("table1", "cifar10", "dir-dir", "fedavg-matched", None, 40.0)],
    "unlabelled images help on Fashion-MNIST": [("table1", "fashion-mnist", "iid-iid", "fedavg-matched", None, 65.0)],
    "unlabelled images help on CINIC-10": [("table1", "cinic10", "iid-iid", "fedavg-matched", None, 40.0)],
}  # fmt: skip


def turned(name):
    world = as_the_paper_says()
    for *place, change in TURNS[name]:
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
    study, dataset, setting, method, value, _ = TURNS[name][0]
    del world[study, dataset, setting, method, value]
    assert verdicts(world)[name] == ("not measured" if name in SINGLE else "undecided")


def test_a_part_says_how_much_of_it_is_measured():
    above = Difference(2.0, 1.0, 3.0, 3)
    found = all_above([Comparison("a", above), Comparison("b", Difference(-0.6, -3.6, 2.3, 3)), Comparison("c", None)])
    assert found.verdict == "undecided"
    assert found.sentence == (
        "For 1 of the 2 measured (of 3) no difference can be told: b: −0.6 [−3.6, +2.3]. "
        "The other one is wholly above 0."
    )
    found = all_above([Comparison("a", above), Comparison("b", None)])
    assert (found.verdict, "1 of the 1 measured (of 2) is wholly above 0" in found.sentence) == ("undecided", True)
    found = small([Comparison("a", above), Comparison("b", None)])
    assert (found.verdict, "1 of 2" in found.sentence) == ("undecided", True)


def test_what_one_seed_says_against_a_claim_is_told_as_such():
    single, three = Comparison("a", Difference(13.0, None, None, 1)), Comparison("b", Difference(5.0, 4.0, 6.0, 3))
    assert small([single]).sentence == "a: +13.00, larger than 3 points, by one seed."
    assert "by one seed" not in small([single, three]).sentence


def test_without_any_measurement_nothing_holds_and_every_claim_says_how_to_measure_it():
    found = claims("aaai24", {})
    assert {claim.verdict for claim in found} == {"not measured"}
    assert {claim.needs.split()[0] for claim in found} == {"table1", "table2", "gamma", "labels", "clients"}
    assert all(claim.needs.endswith("--preset aaai24-fine") for claim in claims("aaai24-fine", {}))


def test_one_seed_leaves_claims_about_signs_undecided():
    found = judged(as_the_paper_says(), seeds=(0,))
    assert found["first on CIFAR-10"].verdict == "undecided"
    assert "one seed cannot tell a difference from chance" in found["first on CIFAR-10"].judgement.sentence
    assert verdicts(turned("first on CIFAR-10"), seeds=(0,))["first on CIFAR-10"] == "undecided"


@pytest.mark.parametrize("judge", [all_above, all_below])
@pytest.mark.parametrize("mean", [-0.6, 0.6])
def test_an_interval_across_0_decides_nothing_whatever_the_sign_of_its_mean(judge, mean):
    found = judge([Comparison("a", Difference(mean, mean - 3, mean + 3, 3))])
    assert found.verdict == "undecided"
    assert "no difference can be told" in found.sentence
    assert "no difference can be told" in found.criterion.words


def test_the_best_rival_is_the_best_of_our_own_measurements():
    world = as_the_paper_says()
    world["table1", "cifar10", "dir-dir", "fedprox-uda", None] = 50.0
    claim = judged(world)["gain on CIFAR-10"]
    assert claim.comparisons[0].name == "FedDure − FedProx-UDA, its best rival (DIR-DIR)"
    assert claim.comparisons[0].paper == pytest.approx(12.17)
    assert claim.verdict == "does not hold"


def test_one_rival_near_feddure_refutes_a_gain_over_the_best_before_all_are_measured():
    world = as_the_paper_says()
    world["table1", "cifar10", "dir-dir", "fedprox-uda", None] = 50.0
    del world["table1", "cifar10", "dir-dir", "fedmatch", None]
    claim = judged(world)["gain on CIFAR-10"]
    assert claim.verdict == "does not hold"
    assert claim.comparisons[0].name == "FedDure − FedProx-UDA, the best of 4 rivals measured of 5 (DIR-DIR)"


def test_a_counterexample_counts_before_everything_is_measured():
    found = [Comparison("a", Difference(-2.0, -3.0, -1.0, 3)), Comparison("b", None)]
    assert all_above(found).verdict == "does not hold"
    assert all_above(found).sentence == "1 of the 1 measured (of 2) is wholly below 0: a: −2.0 [−3.0, −1.0]."


def test_worse_methods_are_those_that_the_paper_has_worse():
    below, above = Difference(-2.0, -3.0, -1.0, 3), Difference(2.0, 1.0, 3.0, 3)
    other = Comparison("other", below, paper=5.0)
    assert some_below([Comparison("a", below, -4.0), Comparison("b", None, -1.0)]).verdict == "holds"
    assert some_below([Comparison("a", None, -4.0), other]).verdict == "not measured"
    assert some_below([Comparison("a", above, -4.0), Comparison("b", None, -1.0), other]).verdict == "undecided"
    refuted = some_below([Comparison("a", above, -4.0), other])
    assert refuted.verdict == "does not hold"
    assert "Not counted, as the paper has it above 0: other: −2.0 [−3.0, −1.0] (paper +5.00)." in refuted.sentence
    assert "Read literally the claim holds" in refuted.sentence
    harmless = some_below([Comparison("a", above, -4.0), Comparison("other", above, 5.0)])
    assert "Read literally" not in harmless.sentence


def test_fedmatch_alone_does_not_make_the_papers_worse_methods_worse():
    world = as_the_paper_says()
    for method in ("fedavg-uda", "fedprox-uda", "fedavg-fixmatch"):
        world["table1", "cifar10", "dir-dir", method, None] = 45.0
    world["table1", "cifar10", "dir-dir", "fedmatch", None] = 30.0
    claim = judged(world)["worse than FedAvg* on CIFAR-10"]
    assert claim.verdict == "does not hold"
    assert "(in its table FedAvg-UDA, FedProx-UDA and FedAvg-FixMatch)" in claim.says
    assert "Not counted" in claim.judgement.sentence
    assert "FedMatch − FedAvg* (DIR-DIR): −10." in claim.judgement.sentence


def test_claims_of_a_kind_share_their_criterion():
    assert len({claim.judgement.criterion for claim in claims("aaai24", {})}) == 6


def test_verdicts_state_their_criterion_and_both_numbers():
    judgement = as_large(Comparison("gain", Difference(11.0, 9.0, 13.0, 3), paper=12.17))
    assert judgement.verdict == "holds"
    assert "within 3 points of the paper's" in judgement.criterion.words
    assert "the paper's +12.17" in judgement.sentence
    assert "+11.0 [+9.0, +13.0]" in judgement.sentence
    assert as_large(Comparison("gain", Difference(11.0, -1.0, 23.0, 3), paper=12.17)).verdict == "undecided"


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
    assert (first.verdict, first.judgement.sentence) == (verdict, said)
    assert second.verdict == "not measured"
