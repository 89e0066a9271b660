"""Several processes on one store: they divide the cells, and when one is killed or all are stopped nothing is lost."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml

import tiny
from feddure.studies import sweep
from feddure.studies.grid import runner
from feddure.studies.grid.jobs import measure_in_jobs
from feddure.studies.grid.store import Store, unmeasured
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
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("of_jobs.py").write_text(CODE)
    Path("slow").touch()
    Path("tiny.yaml").write_text(tiny.experiment(dataset="of_jobs:images").to_yaml())


def plan(methods, seeds, **changes):
    """The store and cells of a sweep, and the arguments of the command that measures it."""
    tree = {"config": "tiny.yaml", "set": changes, "grid": {"method": methods}, "seeds": seeds}
    Path("mine.yaml").write_text(yaml.safe_dump({key: value for key, value in tree.items() if value}))
    wanted = sweep.read(Path("mine.yaml"))
    return sweep.open_folder(wanted, Path("out")), wanted.cells(), ["sweep", "mine.yaml", "--out", "out"]


def wait_for_rounds(store, processes=2):
    """Until so many processes train; returns their numbers."""
    until(lambda: len([one for one in store.under_way().values() if one.round > 0]) == processes)
    return {one.pid for one in store.under_way().values()}


def test_they_divide_the_cells_and_an_error_in_code_ends_only_its_cells(tmp_path, images):
    store, cells, arguments = plan(["fedavg", "of_jobs:Raises", "of_jobs:Slow"], [0, 1, 2])
    said, pids = [], set()

    def look():
        pids.update(one.pid for one in store.under_way().values())

    assert measure_in_jobs(cells, store, 2, look, said.append, arguments) == []
    Path("slow").unlink()
    bad = {cell.hash for cell in cells if cell.experiment.method.endswith("Raises")}
    good = [cell for cell in cells if cell.hash not in bad]
    assert store.failures().keys() == bad
    assert len(pids - {os.getpid()}) == 2
    assert found(store, good) == here(tmp_path / "one", good, images)
    assert said == []
    assert not psutil.Process().children()


def test_a_killed_process_takes_no_other_with_it(images):
    Path("deadly").touch()
    store, cells, arguments = plan(["of_jobs:Deadly", "fedavg"], [0, 1])
    assert measure_in_jobs(cells, store, 2, arguments=arguments) == [-signal.SIGKILL]
    (lost,) = unmeasured(cells, store)
    assert (lost.experiment.method, lost.experiment.seed) == ("of_jobs:Deadly", 0)
    assert store.failures() == {lost.hash: runner.LOST}
    Path("deadly").unlink()
    store.forget_failures(cells)
    runner.measure(cells, store, lambda name: images)
    assert unmeasured(cells, store) == []


def test_a_stop_reaches_all_and_keeps_what_is_under_way(tmp_path, images):
    store, cells, arguments = plan(["of_jobs:Slow"], [0, 1], rounds=25)

    asked = []

    def look():
        if not asked and len([one for one in store.under_way().values() if one.round > 0]) == 2:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(runner.GridStopped) as stopped:
        measure_in_jobs(cells, store, 2, look, arguments=arguments)
    assert stopped.value.exit_code == 130
    assert not psutil.Process().children()
    assert sorted(path.parent.parent.name for path in store.folder.glob("unfinished/*/checkpoint/*")) == sorted(
        cell.hash for cell in cells
    )
    Path("slow").unlink()
    looks = []
    runner.measure(cells, store, lambda name: images, lambda: looks.append(1))
    assert len(looks) < 2 * (25 + 1)  # after every round and cell: they went on from where they were
    assert found(store, cells) == here(tmp_path / "whole", cells, images)


def test_they_end_with_the_command_that_started_them():
    store, cells, arguments = plan(["of_jobs:Slow"], [0, 1], rounds=400)
    command = os.fork()
    if command == 0:
        measure_in_jobs(cells, store, 2, arguments=arguments)
        os._exit(0)
    pids = wait_for_rounds(store)
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert len(list(store.folder.glob("unfinished/*/checkpoint/*"))) == 2
    assert not any(store.has(cell) for cell in cells)
