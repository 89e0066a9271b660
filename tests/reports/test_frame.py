"""The frame of results: a row a run, and the statistics that every view shares."""

import dataclasses
import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import synthetic
import tiny
from commands import table
from feddure import experiments, methods
from feddure.errors import RunError
from feddure.reports import frame
from feddure.reports.frame import Difference, Spread, mean_sd, paired
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import Cell, Measurement, Store
from feddure.tracking.records import Run

# --- statistics ----------------------------------------------------------------------------------------


def test_mean_and_deviation_by_hand():
    assert mean_sd([40.0, 50.0, 60.0]) == Spread(50.0, 10.0, 3)
    assert mean_sd([66.0, None, math.nan]) == Spread(66.0, None, 1)
    assert mean_sd([]) is None
    assert mean_sd([None]) is None


def test_a_spread_has_the_digits_that_its_deviation_leaves():
    assert str(Spread(67.149, 0.351, 3)) == "67.1 ± 0.4"
    assert str(Spread(67.149, None, 1)) == "67.15"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=8))
def test_the_interval_is_that_of_the_paired_t_test(accuracies):
    ours, theirs = zip(*accuracies, strict=True)
    found = paired(dict(enumerate(ours)), dict(enumerate(theirs)))
    if found.low is None:
        assert all(o - t == pytest.approx(found.mean, abs=1e-9) for o, t in accuracies)
    else:
        expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_seeds_are_paired_by_their_numbers():
    assert paired({0: 1.0, 1: 5.0}, {1: 3.0, 2: 9.0}) == Difference(2.0, None, None, 1)
    assert paired({0: 1.0}, {1: 3.0}) is None


@pytest.mark.parametrize(
    ("found", "text", "verdict"),
    [
        (Difference(20.0, None, None, 1), "+20.00", "one seed cannot tell"),
        (Difference(2.3, 1.2, 3.4, 3), "+2.3 [+1.2, +3.4]", "better by 1.2 to 3.4 points"),
        (Difference(-2.3, -3.4, -1.2, 3), "−2.3 [−3.4, −1.2]", "worse by 1.2 to 3.4 points"),
        (Difference(1.0, -0.04, 2.1, 3), "+1.0 [0.0, +2.1]", "no difference can be told"),
        (Difference(0.0, None, None, 3), "0.0", "no difference"),
        (Difference(1.0, None, None, 2), "+1.0", "equal on all seeds: more seeds are needed"),
    ],
)
def test_differences_in_words(found, text, verdict):
    assert (str(found), found.verdict) == (text, verdict)


# --- rows ----------------------------------------------------------------------------------------------


def cell(**fields):
    return Cell("study", "tiny", tiny.experiment(dataset="fashion-mini", **fields), "norm=group")


def test_cells_are_rows_measured_or_not(tmp_path):
    store, done, gone, vain = Store(tmp_path), cell(seed=0), cell(seed=1), cell(seed=2)
    store.keep(
        Measurement(
            done.hash, experiments.changes(done.experiment), rounds=2, local_steps=10.0, accuracy_last=0.5,
            accuracy_last10=0.25, accuracy_ema=None, curve=[(1, 0.25, None), (2, 0.5, 0.75)], seconds=12.0,
            build_seconds=0.0, together=1, partition="", bytes_per_round={"up": 7.0, "down": 9.0},
            diagnostics={"d": 1.0}, environment={"gpu": "H"},
        )
    )  # fmt: skip
    store.fail(vain, Problem("ValueError: no"))
    found = frame.of_cells([done, gone, vain], store)
    assert list(found.columns) == list(frame.COLUMNS)
    first = found.iloc[0]
    assert (first.method, first.dataset, first.options) == ("fedavg", "fashion-mini", "norm=group")
    assert (first.title, first.cell) == (methods.title("fedavg"), done.hash)
    assert (first.accuracy_last, first.accuracy_last10, first.bytes_up, first.bytes_down) == (50.0, 25.0, 14.0, 18.0)
    assert first.curve == [(1, 25.0, None), (2, 50.0, 75.0)]
    assert first.diagnostics == {"d": 1.0}
    assert list(found["failed"]) == ["", "", "ValueError: no"]
    assert list(found["accuracy_last10"].notna()) == [True, False, False]
    assert frame.by_seed(found) == {0: 25.0}
    assert frame.mean_of(found, spelled_out=True) == "mean of all 2 evaluations"
    assert "Measured on H" in frame.provenance(found)[0]
    assert frame.provenance(frame.measured(found.iloc[1:])) == []


