"""The paper's studies as lists of cells."""

import pytest

from feddure.errors import ConfigError
from feddure.studies.grid.runner import program_of
from feddure.studies.paper.plan import STUDIES, TABLE1, Request, cells, check_names, check_once


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
    assert [c.coordinates()["labels"] for c in cells("labels", Request(**one))] == [2, 4, 10, 15, 20]
    assert {c.experiment.local_steps for c in cells("labels", Request(**one))} == {5}


def test_a_preset_knows_its_data_sets():
    (cinic,) = cells("table1", Request(datasets=("cinic10",), methods=("feddure",), settings=("dir-dir",), seeds=(0,)))
    assert cinic.experiment.local_steps == 10


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


@pytest.mark.parametrize(("option", "given", "twice"), [("--seeds", (0, 1, 0), "0"), ("--methods", ("a", "a"), "a")])
def test_each_value_is_named_once(option, given, twice):
    with pytest.raises(ConfigError, match=f"{option}: {twice} was given twice; name each once"):
        check_once(option, given)
    check_once(option, given[:1])


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(ConfigError, match=r"--methods FedDur: expected one of .*; did you mean 'feddure'"):
        check_names("--methods", ["FedDur"], TABLE1)
    with pytest.raises(ConfigError, match=r"expected one of fedavg, .*feddure$"):
        check_names("--methods", ["xyz"], TABLE1)
