"""Rows: what was measured over seeds, what the paper prints, and nothing in between."""

import pytest

import synthetic
from feddure.studies.grid.store import Store
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.rows import Row, difference, gather, is_apart, mean_of, rows, signed, stem


def request(**fields):
    fields = {"datasets": ("cifar10",), "settings": ("dir-dir",), "methods": ("fedavg-matched", "feddure")} | fields
    return reproduce.Request(**fields)


def by_seed(cell):
    base = {"feddure": 57.0, "fedavg-matched": 55.0, "fedmatch": 45.0}[cell.experiment.method]
    return base + {0: -1.0, 1: 0.5, 2: 0.5}[cell.experiment.seed] * (2 if cell.experiment.method == "feddure" else 1)


def find(found, method, **fields):
    chosen = [row for row in found if row.method == method and all(getattr(row, k) == v for k, v in fields.items())]
    assert len(chosen) == 1
    return chosen[0]


def test_a_row_is_the_mean_and_deviation_over_seeds(tmp_path):
    cells = reproduce.cells("table1", request())
    row = find(rows(cells, synthetic.filled(tmp_path, cells, by_seed)), "feddure", dataset="cifar10", setting="dir-dir")
    assert row.seeds == (0, 1, 2)
    assert row.missing == ()
    assert row.last10.mean == pytest.approx(57.0)
    assert row.last10.sd == pytest.approx(3**0.5)
    assert row.last.mean == pytest.approx(58.0)
    assert row.averaged.mean == pytest.approx(59.0)
    assert row.local_steps == 5.0
    assert row.paper == 57.73
    assert row.from_paper == pytest.approx(57.0 - 57.73)


def test_differences_from_labels_only_are_paired_by_seed(tmp_path):
    cells = reproduce.cells("table1", request())
    found = rows(cells, synthetic.filled(tmp_path, cells, by_seed))
    beyond = find(found, "feddure", dataset="cifar10", setting="dir-dir").beyond_labels
    assert beyond.mean == pytest.approx(2.0)
    assert beyond.seeds == 3
    assert beyond.low == pytest.approx(2.0 - 4.3027 * 0.75**0.5 / 3**0.5, abs=1e-3)
    assert find(found, "fedavg-matched", dataset="cifar10", setting="dir-dir").beyond_labels is None


def test_a_study_without_labels_only_cells_finds_them_among_the_others(tmp_path):
    synthetic.filled(tmp_path, reproduce.cells("table1", request()), by_seed)
    cells = reproduce.cells("table2", request(methods=("feddure",)))
    assert find(rows(cells, Store(tmp_path)), "feddure", setting="dir-dir").beyond_labels.mean == pytest.approx(2.0)


def test_what_is_not_measured_is_missing_and_has_no_number(tmp_path):
    cells = reproduce.cells("table1", request())
    store = synthetic.filled(
        tmp_path, cells, lambda cell: 57.0 if (cell.experiment.method, cell.experiment.seed) == ("feddure", 1) else None
    )
    found = rows(cells, store)
    row = find(found, "feddure", dataset="cifar10", setting="dir-dir")
    assert (row.seeds, row.missing) == ((1,), (0, 2))
    assert row.last10.sd is None
    assert row.beyond_labels is None
    empty = find(found, "fedavg-matched", dataset="cifar10", setting="dir-dir")
    assert (empty.last10, empty.last, empty.averaged, empty.local_steps, empty.from_paper) == (None,) * 5
    assert empty.missing == (0, 1, 2)


def test_every_number_of_the_papers_table_has_a_row(tmp_path):
    found = rows(reproduce.cells("table1", request()), Store(tmp_path))
    cinic = find(found, "feddure", dataset="cinic10", setting="dir-dir")
    assert (cinic.paper, cinic.seeds, cinic.missing) == (46.43, (), ())
    assert sum(row.paper is not None for row in found) == 81
    assert sum(row.paper is not None for row in rows(reproduce.cells("table2", request()), Store(tmp_path))) == 21


def test_a_data_set_with_the_papers_numbers_alone_has_a_row_for_labels_only_training_too(tmp_path):
    found = rows(reproduce.cells("table1", request()), Store(tmp_path))
    methods = [row.method for row in found if (row.dataset, row.setting) == ("cinic10", "dir-dir")]
    assert methods == list(reproduce.TABLE1)


@pytest.mark.parametrize("fields", [{"preset": "demo", "datasets": ("fashion-mini",)}, {"rounds": 20}])
def test_experiments_that_are_not_the_papers_stand_alone(tmp_path, fields):
    asked = reproduce.cells("table1", request(seeds=(0,), **fields))
    store = synthetic.filled(tmp_path, asked, by_seed)
    found = rows(gather("table1", asked, store), store)
    assert {row.dataset for row in found} == {asked[0].experiment.dataset}