def test_runs_are_rows(tmp_path):
    metrics = [
        {"round": n, "clients": [0, 1], "steps": [4, 6], "left_out": [1], "test": {"accuracy": n / 20}}
        | {"communication": {"up": 7, "down": 10}}
        for n in range(1, 13)
    ]
    partition = {"labelled": [[3, 1]], "unlabelled": [[10, 6]]}
    run = Run(tmp_path, tiny.experiment(rounds=12), metrics, [{"round": 1, "seconds": 2.0}], {"cpu": "c"}, partition)
    row = frame.of_runs([run]).iloc[0]
    assert row.accuracy_last == pytest.approx(60.0)
    assert row.accuracy_last10 == pytest.approx(37.5)
    assert math.isnan(row.accuracy_ema)
    assert (row.rounds, row.local_steps, row.left_out, row.seconds) == (12, 5.0, 0.5, 2.0)
    assert (row.labels, row.bytes_up, row.bytes_down) == (20.0, 84, 120)
    young = Run(tmp_path, tiny.experiment(), [], [], {}, {})
    assert math.isnan(frame.of_runs([young]).iloc[0].accuracy_last10)


# --- files ---------------------------------------------------------------------------------------------


def test_tables_are_written_with_what_is_missing_empty(tmp_path):
    frame.write_csv(tmp_path / "table.csv", pd.DataFrame({"name": ["a|b", "<i>"], "value": [1.5, None]}))
    assert table(tmp_path / "table.csv") == [{"name": "a|b", "value": "1.5"}, {"name": "<i>", "value": ""}]


def test_results_have_a_row_for_each_study_and_measured_cell(tmp_path):
    store, first, missing = Store(tmp_path), cell(), cell(seed=5)
    shared = dataclasses.replace(first, study="another", name="few steps")
    store.keep(synthetic.measured(first, 100 / 3))
    frame.write_results(tmp_path, frame.of_cells([first, missing], store))
    before = (tmp_path / "results.csv").read_text()
    for one in (shared, shared):
        frame.write_results(tmp_path, frame.of_cells([one], store))
    assert (tmp_path / "results.csv").read_text().startswith(before)
    rows = table(tmp_path / "results.csv")
    assert tuple(rows[0]) == frame.RESULTS
    assert [(row["study"], row["config_hash"]) for row in rows] == [("study", first.hash), ("another", first.hash)]
    assert [row["accuracy_last10"] for row in rows] == ["33.3333"] * 2
    assert [row["name"] for row in rows] == ["", "few steps"]
    (tmp_path / "results.csv").write_text("study,method\ntable1,feddure\n")
    with pytest.raises(RunError, match=r"results.csv: not a table of results .*move it away"):
        frame.write_results(tmp_path, frame.of_cells([first], store))
    assert (tmp_path / "results.csv").read_text() == "study,method\ntable1,feddure\n"


def test_labels_are_a_share_of_the_training_images():
    asked = {"partition.clients": 100, "partition.labels_per_class": 5}
    assert frame.labels(tiny.experiment(dataset="cifar10", **asked)) == 10
    asked = {"partition.label_fraction": 0.02, "partition.labels_per_class": None}
    assert frame.labels(tiny.experiment(dataset="cifar10", **asked)) == 2
    assert frame.labels(tiny.experiment(dataset="folder:somewhere")) == ""
