"""The paper's studies as lists of cells, its numbers as printed, and which measured cells a table shows."""

import pytest

import synthetic
from feddure import methods
from feddure.errors import ConfigError
from feddure.reports.frame import labels
from feddure.studies.grid.runner import program_of
from feddure.studies.grid.store import Store
from feddure.studies.paper.plan import (
    STUDIES,
    TABLE1,
    TABLE2,
    Request,
    begun,
    cells,
    gather,
    printed,
    stem,
)


def test_table_1_has_ninety_runs_a_data_set():
    found = cells("table1", Request())
    assert len(found) == len({cell.hash for cell in found}) == 180
    assert {cell.experiment.rounds for cell in found} == {200}
    assert {cell.experiment.method for cell in found} == set(TABLE1)
    assert len({program_of(cell) for cell in found if cell.experiment.dataset == "cifar10"}) == 10


def test_charts_share_the_papers_own_point_with_its_tables():
    one = {"datasets": ("cifar10",), "methods": ("feddure",), "settings": ("dir-dir",), "seeds": (0,)}
    (table,) = cells("table1", Request(**one))
    for study in ("figure1", "table2", "gamma", "labels", "clients"):
        assert table.hash in {cell.hash for cell in cells(study, Request(**one))}, study
    assert len(cells("labels", Request(**one))) == 5


def test_a_charts_points_are_its_axis():
    one = {"datasets": ("fashion-mnist",), "methods": ("feddure",), "settings": ("dir-dir",), "seeds": (0,)}
    assert [c.experiment.clients_per_round for c in cells("clients", Request(**one))] == [2, 5, 10, 20]
    assert [c.experiment.partition.gamma for c in cells("gamma", Request(**one))] == [0.3, 0.5, 0.7, 1.0]
    assert [labels(c.experiment) for c in cells("labels", Request(**one))] == [2, 4, 10, 15, 20]
    assert {c.experiment.local_steps for c in cells("labels", Request(**one))} == {5}


def test_changes_are_a_column_and_how_the_work_is_done_is_not():
    request = Request(methods=("fedmatch",), changes={"fedmatch.optimizer": "common", "engine.lanes": 4})
    found = cells("table1", request)[0]
    assert found.options == "fedmatch.optimizer=common"
    assert found.experiment.engine.lanes == 4


@pytest.mark.parametrize("study", STUDIES)
def test_what_a_study_sets_cannot_be_set_beside_it(study):
    with pytest.raises(ConfigError, match="--set seed: the study"):
        cells(study, Request(changes={"seed": 3}))


@pytest.mark.parametrize("settings", [("iid-iid",), ("dir-dir", "iid-iid")])
def test_gamma_is_not_varied_where_nothing_depends_on_it(settings):
    with pytest.raises(ConfigError, match=r"--settings iid-iid: .*Dirichlet shares; expected iid-dir or dir-dir"):
        cells("gamma", Request(settings=settings))
    assert cells("labels", Request(settings=settings))


def request(**fields):
    fields = {"datasets": ("cifar10",), "settings": ("dir-dir",), "methods": ("fedavg-matched", "feddure")} | fields
    return Request(**fields)


def filled(folder, *requests, study="table1"):
    return synthetic.filled(folder, [cell for one in requests for cell in cells(study, one)], lambda cell: 50.0)


def test_a_look_at_one_method_keeps_the_others_in_the_table(tmp_path):
    store = filled(tmp_path, request())
    shown = gather(cells("table1", request(methods=("feddure",), seeds=(0,))), store)
    assert {cell.hash for cell in cells("table1", request())} <= {cell.hash for cell in shown}


def test_cells_of_another_study_do_not_bring_their_data_set_along(tmp_path):
    elsewhere = request(datasets=("fashion-mnist",), methods=("feddure",), seeds=(0,))
    asked = cells("gamma", request(methods=("feddure",), seeds=(0,)))
    store = filled(tmp_path, elsewhere)
    assert {cell.experiment.dataset for cell in gather(asked, store)} == {"cifar10"}
    store = filled(tmp_path, elsewhere, study="gamma")
    assert {cell.experiment.dataset for cell in gather(asked, store)} == {"cifar10", "fashion-mnist"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rounds": 20}, "table1-aaai24-20-rounds"),
        ({"changes": {"server.weight": "uniform"}}, "table1-aaai24-server.weight=uniform"),
        ({"changes": {"fedmatch.optimizer": "common"}}, "table1-aaai24-fedmatch.optimizer=common"),
        ({"changes": {"server.weight": "uniform"}, "rounds": 5}, "table1-aaai24-5-rounds-server.weight=uniform"),
    ],
)
def test_other_experiments_do_not_overwrite_the_studys_files(tmp_path, fields, name):
    asked = cells("table1", request(**fields))
    assert gather(asked, filled(tmp_path, request())) == asked
    assert stem(asked) == name


def test_long_names_of_files_are_cut_and_told_apart_by_a_hash():
    def named(note):
        return stem(cells("table1", request(changes={"options": {"note": note}})))

    for letter in ("x", "漢"):
        cut, other = named(letter * 300), named(letter * 299)
        assert cut == named(letter * 300) != other
        assert len(cut.encode()) <= 110


def test_what_is_begun_is_more_than_what_a_chart_shares_with_table_1(tmp_path):
    store = filled(tmp_path, request(seeds=(0,)), request(seeds=(0,), preset="aaai24-fine"))
    found = {(cell.study, cell.preset) for cell in begun(store)}
    assert found == {(study, preset) for study in ("figure1", "table1") for preset in ("aaai24", "aaai24-fine")}
    store = filled(tmp_path, request(seeds=(0,)), study="labels")
    assert {cell.study for cell in begun(store)} == {"figure1", "table1", "labels"}
    assert begun(Store(tmp_path / "empty")) == []


def test_tables_are_complete_and_belong_to_methods_that_exist():
    first, second = printed("table1"), printed("table2")
    assert (len(first), len(second)) == (81, 21)
    assert {method for *_, method in first} == set(TABLE1) - {"fedavg-matched"}
    assert {method for *_, method in second} == set(TABLE2)
    assert {method for *_, method in (first | second)} <= set(methods.METHODS)
    assert (len(printed("figure1")), printed("gamma")) == (9, {})


def test_numbers_are_those_of_the_text():
    table = printed("table1")
    for dataset, gain in (("cifar10", 12.17), ("cinic10", 11.16)):
        ours, theirs = (table[dataset, "dir-dir", method] for method in ("feddure", "fedmatch"))
        assert round(ours - theirs, 2) == gain
    assert printed("table2")["cifar10", "iid-iid", "fedavg-fixmatch"] == 47.60
