"""Is joining worth it: gains site by site, paired over seeds, by the same kind of model on both sides."""

from dataclasses import replace

import pandas as pd
import pytest

import tiny
from feddure.reports.frame import paired
from feddure.studies import compare_report
from feddure.studies.compare import compare, make_plan
from feddure.studies.compare_report import View
from feddure.tracking import records

PARTITION = {
    "labelled": [[1, 0], [0, 1], [0, 0]],
    "unlabelled": [[2, 1], [1, 2], [0, 0]],
    "unknown": [0, 0, 5],
    "sites": ["north", "south", "west"],
}
CONFUSION = [[5, 5], [5, 5]]
NORTH, SOUTH = (0.75, 0.25), (0.25, 0.75)  # their class mixes


EVALUATIONS = 11  # so that the mean of the last ten leaves the first out


def made_up(tmp_path, method, seed, test, averaged=None, evaluations=EVALUATIONS):
    record = {"round": 1, "clients": [0], "steps": [1], "test": test | {"confusion": CONFUSION}}
    if averaged is not None:
        record["test_ema"] = averaged | {"confusion": CONFUSION}
    return records.Run(
        tmp_path, tiny.experiment(method=method, seed=seed, rounds=1), [record] * evaluations, [], {}, PARTITION
    )


def alone(tmp_path, seed, north, south):
    """West has no label, and so no model of its own."""
    per_class = {"0": north, "1": south}
    by_client = {client: sum(shares) / 2 for client, shares in per_class.items()}
    test = {"accuracy": 0.5, "per_class": [0.5, 0.5], "by_client": by_client, "per_class_by_client": per_class}
    return made_up(tmp_path, "local", seed, test)


def joined(tmp_path, method, seed, last, averaged=None):
    tests = [{"accuracy": sum(s) / 2, "per_class": s} if s else None for s in (last, averaged)]
    return made_up(tmp_path, method, seed, *tests)


@pytest.fixture
def view(tmp_path):
    runs = [
        alone(tmp_path, 0, [1.0, 0.0], [0.5, 0.5]),
        alone(tmp_path, 1, [0.9, 0.1], [0.4, 0.6]),
        joined(tmp_path, "fedavg-matched", 0, [0.6, 0.6]),
        joined(tmp_path, "fedavg-matched", 1, [0.5, 0.5]),
        joined(tmp_path, "fedtutor", 0, [0.5, 0.5], [0.9, 0.8]),
        joined(tmp_path, "fedtutor", 1, [0.5, 0.5], [0.7, 0.9]),
    ]
    return View(make_plan(["local", "fedavg-matched", "fedtutor"], [0, 1]), runs, {})


def mixed(mix, shares):
    return 100 * sum(a * b for a, b in zip(mix, shares, strict=True))


def test_gains_are_paired_site_by_site_and_over_seeds(view):
    found = view.joining
    both = found.best()["fedtutor"]
    assert set(both.index) == {(seed, site) for seed in (0, 1) for site in ("north", "south")}
    assert found.pairs.keys() == {("fedavg-matched", "last"), ("fedtutor", "last"), ("fedtutor", "averaged")}
    ours = {
        0: mixed(NORTH, [0.9, 0.8]) + mixed(SOUTH, [0.9, 0.8]),
        1: mixed(NORTH, [0.7, 0.9]) + mixed(SOUTH, [0.7, 0.9]),
    }
    theirs = {
        0: mixed(NORTH, [1.0, 0.0]) + mixed(SOUTH, [0.5, 0.5]),
        1: mixed(NORTH, [0.9, 0.1]) + mixed(SOUTH, [0.4, 0.6]),
    }
    expected = paired({s: v / 2 for s, v in ours.items()}, {s: v / 2 for s, v in theirs.items()})
    table = found.table().set_index(["method", "model", "tested on"])
    row = table.loc["FedTutor", "averaged", "own class mix"]
    assert row["gain"] == f"{expected.mean:+.1f}"
    assert row["95 % interval"] == expected.interval
    assert row["sites that gain"] == "4 of 4"
    # 0.6 and 0.5 against north's 0.75 and 0.7 and south's 0.5 and 0.55
    assert table.loc["Labels only", "last", "own class mix"]["sites that gain"] == "1 of 4"
    assert table.loc["Labels only", "last", "common test set"]["alone"] == "50.0"


