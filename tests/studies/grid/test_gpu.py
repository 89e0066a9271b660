"""Grids on a GPU: cells of one program share what was compiled and captured, and change no number."""

import pytest

import tiny
from feddure.studies.grid.store import Cell, Store
from measured import found, here

pytestmark = pytest.mark.gpu

ON_GPU = {
    "dataset": "fashion-mini",
    "engine.device": "cuda",
    "engine.precision": "fp32",
    "engine.compile": False,
    "engine.deterministic": True,
    "engine.lanes": 2,
}


def test_cells_that_follow_each_other_find_what_they_find_alone(tmp_path, images):
    wanted = [
        Cell("test", "", tiny.experiment(ON_GPU, method=method, seed=seed))
        for method in ("feddure", "fedavg-fixmatch")
        for seed in (0, 1)
    ]
    together = here(tmp_path / "together", wanted, images)
    for number, cell in enumerate(wanted):
        assert here(tmp_path / str(number), [cell], images) == [together[number]]
    assert Store(tmp_path / "together").find(wanted[0]).environment["device"] == "cuda"
    assert found(Store(tmp_path / "together"), wanted) == together
