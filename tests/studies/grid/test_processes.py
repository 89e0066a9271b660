"""Grids in several processes: the same numbers as in one, lost processes, an early end, and nothing left behind."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.studies.grid import runner as grid
from feddure.studies.grid.failures import CellsFailed, loading
from feddure.studies.grid.processes import measure_in_processes
from feddure.studies.grid.store import Cell, Store
from measured import found, here
from waiting import until

METHODS = """
import errno, os, pathlib, signal, time
from feddure.methods.fedavg import FedAvg

class Fragile(FedAvg):  # takes its process with it, in one way or another
    def step(self, client, batch):
        how = self.experiment.options["how"]
        if how == "memory":
            raise MemoryError
        if how == "signal":
            signal.raise_signal(signal.SIGTERM)
            return super().step(client, batch)
        os._exit(int(how))

class Faulty(FedAvg):
    def step(self, client, batch):
        raise EOFError("a mistake in a method")

class Mistaken(FedAvg):
    def step(self, client, batch):
        batch.strong  # not among its needs

class Full(FedAvg):  # its process finds the disk full from now on
    def step(self, client, batch):
        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync = full
        return super().step(client, batch)

class Choosy(FedAvg):
    def step(self, client, batch):
        if client.key[0] == 1:
            raise EOFError("a mistake in a method")
        return super().step(client, batch)

class Slow(FedAvg):
    def step(self, client, batch):
        pathlib.Path(self.experiment.options["began"], str(os.getpid())).touch()
        time.sleep(0.3)
        return super().step(client, batch)

def unable(*_):
    os._exit(7)

def work_without_gpu(*arguments):
    from feddure.studies.grid import child as grid_child
    from feddure.studies.grid import failures as grid_failures
    grid_failures.is_usable = lambda device: False
    grid_child.work(*arguments)
"""

DRIVER = """
import sys
from pathlib import Path
import tiny
from feddure.studies.grid.store import Cell, Store
from feddure.studies.grid.processes import measure_in_processes