def test_site_by_site(view):
    found = view.joining.by_site().set_index("site")
    assert list(found.index) == ["north", "south"]
    assert found.loc["north", "alone, own class mix"] == f"{(75 + 70) / 2:.1f}"
    assert found.loc["north", "FedTutor, common test set"] == "50.0"  # not its average's 82.5: alone has no average


def test_every_federated_method_has_its_answer(view):
    matched, tutor = view.joining.sentences()
    assert "cannot be judged by two seeds" in matched
    assert "FedTutor" in tutor
    assert "0 of 4 (2 sites × 2 seeds) gain" in tutor
    assert tutor.endswith("on the common test set \N{MINUS SIGN}5.0 beyond labels only.")  # 50 against 60 and 50


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.9, 0.9, 0.8), "is worth it"),
        ((0.1, 0.2, 0.1), "does harm"),
        ((0.9, 0.2, 0.6), "makes no difference that can be told"),
    ],
)
def test_three_seeds_may_tell(tmp_path, shares, said):
    runs = [alone(tmp_path, seed, [1.0, 0.0], [0.5, 0.5]) for seed in range(3)]
    runs += [joined(tmp_path, "fedtutor", seed, [share, share]) for seed, share in enumerate(shares)]
    assert said in View(make_plan(["local", "fedtutor"], [0, 1, 2]), runs, {}).joining.sentences()[0]


def with_accuracies(run, accuracies):
    metrics = [
        record | {"test": record["test"] | {"accuracy": accuracy}}
        for record, accuracy in zip(run.metrics, accuracies, strict=True)
    ]
    return replace(run, metrics=metrics)


CLIMBING = [0.3 + 0.02 * number for number in range(EVALUATIONS)]
SCATTERED = [0.5, 0.5, 0.5, 0.5, 0.5, 0.46, 0.5, 0.53, 0.48, 0.55, 0.51]  # the last three are 1.0 points above


@pytest.mark.parametrize(
    ("mine", "theirs", "judged"),
    [(CLIMBING, None, False), (None, CLIMBING, True), (SCATTERED, SCATTERED, True)],
)
def test_a_site_alone_that_still_rises_may_catch_up(tmp_path, mine, theirs, judged):
    """What is ahead may rise further, and evaluations may scatter: both change nothing."""
    runs = [alone(tmp_path, seed, [1.0, 0.0], [0.5, 0.5]) for seed in range(3)]
    runs += [joined(tmp_path, "fedtutor", seed, [share, share]) for seed, share in enumerate((0.9, 0.9, 0.8))]
    told = [mine] * 3 + [theirs] * 3
    runs = [with_accuracies(run, found) if found else run for run, found in zip(runs, told, strict=True)]
    sentence = View(make_plan(["local", "fedtutor"], [0, 1, 2]), runs, {}).joining.sentences()[0]
    assert ("is worth it" in sentence) == judged
    assert ("cannot be judged before accuracies stop rising" in sentence) != judged


def test_few_evaluations_are_not_judged(view):
    few = [replace(run, metrics=run.metrics[:5]) for run in view.runs]
    assert all("before accuracies stop rising" in told for told in View(view.plan, few, {}).joining.sentences())


def test_without_anybody_alone_there_is_no_question(view):
    plan = make_plan(["fedavg-matched", "fedtutor"], [0, 1])
    assert View(plan, view.runs[2:], {}).joining is None
    assert View(make_plan(["local"], [0, 1]), view.runs[:2], {}).joining is None


def test_a_comparison_answers_in_its_report_and_lists_the_sites(images, tmp_path, quiet):
    plan = make_plan(["local", "fedtutor"], [0])
    found = compare(plan, tiny.experiment(clients_per_round=4), images, tmp_path / "out", progress=False)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Is joining worth it?" in page
    assert found.joining.sentences()[0].replace("'", "&#39;") in page
    written = pd.read_csv(tmp_path / "out" / compare_report.SITES_FILE)
    assert len(written) == 4 * 3  # alone; the last and the averaged model of FedTutor
    assert written["common"].to_list() == pytest.approx(found.sites["common"].to_list(), abs=1e-4)  # in %, both
    assert set(found.methods(own_mix=True)["own mix"]) != {"–"}
