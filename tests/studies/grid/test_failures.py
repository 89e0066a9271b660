"""What ends cells, and only those; and a disk that is full, which ends the grid with one message."""

import errno
import os
import pickle
import re
from pathlib import Path

import pytest

import tiny
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods import METHODS
from feddure.methods.fedavg import FedAvg
from feddure.studies.grid import failures as grid_failures
from feddure.studies.grid import runner as grid
from feddure.studies.grid.failures import CellsFailed, Failure, NotWritten, Problem
from feddure.studies.grid.store import Cell, Store
from feddure.tracking import records

FULL = [errno.ENOSPC, errno.EDQUOT, errno.EROFS]


class Mistaken(FedAvg):
    """Uses a view that it did not ask for."""

    def step(self, client, batch):
        assert batch.strong.numel()


@pytest.fixture(autouse=True)
def _methods(monkeypatch):
    monkeypatch.setitem(METHODS, "mistaken", Mistaken)


def cells(*methods, seeds=(0,), **changes):
    return [Cell("test", "", tiny.experiment(changes, method=m, seed=s)) for m in methods for s in seeds]


def measure(wanted, folder, **options):
    grid.measure(wanted, Store(folder), lambda name: tiny.dataset(), **options)


@pytest.mark.filterwarnings("ignore:.*each is tried by itself")
@pytest.mark.parametrize("together", [None, 2])
def test_a_mistake_that_a_check_of_the_method_finds_ends_only_its_cells(tmp_path, together):
    wanted = cells("mistaken", "fedavg", seeds=(0, 1))
    said = (
        "method 'mistaken' uses batch.strong, which is not among its needs: add needs = feddure.Needs(strong=True) to"
    )
    with (
        pytest.warns(FeddureWarning, match=f"^cells of mistaken cannot be measured: {re.escape(said)} its class$"),
        pytest.raises(CellsFailed) as caught,
    ):
        measure(wanted, tmp_path, together=together)
    assert [failure.cell for failure in caught.value.failures] == wanted[:2]
    assert [Store(tmp_path).has(cell) for cell in wanted] == [False, False, True, True]
    assert str(caught.value).splitlines() == [
        f"2 cells mistaken seed 0 ({wanted[0].hash}), mistaken seed 1 ({wanted[1].hash}) cannot be measured: {said} "
        "its class",
        "What is finished is kept, and the same command tries them again",
    ]


def test_a_partition_that_cannot_be_made_ends_only_its_cells(tmp_path):
    wanted = [*cells("fedavg", **{"partition.labels_per_class": 400}), *cells("fedavg")]
    with pytest.warns(FeddureWarning, match="400"), pytest.raises(CellsFailed, match="labels_per_class"):
        measure(wanted, tmp_path)
    assert [Store(tmp_path).has(cell) for cell in wanted] == [False, True]


def test_what_no_cell_can_be_trained_with_ends_the_grid_at_once(tmp_path):
    with pytest.raises(ConfigError, match="cuda was given"):
        measure(cells("fedavg", "fedavg-matched", **{"engine.device": "cuda"}), tmp_path)
    assert not (tmp_path / "cells").exists()


def test_every_different_error_is_told_and_the_first_traceback():
    one, two, three = cells("fedavg", "fedavg-matched", "feddure")
    failed = CellsFailed(
        [
            Failure(one, Problem("ValueError: a", "Traceback of a\n")),
            Failure(two, Problem("KeyError: b", "Traceback of b\n")),
            Failure(three, Problem("write needs = ...")),
        ]
    )
    assert str(failed).splitlines() == [
        f"an error in code ended cell fedavg seed 0 ({one.hash}):",
        "Traceback of a",
        f"an error in code ended cell fedavg-matched seed 0 ({two.hash}): KeyError: b",
        f"cell feddure seed 0 ({three.hash}) cannot be measured: write needs = ...",
        "What is finished is kept, and the same command tries them again",
    ]


def test_one_mistake_of_all_cells_is_told_from_different_ones_and_lost_cells():
    one, two = cells("fedavg", "feddure")
    same, other, in_code = Problem("write it"), Problem("write that"), Problem("ValueError", "Traceback")
    assert CellsFailed([Failure(one, same), Failure(two, same)]).mistake == "write it"
    assert CellsFailed([Failure(one, same), Failure(two, other)]).mistake is None
    assert CellsFailed([Failure(one, in_code)]).mistake is None
    assert CellsFailed([Failure(one, same)], "lost", [Failure(two, same)]).mistake is None


def test_of_very_many_errors_the_first_are_told():
    wanted = cells("fedavg", seeds=range(9))
    failed = CellsFailed([Failure(cell, Problem(f"mistake {n}")) for n, cell in enumerate(wanted)])
    assert "mistake 4" in str(failed)
    assert "mistake 5" not in str(failed)
    assert "other errors ended 4 cells fedavg seed 5" in str(failed)


def full(number):
    def write(*_, **__):
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", FULL)
@pytest.mark.parametrize("place", ["record", "checkpoint", "cell", "claim"])
def test_a_full_disk_ends_the_grid_and_finished_cells_stay(tmp_path, monkeypatch, number, place):
    done, *wanted = cells("fedavg", "fedavg-matched", "feddure", seeds=(0,))
    measure([done], tmp_path)
    if place == "record":
        monkeypatch.setattr(records.Writer, "write", full(number))
    elif place == "claim":
        monkeypatch.setattr(Path, "mkdir", full(number))
    else:
        monkeypatch.setattr(os, "fsync", full(number))
        if place == "checkpoint":
            monkeypatch.setattr(grid, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(NotWritten) as caught:
        measure([done, *wanted], tmp_path)
    told = str(caught.value)
    assert told.startswith(str(tmp_path))
    assert wanted[0].hash in told
    assert f"({os.strerror(number)}); finished cells are kept. Make room there" in told
    assert told.endswith("run the same command again: it goes on from there")
    assert [Store(tmp_path).has(cell) for cell in (done, *wanted)] == [True, False, False]
    monkeypatch.undo()
    measure([done, *wanted], tmp_path)
    assert all(Store(tmp_path).has(cell) for cell in wanted)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_file_that_cannot_be_closed_either_ends_the_grid_with_the_same_message(tmp_path, monkeypatch):
    def open_full(path):
        path.touch()
        return Path("/dev/full").open("a")

    monkeypatch.setattr(records, "_open", open_full)
    with pytest.raises(NotWritten, match="No space left on device"):
        measure(cells("fedavg", seeds=(0, 1)), tmp_path, together=2)


def test_a_method_that_finds_its_own_disk_full_ends_its_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(Mistaken, "step", full(errno.ENOSPC))
    wanted = cells("mistaken", "fedavg")
    with pytest.warns(FeddureWarning, match="No space left"), pytest.raises(CellsFailed):
        measure(wanted, tmp_path)
    assert Store(tmp_path).has(wanted[1])


def test_the_message_of_a_full_disk_is_the_same_after_a_journey():
    error = NotWritten("/there: cannot be written (No space left on device)")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_other_errors_of_files_are_told_as_they_are(tmp_path):
    with pytest.raises(grid_failures.RunError, match=r"^damaged$"), grid_failures.writing(tmp_path):
        raise grid_failures.RunError("damaged")
