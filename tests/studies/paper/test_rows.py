"""Rows: what was measured over seeds, what the paper prints, and nothing in between."""

import pytest

import synthetic
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import Store
from feddure.studies.paper import plan
from feddure.studies.paper.rows import (
    Row,
    accuracy,
    beyond_labels,
    entry,
    grids,
    records,
    rows,
    steps,
    table,
    unmeasured,
)

THREE = {0: 56.0, 1: 57.0, 2: 58.0}


def request(**fields):
    fields = {"datasets": ("cifar10",), "settings": ("dir-dir",), "methods": ("fedavg-matched", "feddure")} | fields
    return plan.Request(**fields)


def by_seed(cell):
    base = {"feddure": 57.0, "fedavg-matched": 55.0, "fedmatch": 45.0}[cell.experiment.method]
    return base + {0: -1.0, 1: 0.5, 2: 0.5}[cell.experiment.seed] * (2 if cell.experiment.method == "feddure" else 1)


def find(found, method, **fields):
    fields = {"dataset": "cifar10", "setting": "dir-dir"} | fields
    (row,) = [row for row in found if row.method == method and all(getattr(row, k) == v for k, v in fields.items())]
    return row


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Rows of FedDure and labels-only training with three seeds."""
    cells = plan.cells("table1", request())
    return rows(cells, synthetic.filled(tmp_path_factory.mktemp("cells"), cells, by_seed))


def test_a_row_is_the_mean_and_deviation_over_seeds(measured):
    row = find(measured, "feddure")
    assert (row.seeds, row.missing, row.local_steps) == ([0, 1, 2], [], 5.0)
    assert (row.last10.mean, row.last10.sd) == pytest.approx((57.0, 3**0.5))
    assert row.paper == 57.73
    assert row.from_paper == pytest.approx(57.0 - 57.73)


def test_differences_from_labels_only_are_paired_by_seed(measured):
    beyond = find(measured, "feddure").beyond_labels
    assert (beyond.mean, beyond.n) == (pytest.approx(2.0), 3)
    assert beyond.low == pytest.approx(2.0 - 4.3027 * 0.75**0.5 / 3**0.5, abs=1e-3)
    assert find(measured, "fedavg-matched").beyond_labels is None


def test_a_study_without_labels_only_cells_finds_them_among_the_others(tmp_path):
    synthetic.filled(tmp_path, plan.cells("table1", request()), by_seed)
    cells = plan.cells("table2", request(methods=("feddure",)))
    assert find(rows(cells, Store(tmp_path)), "feddure").beyond_labels.mean == pytest.approx(2.0)


def test_what_is_not_measured_is_missing_and_has_no_number(tmp_path):
    cells = plan.cells("table1", request())
    kept = [cell for cell in cells if (cell.experiment.method, cell.experiment.seed) == ("feddure", 1)]
    other = next(cell for cell in cells if cell.experiment.method == "fedavg-matched")
    store = synthetic.filled(tmp_path, kept, by_seed)
    store.fail(other, Problem("why"))
    found = rows(cells, store)
    row, empty = find(found, "feddure"), find(found, "fedavg-matched")
    assert (row.seeds, row.missing) == ([1], [0, 2])
    assert (row.last10.sd, row.beyond_labels) == (None, None)
    assert (empty.last10, empty.local_steps, empty.from_paper, empty.missing) == (None, None, None, [0, 1, 2])
    assert empty.failed == {0: "why"}
    assert accuracy(empty) == "failed"
    assert unmeasured(found) == {
        "Failed": ["CIFAR-10, Labels only: DIR-DIR (seed 0): why"],
        "Not measured yet": [
            "CIFAR-10, Labels only: DIR-DIR (seeds 1, 2)",
            "CIFAR-10, FedDure: DIR-DIR (seeds 0, 2)",
        ],
    }


def test_every_number_of_the_papers_tables_has_a_row(measured, tmp_path):
    cinic = find(measured, "feddure", dataset="cinic10")
    assert (cinic.paper, cinic.seeds, cinic.missing) == (46.43, [], [])
    assert sum(row.paper is not None for row in measured) == 81
    assert [row.method for row in measured if (row.dataset, row.setting) == ("cinic10", "dir-dir")] == list(plan.TABLE1)
    assert sum(row.paper is not None for row in rows(plan.cells("table2", request()), Store(tmp_path))) == 21


def test_experiments_that_are_not_the_papers_stand_alone(tmp_path):
    asked = plan.cells("table1", request(seeds=(0,), rounds=20))
    store = synthetic.filled(tmp_path, asked, by_seed)
    assert {row.dataset for row in rows(plan.gather(asked, store), store)} == {"cifar10"}


def test_charts_have_values_on_their_axis_and_no_number_of_the_paper(tmp_path):
    found = rows(plan.cells("labels", request(methods=("feddure",), seeds=(0,))), Store(tmp_path))
    assert [row.value for row in found] == [2, 4, 10, 15, 20]
    assert {row.paper for row in found} == {None}


def test_several_seeds_have_one_digit_and_a_deviation_one_seed_has_two():
    several = synthetic.row("table1", "feddure", THREE, paper=57.73)
    one = synthetic.row("table1", "feddure", {0: 56.789}, paper=57.73)
    assert entry(several) == "57.0 ± 1.0 (57.73, −0.7)"
    assert entry(one) == "56.79 (57.73, −0.94)"
    assert accuracy(one, seeds=3) == "56.79 n=1"
    assert entry(Row("table1", "aaai24", "cinic10", "dir-dir", "feddure", paper=46.43)) == "– (46.43)"
    assert entry(Row("gamma", "aaai24", "cifar10", "dir-dir", "feddure")) == "not measured"


def test_methods_stand_in_rows_and_settings_in_columns():
    found = [
        synthetic.row("table1", "feddure", THREE, reference={0: 50.0, 1: 50.5, 2: 52.0}),
        synthetic.row("table1", "fedmatch", THREE),
        synthetic.row("table1", "feddure", THREE, setting="iid-iid", steps=4.79),
    ]
    (grid,) = grids(found)
    assert (grid.title, list(grid.columns)) == ("CIFAR-10", ["DIR-DIR", "IID-IID"])
    assert grid.names == ["FedDure", "FedMatch"]
    assert list(table(grid, 3)["local steps"]) == ["4.8–5.0", "5.0"]
    assert list(table(grid, 3)["IID-IID"]) == ["57.0 ± 1.0", "–"]
    assert list(beyond_labels(grid)["method"]) == ["FedDure"]
    assert steps([None]) == "–"


def test_charts_have_a_table_for_each_setting_with_the_axis_across():
    found = [
        synthetic.row("gamma", "feddure", THREE, setting=setting, value=value)
        for setting in ("iid-dir", "dir-dir")
        for value in (1.0, 0.3)
    ]
    assert [grid.title for grid in grids(found)] == ["CIFAR-10, IID-DIR", "CIFAR-10, DIR-DIR"]
    assert list(grids(found)[0].columns) == ["γ = 0.3", "γ = 1"]


def test_csv_has_every_number_and_nothing_where_there_is_none():
    row = synthetic.row("table1", "feddure", THREE, {0: 50.0, 1: 50.5, 2: 52.0}, missing=(4, 3), paper=57.73)
    printed = Row("table1", "aaai24", "cinic10", "dir-dir", "feddure", paper=46.43)
    ours, cinic = records([row, printed]).to_dict("records")
    assert (ours["seeds"], ours["missing_seeds"], ours["rounds"]) == ("0 1 2", "3 4", 200)
    assert (ours["accuracy_last10_mean"], ours["accuracy_last10_sd"]) == (57.0, 1.0)
    assert (ours["difference_from_paper"], ours["beyond_labels_only"]) == (-0.73, 6.167)
    assert ours["beyond_labels_only_low"] < 6.167 < ours["beyond_labels_only_high"]
    assert cinic["paper"] == 46.43
    assert {cinic[name] for name in ("accuracy_last10_mean", "local_steps", "rounds")} == {None}
    assert records([synthetic.row("labels", "feddure", THREE, value=4.0)])["labels"][0] == "4"
