"""Several processes on one store: they divide the cells, and when one is killed or all are stopped nothing is lost."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml

import tiny
from feddure import experiments
from feddure.studies import sweep
from feddure.studies.grid import runner
from feddure.studies.grid.jobs import measure_in_jobs
from feddure.studies.grid.store import unmeasured
from measured import found, here
from waiting import until

CODE = """
import os, pathlib, signal, time
import tiny
from feddure.methods.fedavg import FedAvg

def images():
    return tiny.dataset()

class Raises(FedAvg):
    def step(self, client, batch):
        raise ValueError("a mistake")

class Deadly(FedAvg):  # as the kernel does where memory is short
    def step(self, client, batch):
        if client.key[0] == 0 and pathlib.Path("deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(client, batch)

class Slow(FedAvg):
    def step(self, client, batch):
        time.sleep(0.1 if pathlib.Path("slow").exists() else 0)
        return super().step(client, batch)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["feddure", "sweep", "mine.yaml", "--out", "out", "--allow-modules"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("of_jobs.py").write_text(CODE)
    Path("slow").touch()
    Path("tiny.yaml").write_text(experiments.to_yaml(tiny.experiment(dataset="of_jobs:images")))


def plan(methods, seeds, **changes):
    """The store and cells of a sweep."""
    tree = {"config": "tiny.yaml", "set": changes, "grid": {"method": methods}, "seeds": seeds}
    Path("mine.yaml").write_text(yaml.safe_dump({key: value for key, value in tree.items() if value}))
    wanted = sweep.read(Path("mine.yaml"), allow_modules=True)
    return sweep.open_folder(wanted, Path("out")), wanted.cells()


def test_they_divide_the_cells_and_what_ends_one_takes_no_other_with_it(tmp_path, images):
    Path("deadly").touch()
    store, cells = plan(["of_jobs:Deadly", "of_jobs:Raises", "of_jobs:Slow"], [0, 1])
    said = []
    assert measure_in_jobs(cells, store, 2, say=said.append) == [-signal.SIGKILL]
    assert said == []
    left, failed = unmeasured(cells, store), store.failures()
    killed, *raised = sorted(left, key=lambda cell: cell.experiment.method)
    assert failed.keys() == {cell.hash for cell in left}
    assert failed[killed.hash] == runner.LOST
    assert [(cell.experiment.method, failed[cell.hash].error) for cell in raised] == [
        ("of_jobs:Raises", "ValueError: a mistake")
    ] * 2
    Path("deadly").unlink()
    Path("slow").unlink()
    store.forget_failures(cells)
    runner.measure(cells, store, lambda name: images)  # the next command
    good = [cell for cell in cells if cell not in raised]
    assert found(store, good) == here(tmp_path / "one", good, images)


def test_each_has_a_cell_and_a_stop_reaches_all_and_keeps_what_is_under_way(tmp_path, images):
    store, cells = plan(["of_jobs:Slow"], [0, 1], rounds=25)

    asked, before = set(), set(psutil.Process().children())  # such as a tracker's, of another test

    def look():
        trains = {one.pid for one in store.under_way().values() if one.round > 0}
        if not asked and len(trains) == 2:  # a cell each
            asked.update(trains)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(runner.GridStopped) as stopped:
        measure_in_jobs(cells, store, 2, look)
    assert stopped.value.exit_code == 130
    assert set(psutil.Process().children()) <= before
    assert sorted(path.parent.parent.name for path in store.folder.glob("unfinished/*/checkpoint/*")) == sorted(
        cell.hash for cell in cells
    )
    Path("slow").unlink()
    looks = []
    runner.measure(cells, store, lambda name: images, lambda: looks.append(1))
    assert len(looks) < 2 * (25 + 1)  # after every round and cell: they went on from where they were
    assert found(store, cells) == here(tmp_path / "whole", cells, images)


def test_they_end_with_the_command_that_started_them():
    store, cells = plan(["of_jobs:Slow"], [0, 1], rounds=400)
    command = os.fork()
    if command == 0:
        measure_in_jobs(cells, store, 2)
        os._exit(0)
    until(lambda: len([one for one in store.under_way().values() if one.round > 0]) == 2)
    pids = {one.pid for one in store.under_way().values()}
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert len(list(store.folder.glob("unfinished/*/checkpoint/*"))) == 2
    assert not any(store.has(cell) for cell in cells)
