"""What pseudo labels were worth, in numbers and figures."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure.reports import figures, inline
from feddure.reports.diagnostics import best_of_threshold, last_means, per_class, running_mean, table, trace
from feddure.simulation.diagnostics import auroc

MOVING = {
    name: lambda number: number / 100
    for name in ("weight_mean", "pseudo_accuracy", "weight_auroc", "d_mean", "ascent_share")
}
FORMAT = {"color": "red", "marker": "o", "linestyle": "-"}


def feddure(rounds=30, **changes):
    """The records of a method with weights and a reward; a change is a value or a function of the round."""
    base = {
        "weight_mean": 0.5,
        "weight_p10": 0.48,
        "weight_p50": 0.5,
        "weight_p90": 0.53,
        "pseudo_accuracy": 0.6,
        "pseudo_accuracy_weighted": 0.604,
        "weight_auroc": 0.53,
        "pseudo_accuracy_per_class": [0.9, 0.2, None],
        "coverage_per_class": [0.5, 0.4, None],
        "d_mean": 0.01,
        "d_lowest": -0.1,
        "d_highest": 0.2,
        "ascent_share": 0.0,
        "clients": [{"weight_auroc": 0.4}, {"weight_auroc": 0.6}, {"weight_auroc": None}],
    }
    train = {"loss": 0.5, "loss_unlabelled": 0.25, "d": 0.01}

    def at(number):
        return {name: value(number) if callable(value) else value for name, value in (base | changes).items()}

    return [
        {"round": number, "train": train | {"loss": 1 / number}, "diagnostics": at(number)}
        for number in range(1, rounds + 1)
    ]


def fixmatch(rounds=30, **changes):
    """The records of a method that weighs by a threshold."""
    mask = {"weight_mean": 0.3, "weight_p10": 0.0, "weight_p50": 0.0, "weight_p90": 1.0}
    rest = {"pseudo_accuracy_weighted": 0.9, "clients": [{"weight_auroc": 0.55}]}
    lines = feddure(rounds, **mask | rest | changes)
    for line in lines:
        for name in ("d_mean", "d_lowest", "d_highest", "ascent_share"):
            del line["diagnostics"][name]
        del line["train"]["d"]
    return lines


def fedavg(rounds=30):
    return [{"round": number, "train": {"loss": 0.7}} for number in range(1, rounds + 1)]


# --- numbers -----------------------------------------------------------------------------------------------
def test_a_running_mean_covers_five_rounds_of_a_short_run_and_a_tenth_of_a_long_one():
    assert running_mean(pd.Series(np.arange(10.0))).tolist() == [1, 1.5, 2, 3, 4, 5, 6, 7, 7.5, 8]
    peak = np.zeros(200)
    peak[100] = 1
    assert np.flatnonzero(running_mean(pd.Series(peak))).tolist() == list(range(90, 111))
    gaps = running_mean(pd.Series([1.0, None, 3.0, None, None, None, None, None, 8.0]))
    assert gaps[:3].tolist() == [2, 2, 2]
    assert np.isnan(gaps[5])


def test_a_trace_has_a_value_for_each_round_and_the_clients_own_auroc():
    lines = feddure(4, weight_auroc=lambda number: None if number == 2 else number / 10)
    lines.append({"round": 5, "train": {"loss": None}})
    found = trace(lines)
    assert found.index.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(found["weight_auroc"]).tolist() == [False, True, False, False, True]
    assert found["auroc_within"].tolist()[:4] == [0.5] * 4
    assert found["chance"].tolist() == [1 / 3] * 5
    assert "drift" not in trace([{"round": 1, "diagnostics": {"drift": [1.0]}}])


def test_the_level_of_ascent_is_shown_only_where_rewards_come_near_it():
    assert "ascent_below" not in trace(feddure(d_lowest=-0.4))
    assert trace(feddure(3, d_lowest=-0.6))["ascent_below"].tolist() == [-0.5] * 3
    assert "ascent_below" not in trace(feddure(3, d_lowest=-0.6, reach=0.5))
    assert trace(feddure(3, d_lowest=-1.1, reach=0.5))["ascent_below"].tolist() == [-1.0] * 3
    assert "ascent_below" not in trace(feddure(3, d_lowest=-1.1, reach=0.0))  # d acts on nothing


def test_weights_of_a_threshold_have_no_percentiles_but_a_best_auroc():
    found = trace(fixmatch(5, weight_p90=lambda number: 0.4 if number == 3 else 1.0))
    assert "weight_p10" not in found
    assert found["auroc_best"].tolist() == pytest.approx([0.75] * 5)
    assert "weight_p10" in trace(feddure(5))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 20), st.data())
def test_the_best_of_a_threshold_is_what_letting_right_ones_pass_first_gives(size, data):
    right = data.draw(st.integers(1, size - 1))
    passing = data.draw(st.integers(0, size))
    numbers = np.arange(size)
    expected = auroc((numbers < passing).astype(float), numbers < right)
    assert best_of_threshold(np.array(passing / size), np.array(right / size)) == pytest.approx(expected, abs=1e-7)


def test_means_are_those_of_the_last_rounds():
    found = last_means(trace(feddure(30, weight_auroc=lambda number: 0.9 if number <= 10 else 0.5)))
    assert found["weight_auroc"] == pytest.approx(0.5)
    gone = feddure(30, weight_auroc=lambda number: 0.9 if number <= 10 else None)
    assert "weight_auroc" not in last_means(trace(gone))


def test_quantities_of_classes_fill_a_table_of_rounds():
    found = per_class([*feddure(2), {"round": 3}], "coverage_per_class")
    assert found.shape == (3, 3)
    assert found.loc[1, :1].tolist() == [0.5, 0.4]
    assert np.isnan(found.loc[3]).all()
    assert per_class(fedavg(3), "coverage_per_class").shape == (3, 0)


# --- table -------------------------------------------------------------------------------------------------
def test_runs_are_compared_in_a_table():
    found = table({"ours": feddure(), "plain": fedavg(), "theirs": fixmatch(weight_auroc=0.7)})
    assert list(found["run"]) == ["ours", "theirs"]
    ours, theirs = found.to_dict("records")
    assert (ours["right"], ours["weighted"], ours["mean d"], ours["AUROC"]) == ("60.00", "60.40", "+0.010", "0.53")
    assert (theirs["mean d"], theirs["ascent"], theirs["threshold at best"]) == ("–", "–", "0.75")


# --- figures -----------------------------------------------------------------------------------------------
def drawn(*runs):
    """The titles of the figures, all of which can be rendered."""
    lines = [figures.Line(f"run {place} $", metrics, FORMAT) for place, metrics in enumerate(runs)]
    charts = figures.pseudo_labels(lines)
    for chart in charts:
        assert len(inline.svg(chart.figure)) < 200_000
    return [chart.title for chart in charts]


def test_runs_have_the_figures_of_what_they_recorded():
    every = drawn(feddure(**MOVING))
    assert len(every) == 7
    assert drawn(fixmatch(**MOVING)) == [title for title in every if "Reward" not in title and "ascent" not in title]
    assert drawn(fedavg(), feddure(**MOVING), fixmatch(10)) == every
    assert drawn(fedavg()) == drawn([]) == drawn([{"round": 1, "diagnostics": {"drift": [1.0]}}]) == []


def test_what_is_not_known_and_what_never_changes_is_left_out():
    alike = {f"weight_{name}": 1.0 for name in ("mean", "p10", "p50", "p90")}
    unknown = dict.fromkeys(("pseudo_accuracy", "pseudo_accuracy_weighted", "weight_auroc"))
    nothing = {"pseudo_accuracy_per_class": None, "coverage_per_class": None, "clients": []}
    own = fixmatch(**alike | unknown | nothing)
    assert drawn(own) == ["Losses while training"]
    assert list(table({"own": own})) == ["run", "mean weight"]
    assert len(drawn(own, fixmatch())) > 1  # two constants that differ are a comparison


def test_different_classes_are_not_compared_and_many_are_drawn():
    many = feddure(2, **MOVING, coverage_per_class=[0.5] * 100, pseudo_accuracy_per_class=[0.5] * 100)
    assert len(drawn(many)) == 7
    assert len(drawn(feddure(2), many)) == 6
