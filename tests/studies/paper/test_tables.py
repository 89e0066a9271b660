"""Tables of a study: ours, the paper's, the difference; digits that the seeds can carry."""

import csv
import io

import synthetic
from feddure.studies.paper import tables
from feddure.studies.paper.rows import Row

THREE = {0: 56.0, 1: 57.0, 2: 58.0}


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_several_seeds_have_one_digit_and_a_deviation_one_seed_has_two():
    several = synthetic.row("table1", "feddure", THREE, paper=57.73)
    one = synthetic.row("table1", "feddure", {0: 56.789})
    assert tables.accuracy(several) == "57.0 ± 1.0"
    assert tables.entry(several) == "57.0 ± 1.0 (57.73, −0.7)"
    assert tables.accuracy(one) == "56.79"
    assert tables.entry(synthetic.row("table1", "feddure", {0: 56.789}, paper=57.73)) == "56.79 (57.73, −0.94)"
    assert tables.accuracy(one, seeds=3) == "56.79 n=1"


def test_what_is_not_measured_says_so():
    row = Row("table1", "aaai24", "cinic10", "dir-dir", "feddure", paper=46.43)
    assert tables.accuracy(row) == "not measured"
    assert tables.from_paper(row) == "–"
    assert tables.entry(row) == "– (46.43)"
    assert tables.entry(Row("gamma", "aaai24", "cifar10", "dir-dir", "feddure")) == "not measured"


def test_what_failed_says_so():
    row = Row("table1", "aaai24", "cifar10", "dir-dir", "feddure", missing=(0, 1, 2), failed={0: "why", 2: "why not"})
    assert tables.accuracy(row) == "failed"
    assert tables.failed([row]) == [
        "CIFAR-10, FedDure: DIR-DIR (seed 0): why",
        "CIFAR-10, FedDure: DIR-DIR (seed 2): why not",
    ]
    assert tables.missing([row]) == ["CIFAR-10, FedDure: DIR-DIR (seed 1)"]


def test_methods_stand_in_rows_and_settings_in_columns_with_variants_below_their_method():
    found = [
        synthetic.row("table1", "feddure", THREE),
        synthetic.row("table1", "fedmatch", THREE),
        synthetic.row("table1", "feddure", THREE, setting="iid-iid"),
        synthetic.row("table1", "feddure", THREE, options="feddure.d_clip=0.1"),
    ]
    (grid,) = tables.grids(found)
    assert grid.title == "CIFAR-10"
    assert grid.columns == ["DIR-DIR", "IID-IID"]
    assert grid.names == ["FedDure", "FedDure, feddure.d_clip=0.1", "FedMatch"]
    assert [row is not None for row in grid.entries[2]] == [True, False]


def test_charts_have_a_table_for_each_setting_with_the_axis_across():
    found = [
        synthetic.row("gamma", "feddure", THREE, setting=setting, value=value)
        for setting in ("iid-dir", "dir-dir")
        for value in (1.0, 0.3)
    ]
    grids = tables.grids(found)
    assert [grid.title for grid in grids] == ["CIFAR-10, IID-DIR", "CIFAR-10, DIR-DIR"]
    assert grids[0].columns == ["γ = 0.3", "γ = 1"]


def test_steps_are_a_range_where_settings_differ():
    low, high = (synthetic.row("table1", "fedavg", {0: 50.0}) for _ in range(2))
    low.measured[0].__dict__["local_steps"] = 4.79
    assert tables.steps([low, high, None]) == "4.8–5.0"
    assert tables.steps([high]) == "5.0"
    assert tables.steps([None]) == "–"


def test_csv_has_every_number_and_empty_fields_where_there_is_none():
    found = [
        synthetic.row("table1", "feddure", THREE, paper=57.73, reference={0: 50.0, 1: 50.5, 2: 52.0}, missing=(4, 3)),
        Row("table1", "aaai24", "cinic10", "dir-dir", "feddure", paper=46.43),
    ]
    ours, cinic = read(tables.as_csv(found))
    assert (ours["seeds"], ours["missing_seeds"]) == ("0 1 2", "3 4")
    assert float(ours["accuracy_last10_mean"]) == 57.0
    assert float(ours["difference_from_paper"]) == -0.73
    assert float(ours["beyond_labels_only"]) == 6.167
    assert float(ours["beyond_labels_only_low"]) < 6.167 < float(ours["beyond_labels_only_high"])
    assert cinic["paper"] == "46.43"
    assert {cinic[name] for name in ("accuracy_last10_mean", "local_steps", "difference_from_paper", "seeds")} == {""}
    assert read(tables.as_csv([])) == []


def test_csv_of_a_chart_has_its_axis():
    assert read(tables.as_csv([synthetic.row("labels", "feddure", THREE, value=4.0)]))[0]["labels"] == "4"


def test_missing_cells_are_listed_by_method():
    found = [
        synthetic.row("table1", "feddure", {}, setting=setting, missing=(1, 0)) for setting in ("iid-iid", "dir-dir")
    ]
    assert tables.missing(found) == ["CIFAR-10, FedDure: IID-IID (seeds 0, 1); DIR-DIR (seeds 0, 1)"]


def test_markdown_tables_survive_a_bar_in_a_cell():
    assert tables.table(["a", "b"], [["x|y", "1"]])[-1] == r"| x\|y | 1 |"
