"""Grids: every cell once, whatever happens in between, with the numbers of an ordinary run."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
from feddure.errors import FeddureWarning, RunError
from feddure.methods import METHODS
from feddure.methods.fedavg import FedAvg
from feddure.simulation import runs
from feddure.simulation.lanes import Lanes
from feddure.studies.grid import runner as grid
from feddure.studies.grid.failures import CellsFailed
from feddure.studies.grid.store import Cell, Store

IMAGES = tiny.dataset()


def cells(*methods, seeds=(0, 1), **changes):
    changes = {"rounds": 3, "server.ema": 0.9} | changes
    return [
        Cell("table1", "aaai24", tiny.experiment(method=method, seed=seed, **changes))
        for method in methods
        for seed in seeds
    ]


def load(name):
    return IMAGES


class Count:
    """Counts what a grid does."""

    def __init__(self):
        self.groups, self.finished, self.lost = [], [], []

    def group_begins(self, federations):
        self.groups.append([f.experiment.method for f in federations])

    def round_done(self, federation, record, seconds):
        pass

    def cell_done(self, cell, measurement):
        self.finished.append(cell.hash)

    def cells_lost(self, cells):
        self.lost += [cell.hash for cell in cells]


def findings(store, wanted):
    """What was found, less what depends on the clock and the machine."""
    found = [store.find(cell) for cell in wanted]
    assert all(found)
    return [(m.config_hash, m.curve, m.local_steps, m.diagnostics, m.partition, m.bytes_per_round) for m in found]


def test_a_cell_has_the_numbers_of_an_ordinary_run(tmp_path):
    (one,) = cells("feddure", seeds=(4,))
    store = Store(tmp_path / "grid")
    grid.measure([one], store, load)
    run = runs.execute(one.experiment, IMAGES, tmp_path / "run", progress=False)
    found = store.find(one)
    assert [(number, share) for number, share, _ in found.curve] == [
        (record["round"], record["test"]["accuracy"]) for record in run.metrics
    ]
    assert found.accuracy_ema == run.metrics[-1]["test_ema"]["accuracy"]
    assert found.accuracy_last == run.metrics[-1]["test"]["accuracy"]
    assert found.local_steps == 2
    assert found.bytes_per_round["down"] == run.metrics[0]["communication"]["down"]
    assert found.partition == run.partition["sha256"]
    assert 0 < found.diagnostics["weight_mean"] < 1
    assert found.seconds > 0


def test_sharing_lanes_changes_no_number(tmp_path):
    wanted = cells("fedavg", "fedmatch")
    alone, together = Store(tmp_path / "alone"), Store(tmp_path / "together")
    grid.measure(wanted, alone, load, together=1)
    watch = Count()
    grid.measure(wanted, together, load, together=4, watcher=watch)
    assert watch.groups == [["fedavg"] * 2, ["fedmatch"] * 2]
    assert findings(alone, wanted) == findings(together, wanted)
    assert [together.find(cell).together for cell in wanted] == [2] * 4


def test_a_finished_cell_is_not_measured_again(tmp_path):
    store, watch = Store(tmp_path), Count()
    grid.measure(cells("fedavg"), store, load)
    grid.measure(cells("fedavg", seeds=(0, 1, 2)), store, load, watcher=watch)
    assert watch.finished == [cells("fedavg", seeds=(2,))[0].hash]


def test_studies_that_share_a_cell_measure_it_once(tmp_path):
    (one,) = cells("fedavg", seeds=(0,))
    watch = Count()
    grid.measure([one, Cell("gamma", "aaai24", one.experiment)], Store(tmp_path), load, watcher=watch)
    assert watch.finished == [one.hash]


def test_a_cell_that_another_process_works_on_is_left_to_it(tmp_path):
    wanted, watch = cells("fedavg"), Count()
    with Store(tmp_path).claimed(wanted[:1]):
        grid.measure(wanted, Store(tmp_path), load, watcher=watch)
    assert watch.finished == [wanted[1].hash]
    assert grid.unmeasured(wanted, Store(tmp_path)) == wanted[:1]


def test_programs_that_another_process_trains_come_last(tmp_path):
    wanted, store = [*cells("feddure", seeds=(0, 1)), *cells("fedavg", seeds=(0,))], Store(tmp_path)
    busy, free = Count(), Count()
    with store.claimed(wanted[:1]):
        grid.measure(wanted, store, load, watcher=busy)
    assert busy.groups == [["fedavg"], ["feddure"]]
    grid.measure(wanted, Store(tmp_path / "alone"), load, watcher=free)
    assert free.groups == [["feddure"], ["feddure"], ["fedavg"]]


def test_cells_that_a_killed_process_left_are_gone_on_with_first(tmp_path):
    wanted, store, watch = cells("feddure", "fedavg", seeds=(0,)), Store(tmp_path), Count()
    left = store.unfinished(wanted[0].hash)
    left.mkdir(parents=True)
    (left / "lock").write_text(f"{socket.gethostname()} {gone()}")
    grid.measure(wanted, store, load, watcher=watch)
    assert watch.groups == [["feddure"], ["fedavg"]]


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_signal_keeps_what_is_under_way(tmp_path, monkeypatch):
    wanted = cells("feddure")
    whole, store = Store(tmp_path / "whole"), Store(tmp_path / "stopped")
    grid.measure(wanted, whole, load)
    with monkeypatch.context() as patch:
        turns = iter(range(10_000))
        patch.setattr(runs.Stop, "__call__", lambda self: next(turns) >= 15)
        patch.setattr(runs.Stop, "signal", signal.SIGTERM)
        with pytest.raises(grid.GridStopped) as stopped:
            grid.measure(wanted, store, load, together=2)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not any(store.has(cell) for cell in wanted)
    assert all((store.unfinished(cell.hash) / "checkpoint" / "state.safetensors").exists() for cell in wanted)
    trained = steps_of(monkeypatch)
    grid.measure(wanted, store, load, together=2)
    assert 0 < sum(trained) < 2 * 3 * 3 * 2  # cells × rounds × clients × steps: not from the beginning
    assert findings(store, wanted) == findings(whole, wanted)
    assert not (store.folder / "unfinished").exists()


def test_a_cell_says_when_it_was_started(tmp_path, monkeypatch):
    (one,) = cells("fedavg", seeds=(0,))
    trained = steps_of(monkeypatch)
    monkeypatch.setattr(grid.environment, "describe", lambda: {"started": f"after {sum(trained)} steps"})
    grid.measure([one], Store(tmp_path), load)
    assert sum(trained) > 0
    assert Store(tmp_path).find(one).environment["started"] == "after 0 steps"


@pytest.mark.filterwarnings("ignore:.*are not finite")
def test_a_cell_says_how_many_updates_were_left_out(tmp_path):
    sane, mad = cells("fedavg", seeds=(0,)), cells("fedavg", seeds=(0,), **{"optimizer.learning_rate": 1e300})
    store = Store(tmp_path)
    grid.measure([*sane, *mad], store, load)
    assert store.find(sane[0]).left_out == 0
    assert store.find(mad[0]).left_out == 1


def test_checkpoints_are_written_by_the_clock(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(grid, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(grid, "_WRITING", 1e9)
    real = grid.checkpoint.write
    monkeypatch.setattr(grid.checkpoint, "write", lambda *given: (written.append(given[0].round), real(*given)))
    grid.measure(cells("fedavg", seeds=(0,)), Store(tmp_path), load)
    assert written == [1, 2]  # not after the last round: the cell is finished then


def test_a_kill_at_any_moment_loses_no_finished_cell_and_repeats_none(tmp_path):
    """Kill a grid again and again; the cells come out as from an undisturbed one, each finished exactly once."""
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import test_grid as this\n"
        "from feddure.studies import grid; from feddure.studies.grid.store import Store\n"
        "grid.CHECKPOINT_SECONDS = 0.0\n"
        "class Tell(this.Count):\n"
        "    def cell_done(self, cell, measurement):\n"
        "        with open(Path(sys.argv[1]) / 'finished.txt', 'a') as file: file.write(cell.hash + '\\n')\n"
        "    def round_done(self, federation, record, seconds): print('round', flush=True)\n"
        "wanted = this.cells('fedavg', 'fedavg-fixmatch', rounds=6)\n"
        "grid.measure(wanted, Store(Path(sys.argv[1])), this.load, watcher=Tell())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(Path(tiny.__file__).parent), "OMP_NUM_THREADS": "1"}
    for rounds in (3, 9, 5):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(rounds):
            process.stdout.readline()
        time.sleep(0.003 * rounds)  # not always at the same place of a round
        process.kill()
        process.communicate()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wanted, undisturbed = cells("fedavg", "fedavg-fixmatch", rounds=6), Store(tmp_path / "undisturbed")
    grid.measure(wanted, undisturbed, load)
    assert findings(Store(tmp_path), wanted) == findings(undisturbed, wanted)
    told = (tmp_path / "finished.txt").read_text().split()
    assert len(told) == len(set(told))
    assert not (tmp_path / "unfinished").exists()


class Raises(FedAvg):
    """Fails on the seed and in the round that it is told."""

    def step(self, client, batch):
        if client.key[:2] == tuple(self.experiment.options["at"]):
            raise OSError("a mistake\nin several lines")
        return super().step(client, batch)


@pytest.fixture
def raises(monkeypatch):
    monkeypatch.setitem(METHODS, "raises", Raises)


@pytest.mark.usefixtures("raises")
def test_an_error_in_code_ends_only_its_cell(tmp_path):
    wanted = [*cells("raises", options={"at": [0, 1]}), *cells("fedavg-matched")]
    store, watch = Store(tmp_path), Count()
    note = rf"^cell raises seed 0 \({wanted[0].hash}\): OSError: a mistake$"
    with pytest.warns(FeddureWarning, match=note), pytest.raises(CellsFailed) as caught:
        grid.measure(wanted, store, load, watcher=watch)
    assert [failure.cell for failure in caught.value.failures] == wanted[:1]
    assert [store.has(cell) for cell in wanted] == [False, True, True, True]
    assert watch.lost == [wanted[0].hash]
    assert watch.finished == [cell.hash for cell in wanted[1:]]
    assert not (tmp_path / "unfinished").exists()
    told = str(caught.value).splitlines()
    assert told[0] == f"an error in code ended cell raises seed 0 ({wanted[0].hash}):"
    assert told[1] == "Traceback (most recent call last):"
    assert told[2].startswith(f'  File "{__file__}", line ')
    assert "the same command tries it again" in told[-1]


@pytest.mark.usefixtures("raises")
def test_of_cells_that_share_lanes_only_those_with_the_error_fail(tmp_path):
    wanted = cells("raises", seeds=(0, 1, 2), options={"at": [1, 2]})
    store, watch = Store(tmp_path / "together"), Count()
    with (
        pytest.warns(FeddureWarning, match="^3 cells raises seed .*: OSError: a mistake; each is tried by itself$"),
        pytest.warns(FeddureWarning, match="^cell raises seed 1 "),
        pytest.raises(CellsFailed, match="an error in code ended cell raises seed 1"),
    ):
        grid.measure(wanted, store, load, together=3, watcher=watch)
    assert [len(group) for group in watch.groups] == [3, 1, 1, 1]
    assert watch.finished == [wanted[0].hash, wanted[2].hash]
    good, alone = [wanted[0], wanted[2]], Store(tmp_path / "alone")
    grid.measure(good, alone, load)
    assert findings(store, good) == findings(alone, good)


@pytest.mark.usefixtures("raises")
def test_a_cell_that_was_finished_before_the_others_failed_counts_once(tmp_path):
    options = {"at": [1, 3]}
    wanted = [*cells("raises", seeds=(0,), rounds=1, options=options), *cells("raises", seeds=(1,), options=options)]
    watch = Count()
    with pytest.warns(FeddureWarning, match="seed 1 "), pytest.raises(CellsFailed):
        grid.measure(wanted, Store(tmp_path), load, together=2, watcher=watch)
    assert watch.finished == [wanted[0].hash]


@pytest.mark.usefixtures("raises")
def test_a_failed_cell_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    (one,) = cells("raises", seeds=(0,), options={"at": [0, 3]})
    store, whole = Store(tmp_path / "failed"), Store(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(grid, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(grid, "_WRITING", 1e9)
        with pytest.warns(FeddureWarning), pytest.raises(CellsFailed):
            grid.measure([one], store, load)
    monkeypatch.setattr(Raises, "step", FedAvg.step)
    trained = steps_of(monkeypatch)
    grid.measure([one], store, load)
    assert len(trained) == 3  # the clients of the last round
    grid.measure([one], whole, load)
    assert findings(store, [one]) == findings(whole, [one])


@pytest.mark.usefixtures("raises")
def test_a_stop_in_the_step_that_fails_is_heard(tmp_path, monkeypatch):
    def step(self, client, batch):
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("a mistake")

    monkeypatch.setattr(Raises, "step", step)
    watch = Count()
    with pytest.raises(grid.GridStopped):
        grid.measure(cells("raises", "fedavg"), Store(tmp_path), load, watcher=watch)
    assert watch.groups == [["raises"]]


@pytest.mark.parametrize("error", [RunError, MemoryError])
@pytest.mark.usefixtures("raises")
def test_what_concerns_all_cells_ends_the_grid(tmp_path, monkeypatch, error):
    def step(self, client, batch):
        raise error("what all cells share")

    monkeypatch.setattr(Raises, "step", step)
    watch = Count()
    with pytest.raises(error, match="what all cells share"):
        grid.measure(cells("raises", "fedavg"), Store(tmp_path), load, watcher=watch)
    assert watch.groups == [["raises"]]


@pytest.mark.usefixtures("raises")
def test_an_error_that_takes_the_gpu_away_ends_the_grid(tmp_path, monkeypatch):
    wanted = [*cells("raises", seeds=(0, 1), options={"at": [0, 1]}), *cells("fedavg")]
    monkeypatch.setattr(grid.grid_failures, "is_usable", lambda device: False)
    with (
        pytest.warns(FeddureWarning),
        pytest.raises(CellsFailed, match="2 other cells were not tried; --pro") as caught,
    ):
        grid.measure(wanted, Store(tmp_path), load, together=2)
    assert [failure.cell for failure in caught.value.failures] == wanted[:2]


def test_time_is_shared_among_those_that_still_train(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(grid.time, "perf_counter", lambda: now[0])
    one, other = object(), object()
    clock = grid._Clock([one, other])
    now[0] = 4.0
    assert clock.take(one, last=False) == 2.0
    now[0] = 6.0
    assert clock.take(one, last=True) == 1.0
    assert clock.take(other, last=False) == 3.0
    now[0] = 7.0
    assert clock.take(other, last=True) == 1.0


def steps_of(monkeypatch):
    """The local steps of every task that is trained from now on."""
    found = []
    real = Lanes.run

    def run(self, tasks):
        found.extend(task.steps for task in tasks)
        return real(self, tasks)

    monkeypatch.setattr(Lanes, "run", run)
    return found