began, store = sys.argv[1:]
changes = {"method": "some_methods:Slow", "options": {"began": began}, "rounds": 200, "dataset": "fashion-mini"}
cells = [Cell("test", "", tiny.experiment(changes, seed=seed)) for seed in (0, 1)]
if __name__ == "__main__":
    measure_in_processes(cells, Store(Path(store)), lambda name: tiny.dataset(), 2)
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("methods")
    (made / "some_methods.py").write_text(METHODS)
    (made / "driver.py").write_text(DRIVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        yield made


class Watcher:
    """Remembers what it was told, and may ask to stop."""

    def __init__(self, stops=False):
        self.began, self.rounds, self.done, self.lost, self._stops = [], [], [], [], stops

    def group_begins(self, federations):
        self.began.append(sorted((one.experiment.seed, one.round) for one in federations))

    def round_done(self, federation, record, seconds):
        assert record["test"]["accuracy"] >= 0
        self.rounds.append((federation.experiment.seed, federation.round))
        if self._stops and len({seed for seed, _ in self.rounds}) == 2:
            self._stops = False
            os.kill(os.getpid(), signal.SIGINT)

    def cell_done(self, cell, measurement):
        self.done.append((cell.hash, measurement.config_hash))

    def cells_lost(self, cells):
        self.lost += [cell.hash for cell in cells]


def cells(*seeds, **changes):
    return [Cell("test", "", tiny.experiment({"dataset": "fashion-mini", "seed": seed, **changes})) for seed in seeds]


def test_results_equal_those_of_one_process(tmp_path, images):
    wanted = [*cells(0, 1), *cells(0, method="feddure")]
    store, watcher, loaded = Store(tmp_path / "several"), Watcher(), []
    measure_in_processes(wanted, store, lambda name: loaded.append(name) or images, 2, watcher=watcher)
    assert found(store, wanted) == here(tmp_path / "one", wanted, images)
    assert loaded in (["fashion-mini"], ["fashion-mini"] * 2)  # once for each process that got a cell
    assert sorted(watcher.began) == [[(0, 0)], [(0, 0)], [(1, 0)]]
    assert sorted(watcher.rounds) == [(0, 1), (0, 1), (0, 2), (0, 2), (1, 1), (1, 2)]
    assert sorted(watcher.done) == sorted((cell.hash, cell.hash) for cell in wanted)
    assert [path.name for path in store.folder.iterdir()] == ["cells"]


def test_cells_that_are_asked_to_share_lanes_do(tmp_path, images):
    wanted, store, watcher = cells(0, 1, 2, 3), Store(tmp_path / "several"), Watcher()
    measure_in_processes(wanted, store, lambda name: images, 2, together=2, watcher=watcher)
    assert sorted(watcher.began) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    assert found(store, wanted) == here(tmp_path / "one", wanted, images)


def test_only_what_nobody_has_measured_or_works_on_is_measured(tmp_path, images):
    wanted, store = cells(0, 1, 2), Store(tmp_path)
    grid.measure(wanted[:1], store, lambda name: images)
    before, watcher = store.find(wanted[0]), Watcher()
    with store.claimed(wanted[1:2]):
        measure_in_processes(wanted, store, lambda name: images, 2, watcher=watcher)
    assert watcher.began == [[(2, 0)]]
    assert store.find(wanted[0]) == before
    assert [store.has(cell) for cell in wanted] == [True, False, True]


def test_a_process_begins_with_a_program_that_no_other_command_is_on(tmp_path, images):
    wanted, store, watcher = [*cells(0, 1, method="feddure"), *cells(2)], Store(tmp_path), Watcher()
    with store.claimed(wanted[:1]):
        measure_in_processes(wanted, store, lambda name: images, 1, watcher=watcher)
    assert watcher.began == [[(2, 0)], [(1, 0)]]  # FedDure, which costs more, would come first


def test_nothing_to_do_starts_no_process(tmp_path, images, monkeypatch):
    wanted, store = cells(0), Store(tmp_path)
    grid.measure(wanted, store, lambda name: images)
    monkeypatch.setattr("feddure.studies.grid.processes._Child", None)
    measure_in_processes(wanted, store, lambda name: images, 2)


@pytest.mark.parametrize("how", ["0", "signal", "memory"])
def test_cells_of_a_lost_process_are_named_and_the_others_are_measured(tmp_path, images, how):
    bad, good = cells(3, 4, method="some_methods:Fragile", options={"how": how}), cells(0, 1)
    store, watcher = Store(tmp_path), Watcher()
    with pytest.raises(CellsFailed, match=r"^--processes: .* before it had measured 2 cells .*are kept") as caught:
        measure_in_processes([*bad, *good], store, lambda name: images, 2, watcher=watcher)
    assert sorted(cell.hash for cell, _ in caught.value.failures) == sorted(cell.hash for cell in bad)
    assert {problem.reason for _, problem in caught.value.failures} == {"its process ended: killed, or out of memory"}
    assert [store.has(cell) for cell in (*bad, *good)] == [False, False, True, True]
    assert sorted(watcher.lost) == sorted(cell.hash for cell in bad)


def test_processes_that_cannot_be_started(tmp_path, images, monkeypatch):
    import some_methods

    monkeypatch.setattr("feddure.studies.grid.processes.work", some_methods.unable)
    with pytest.raises(RunError, match=r"no process can be started \(the last one ended with exit code 7\)"):
        measure_in_processes(cells(0, 1, 2), Store(tmp_path), lambda name: images, 2)


def test_a_mistake_of_the_user_is_told_as_it_is(tmp_path, images):
    with pytest.raises(ConfigError, match=r"engine\.device: cuda was given but no CUDA device is available"):
        measure_in_processes(cells(0, **{"engine.device": "cuda"}), Store(tmp_path), lambda name: images, 2)


def test_an_error_in_code_ends_only_its_cells(tmp_path, images, capfd):
    bad, good = cells(3, 4, method="some_methods:Faulty"), cells(0, 1)
    store, watcher = Store(tmp_path), Watcher()
    with (
        pytest.warns(FeddureWarning, match=f"^cell some_methods:Faulty seed 3 .{bad[0].hash}.: EOFError: a mistake in"),
        pytest.warns(FeddureWarning, match="^cell some_methods:Faulty seed 4 "),
        pytest.raises(CellsFailed, match=r"(?s)ended 2 cells.*\(most recent call last\):\n  File .*some_methods\.py"),
    ):
        measure_in_processes([*bad, *good], store, lambda name: images, 2, watcher=watcher)
    assert [store.has(cell) for cell in (*bad, *good)] == [False, False, True, True]
    assert sorted(watcher.lost) == sorted(cell.hash for cell in bad)
    assert sorted(watcher.done) == sorted((cell.hash, cell.hash) for cell in good)
    assert not (tmp_path / "unfinished").exists()
    assert capfd.readouterr().err == ""  # told once, here


def test_a_mistake_that_a_check_of_the_method_finds_ends_only_its_cells(tmp_path, images):
    bad, good = cells(3, method="some_methods:Mistaken"), cells(0)
    store = Store(tmp_path)
    with (
        pytest.warns(
            FeddureWarning, match="^cells of some_methods:Mistaken cannot be measured: method 'some_methods:M"
        ),
        pytest.raises(
            CellsFailed, match=r"^cell .* cannot be measured: .*add needs = feddure\.Needs\(strong=True\) to"
        ),
    ):
        measure_in_processes([*bad, *good], store, lambda name: images, 2)
    assert [store.has(cell) for cell in (*bad, *good)] == [False, True]


def test_a_full_disk_ends_all_processes_with_one_message(tmp_path, images):
    wanted, store = cells(*range(6), method="some_methods:Full"), Store(tmp_path)
    with pytest.raises(
        RunError, match=r"cells/.*\.json: cannot be written \(No space left.*run the same command again"
    ):
        measure_in_processes(wanted, store, lambda name: images, 2)
    assert descendants() == []
    assert not any(store.has(cell) for cell in wanted)


def test_cells_that_failed_together_are_tried_by_themselves(tmp_path, images):
    wanted = cells(0, 1, method="some_methods:Choosy")
    store, watcher = Store(tmp_path), Watcher()
    with (
        pytest.warns(FeddureWarning, match="^2 cells .* a method; each is tried by itself$"),
        pytest.warns(FeddureWarning, match="^cell some_methods:Choosy seed 1 "),
        pytest.raises(CellsFailed, match="ended cell some_methods:Choosy seed 1"),
    ):
        measure_in_processes(wanted, store, lambda name: images, 2, together=2, watcher=watcher)
    assert watcher.began == [[(0, 0), (1, 0)], [(0, 0)], [(1, 0)]]
    assert watcher.done == [(wanted[0].hash, wanted[0].hash)]


def test_an_error_in_the_code_of_a_data_set_ends_only_its_cells(tmp_path, images):
    def load(name):
        with loading():
            return images if name == "fashion-mini" else open_absent()

    bad, good = cells(0, 1, dataset="fashion-mnist"), cells(0)
    store = Store(tmp_path)
    with (
        pytest.warns(FeddureWarning, match=r"^cell fedavg seed . .*: FileNotFoundError: .*absent"),
        pytest.raises(CellsFailed, match=r"(?s)ended 2 cells fedavg.*in open_absent"),
    ):
        measure_in_processes([*bad, *good], store, load, 2)
    assert [store.has(cell) for cell in (*bad, *good)] == [False, False, True]


def open_absent():
    return Path("absent.npy").open()


def test_a_process_that_cannot_use_its_gpu_any_more_is_replaced(tmp_path, images, monkeypatch):
    import some_methods

    monkeypatch.setattr("feddure.studies.grid.processes.work", some_methods.work_without_gpu)
    bad, good = cells(3, 4, method="some_methods:Faulty", rounds=9), cells(0)  # those first: they cost most
    store = Store(tmp_path)
    with pytest.warns(FeddureWarning), pytest.raises(CellsFailed) as caught:
        measure_in_processes([*bad, *good], store, lambda name: images, 1)
    assert sorted(failure.cell.hash for failure in caught.value.failures) == sorted(cell.hash for cell in bad)
    assert "a process ended before" not in str(caught.value)
    assert store.has(good[0])


def test_an_error_here_ends_the_processes(tmp_path):
    def fail(name):
        raise BrokenPipeError("the pipe of a loader")

    with pytest.raises(BrokenPipeError, match="the pipe of a loader"):
        measure_in_processes(cells(0, 1), Store(tmp_path), fail, 2)
    assert descendants() == []


def test_a_stop_while_data_are_loaded_is_heard_at_once(tmp_path):
    def load(name):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("loading went on")

    with pytest.raises(KeyboardInterrupt):
        measure_in_processes(cells(0, 1), Store(tmp_path), load, 2)
    assert descendants() == []


def test_data_sets_may_be_of_a_class_of_the_user(tmp_path, images, monkeypatch):
    text = "from feddure.data.dataset import Dataset\nclass Mine(Dataset):\n    pass\n"
    (tmp_path / "class_of_mine.py").write_text(text)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        from class_of_mine import Mine
    monkeypatch.chdir(tmp_path)
    mine = Mine(**{field.name: getattr(images, field.name) for field in dataclasses.fields(images)})
    wanted, store = cells(0), Store(tmp_path / "store")
    measure_in_processes(wanted, store, lambda name: mine, 2)
    assert store.has(wanted[0])


def test_notes_are_passed_on_once(tmp_path, images):
    wanted = cells(0, 1, **{"optimizer.learning_rate": 1e300})
    with pytest.warns(FeddureWarning, match="are not finite and were left out") as caught:
        measure_in_processes(wanted, Store(tmp_path), lambda name: images, 2)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(set(texts))


def test_a_stop_keeps_what_is_under_way_and_a_later_call_does_the_rest(tmp_path, images):
    wanted, store = cells(0, 1, 2, rounds=50), Store(tmp_path / "several")
    with pytest.raises(grid.GridStopped, match="those under way go on from where they are") as caught:
        measure_in_processes(wanted, store, lambda name: images, 2, watcher=Watcher(stops=True))
    assert caught.value.exit_code == 130
    assert descendants() == []
    finished = sum(store.has(cell) for cell in wanted)
    later = Watcher()
    measure_in_processes(wanted, store, lambda name: images, 2, watcher=later)
    resumed = [rounds for ((_, rounds),) in later.began if rounds > 0]
    assert resumed
    assert len(later.began) == 3 - finished
    assert len(later.rounds) == 50 * (3 - finished) - sum(resumed)
    assert found(store, wanted) == here(tmp_path / "one", wanted, images)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGKILL, -9)])
def test_processes_end_with_their_parent_and_keep_what_is_under_way(tmp_path, folder, number, code):
    began, store = tmp_path / "began", tmp_path / "store"
    began.mkdir()
    paths = os.pathsep.join([str(folder), str(Path(tiny.__file__).parent)])
    parent = subprocess.Popen(
        [sys.executable, str(folder / "driver.py"), str(began), str(store)],
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(list(began.iterdir())) == 2, parent)
        time.sleep(1)
        parent.send_signal(number)
        assert parent.wait(timeout=60) == code
    finally:
        parent.kill()
        parent.wait()
    children = [int(path.name) for path in began.iterdir()]
    until(lambda: not any(map(alive, children)))
    assert len(list(store.glob("unfinished/*/checkpoint*"))) == 2


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants():
    """Processes below this one that measure."""
    below = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and b"spawn_main" in command:
            below.append(int(entry.name))
    return below
