"""Grids on a GPU: cells that share its lanes, and processes that share it."""

import pytest

import tiny
from feddure.studies.grid import runner as grid
from feddure.studies.grid.processes import measure_in_processes
from feddure.studies.grid.store import Cell, Store

pytestmark = pytest.mark.gpu

ON_GPU = {
    "dataset": "fashion-mini",
    "engine.device": "cuda",
    "engine.precision": "fp32",
    "engine.compile": False,
    "engine.deterministic": True,
    "engine.lanes": 2,
}


def cells(*methods):
    return [
        Cell("test", "", tiny.experiment(ON_GPU, method=method, seed=seed)) for method in methods for seed in (0, 1)
    ]


def curves(store, wanted):
    return [store.find(cell).curve for cell in wanted]


def test_processes_that_share_a_gpu_find_what_one_finds(tmp_path):
    images, wanted = tiny.dataset(), cells("feddure", "fedavg-fixmatch")
    one, several = Store(tmp_path / "one"), Store(tmp_path / "several")
    grid.measure(wanted, one, lambda name: images)
    measure_in_processes(wanted, several, lambda name: images, 2)
    assert curves(several, wanted) == curves(one, wanted)
    assert [several.find(cell).together for cell in wanted] == [2] * 4  # groups share lanes in each process
    assert {several.find(cell).environment["device"] for cell in wanted} == {"cuda"}