def test_a_mean_is_named_as_in_a_runs_summary():
    def of(*rounds):
        measured = {seed: synthetic.measurement(50.0, rounds=number) for seed, number in enumerate(rounds)}
        return mean_of([Row("table1", "aaai24", "cifar10", "dir-dir", "feddure", measured=measured)])

    assert of(200) == of() == "mean of last 10 evaluations"
    assert of(20, 20) == "mean of all 4 evaluations"
    assert of(1) == "its only evaluation"
    assert of(20, 200) == "mean of all 4 evaluations or mean of last 10 evaluations"


def test_charts_have_values_on_their_axis_and_no_number_of_the_paper(tmp_path):
    found = rows(reproduce.cells("labels", request(methods=("feddure",), seeds=(0,))), Store(tmp_path))
    assert [row.value for row in found] == [2, 4, 10, 15, 20]
    assert {row.paper for row in found} == {None}


def test_a_look_at_one_method_keeps_the_others_in_the_table(tmp_path):
    store = synthetic.filled(tmp_path, reproduce.cells("table1", request()), by_seed)
    asked = reproduce.cells("table1", request(methods=("feddure",), seeds=(0,)))
    found = rows(gather("table1", asked, store), store)
    assert find(found, "fedavg-matched", dataset="cifar10", setting="dir-dir").seeds == (0, 1, 2)
    assert find(found, "feddure", dataset="cifar10", setting="dir-dir").seeds == (0, 1, 2)


def test_cells_of_another_study_do_not_bring_their_data_set_along(tmp_path):
    table = request(datasets=("fashion-mnist",), methods=("feddure",), seeds=(0,))
    store = synthetic.filled(tmp_path, reproduce.cells("table1", table), by_seed)
    asked = reproduce.cells("gamma", request(methods=("feddure",), seeds=(0,)))
    assert {cell.experiment.dataset for cell in gather("gamma", asked, store)} == {"cifar10"}
    wanted = reproduce.cells("gamma", request(datasets=("fashion-mnist",), methods=("feddure",), seeds=(0,)))
    store = synthetic.filled(tmp_path, wanted, by_seed)
    assert {cell.experiment.dataset for cell in gather("gamma", asked, store)} == {"cifar10", "fashion-mnist"}


def test_a_changed_method_is_a_row_of_its_own_in_the_same_table(tmp_path):
    changed = request(methods=("fedmatch",), seeds=(0,), changes={"fedmatch.optimizer": "common"})
    cells = reproduce.cells("table1", changed)
    store = synthetic.filled(tmp_path, [*cells, *reproduce.cells("table1", request(seeds=(0,)))], by_seed)
    assert not is_apart(cells)
    assert stem("table1", cells, "aaai24") == "table1-aaai24"
    plain = reproduce.cells("table1", request(seeds=(0,)))
    found = rows(gather("table1", plain, store), store)
    row = find(found, "fedmatch", options="fedmatch.optimizer=common")
    assert row.name == "FedMatch, fedmatch.optimizer=common"
    assert row.last10.mean == pytest.approx(44.0)
    assert row.paper is None
    assert row.beyond_labels.mean == pytest.approx(-10.0)
    assert find(found, "fedmatch", dataset="cifar10", setting="dir-dir", options="").missing == (0,)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rounds": 20}, "table1-aaai24-20-rounds"),
        ({"changes": {"server.weight": "uniform"}}, "table1-aaai24-server.weight=uniform"),
        ({"changes": {"server.weight": "uniform"}, "rounds": 5}, "table1-aaai24-5-rounds-server.weight=uniform"),
    ],
)
def test_other_experiments_do_not_overwrite_the_studys_files(tmp_path, fields, name):
    store = synthetic.filled(tmp_path, reproduce.cells("table1", request()), by_seed)
    cells = reproduce.cells("table1", request(**fields))
    assert gather("table1", cells, store) == cells
    assert stem("table1", cells, "aaai24") == name


def test_long_names_of_files_are_cut_and_told_apart_by_a_hash():
    def named(note):
        return stem("table1", reproduce.cells("table1", request(changes={"options": {"note": note}})), "aaai24")

    for letter in ("x", "ü", "漢"):
        cut, other = named(letter * 300), named(letter * 299)
        assert cut == named(letter * 300)
        assert cut != other
        assert cut.startswith("table1-aaai24-options=")
        assert len(cut.encode()) <= 110
    assert named("short") == "table1-aaai24-options=--note----short--"


def test_differences_need_common_seeds_and_two_of_them_for_an_interval():
    assert difference({0: 1.0}, {1: 2.0}) is None
    single = difference({0: 3.0, 1: 9.0}, {0: 1.0})
    assert (single.mean, single.low, single.seeds) == (2.0, None, 1)
    assert not single.above
    assert difference({0: 3.0, 1: 3.1}, {0: 1.0, 1: 1.0}).above
    assert difference({0: 1.0, 1: 1.0}, {0: 3.0, 1: 3.1}).below


def test_signs_are_those_of_print():
    assert [signed(value) for value in (1.24, -1.26, 0.04, -0.04, 0.0)] == ["+1.2", "−1.3", "0.0", "0.0", "0.0"]
