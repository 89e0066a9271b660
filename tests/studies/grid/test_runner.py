"""Grids: every cell once, whatever happens in between, with the numbers of an ordinary run."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import failing
import tiny
from failing import Raises
from feddure import plugins
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.methods.fedavg import FedAvg
from feddure.simulation import runs
from feddure.simulation.lanes import Lanes
from feddure.studies.grid import runner
from feddure.studies.grid.store import Cell, Store, unmeasured
from feddure.tracking import records
from measured import found, here
from waiting import until


@pytest.fixture(autouse=True)
def _methods():
    failing.register()


@pytest.fixture
def trained(monkeypatch):
    """Seed and round of every task that is trained from now on."""
    found = []
    real = Lanes.run

    def run(self, tasks, meanwhile):
        found.extend(task.key[:2] for task in tasks)
        return real(self, tasks, meanwhile)

    monkeypatch.setattr(Lanes, "run", run)
    return found


@pytest.fixture
def _checkpoint_each_round(monkeypatch):
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(runner, "_WRITING", 1e9)


def cells(*methods, seeds=(0, 1), **changes):
    changes = {"rounds": 3, "server.ema": 0.9} | changes
    return [Cell("test", "", tiny.experiment(changes, method=m, seed=s)) for m in methods for s in seeds]


def measure(wanted, store, **options):
    runner.measure(wanted, store, lambda name: tiny.dataset(), **options)


def measured(wanted, store):
    return [store.has(cell) for cell in wanted]


def names(store):
    return sorted(path.name for path in store.folder.iterdir() if not path.name.startswith("."))


# --- what is measured, and in which order --------------------------------------------------------------------
def test_a_cell_has_the_numbers_of_an_ordinary_run(tmp_path, images):
    (one,) = cells("feddure", seeds=(4,))
    store = Store(tmp_path / "grid")
    measure([one], store)
    run = runs.execute(one.experiment, images, tmp_path / "run", progress=False)
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
    assert names(store) == ["cells.jsonl"]


def test_a_cell_keeps_the_means_of_its_last_probes(tmp_path, images):
    plain, probed = (cells("fedavg", seeds=(4,), probe_every=every)[0] for every in (0, 1))
    assert plain.hash == probed.hash
    store = Store(tmp_path / "grid")
    measure([probed], store)
    run = runs.execute(probed.experiment, images, tmp_path / "run", progress=False)
    found = store.find(plain).diagnostics
    mean = sum(record["probe"]["drift"] for record in run.metrics) / 3
    assert found["probe_drift"] == pytest.approx(mean, abs=1e-5)
    assert {"probe_own_accuracy", "probe_averaged_calibration_error", "probe_test_clients"} <= found.keys()
    assert sum(name.startswith("probe_") for name in found) == 14


def test_what_is_finished_or_another_process_works_on_is_left_alone(tmp_path, trained):
    wanted, store = cells("fedavg", seeds=(0, 1, 2)), Store(tmp_path)
    measure(wanted[:1], store)
    trained.clear()
    with store.claimed(wanted[1]):
        measure([*wanted, Cell("another study", "", wanted[2].experiment)], store)
    assert trained == [(2, number) for number in (1, 2, 3) for _ in range(3)]
    assert unmeasured(wanted, store) == [wanted[1]]


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_stays_with_its_program_and_begins_with_one_that_no_other_trains(tmp_path, trained, busy):
    ours, theirs = cells("fedavg", seeds=(1, 2), rounds=1), cells("feddure", seeds=(3, 4, 5), rounds=1)
    store = Store(tmp_path)
    with store.claimed(theirs[0]):
        if busy:
            store.note(theirs[0], "another")
        measure([theirs[0], theirs[1], ours[0], theirs[2], ours[1]], store)
    order = list(dict.fromkeys(seed for seed, _ in trained))
    assert order == ([1, 2, 4, 5] if busy else [4, 5, 1, 2])


@pytest.mark.filterwarnings("ignore:.*is not finite")
def test_a_cell_says_how_many_updates_were_left_out(tmp_path):
    (mad,) = cells("fedavg", seeds=(0,), **{"optimizer.learning_rate": 1e300})
    measure([mad], Store(tmp_path))
    assert Store(tmp_path).find(mad).left_out == 1


# --- stops and kills -----------------------------------------------------------------------------------------
def test_a_signal_keeps_what_is_under_way(tmp_path, images, monkeypatch, trained):
    wanted, store = cells("feddure"), Store(tmp_path / "stopped")
    with monkeypatch.context() as patch:
        turns = iter(range(10_000))
        patch.setattr(runs.Stop, "__call__", lambda self: next(turns) >= 10)
        patch.setattr(runs.Stop, "signal", signal.SIGTERM)
        with pytest.raises(runner.GridStopped) as stopped:
            measure(wanted, store)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert (store.unfinished(wanted[0].hash) / "checkpoint" / "state.safetensors").exists()
    trained.clear()
    measure(wanted, store)
    assert (0, 1) not in trained  # not from the beginning
    assert found(store, wanted) == here(tmp_path / "whole", wanted, images)
    assert names(store) == ["cells.jsonl"]


@pytest.mark.usefixtures("_checkpoint_each_round")
def test_checkpoints_are_written_by_the_clock(tmp_path, monkeypatch):
    written = []
    real = runner.checkpoint.write
    monkeypatch.setattr(runner.checkpoint, "write", lambda *given: (written.append(given[0].round), real(*given)))
    measure(cells("fedavg", seeds=(0,)), Store(tmp_path))
    assert written == [1, 2]  # not after the last round: the cell is finished then


@pytest.mark.usefixtures("_checkpoint_each_round")
def test_a_kill_at_any_moment_loses_no_finished_cell_and_little_of_others(tmp_path, images):
    wanted, store = cells("fedavg", "fedavg-fixmatch", rounds=6), Store(tmp_path / "killed")
    before = {}
    for rounds in (3, 9, 5):
        log = tmp_path / f"{rounds}.log"
        child = os.fork()
        if child == 0:
            with log.open("wb", buffering=0) as file:
                measure(wanted, store, refresh=lambda file=file: file.write(b"."))
                os._exit(0)
        until(lambda log=log, rounds=rounds: log.exists() and log.stat().st_size > rounds)
        time.sleep(0.003 * rounds)  # not always at the same place of a round
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = {one.config_hash: one for one in store.measurements()}
        assert before == {name: one for name, one in finished.items() if name in before}
        before = finished
    assert before
    measure(wanted, store)
    assert all(store.find(cell) == before[cell.hash] for cell in wanted if cell.hash in before)
    assert found(store, wanted) == here(tmp_path / "whole", wanted, images)


def test_a_cell_that_ended_another_process_of_the_same_command_is_not_tried(tmp_path):
    wanted, store = cells("fedavg"), Store(tmp_path)
    store.note(wanted[0], "this command", 2)  # by one that was killed
    measure(wanted, store, command="this command")
    assert store.failures() == {wanted[0].hash: runner.LOST}
    assert measured(wanted, store) == [False, True]
    store.forget_failures(wanted)
    measure(wanted, store)
    assert measured(wanted, store) == [True, True]


# --- errors --------------------------------------------------------------------------------------------------
def test_an_error_ends_only_its_cells(tmp_path, images):
    """In the code of a method or of a data set, or a mistake that a check finds while it trains."""

    def load(name):
        return images if name == "tiny" else {}["images"]

    raised, good = cells("raises", options={"at": [0, 1]})
    (mistaken,) = cells("mistaken", seeds=(0,))
    (too_few,) = cells("fedavg", seeds=(1,), **{"partition.labels_per_class": 400})
    (no_data,) = cells("fedavg", seeds=(0,), dataset="fashion-mini")
    wanted, store = [raised, good, mistaken, too_few, no_data, *cells("fedavg-matched")], Store(tmp_path)
    runner.measure(wanted, store, load)
    assert measured(wanted, store) == [False, True, False, False, False, True, True]
    said = store.failures()
    assert said[raised.hash].error == "OSError: a mistake"
    assert said[raised.hash].traceback.splitlines()[1].startswith(f'  File "{failing.__file__}", line ')
    assert "add needs = feddure.Needs(strong=True)" in said[mistaken.hash].error
    assert "400" in said[too_few.hash].error
    assert said[no_data.hash].error == "KeyError: 'images'"
    assert {one.hash for one in wanted if one.hash in said and said[one.hash].traceback} == {raised.hash, no_data.hash}
    assert [path.name for path in store.unfinished(raised.hash).iterdir()] == ["failure.json"]


@pytest.mark.parametrize("error", [MemoryError, ZeroDivisionError])
def test_a_failed_cell_is_tried_again_by_the_next_command_only(tmp_path, monkeypatch, trained, error):
    def step(self, client, batch):
        raise error

    wanted, store = cells("raises", seeds=(0,), options={"at": [0, 1]}), Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Raises, "step", step)
        measure(wanted, store)
    monkeypatch.setattr(Raises, "step", FedAvg.step)
    measure(wanted, store)  # another process of the same command
    assert measured(wanted, store) == [False]
    store.forget_failures(wanted)
    measure(wanted, store)
    assert measured(wanted, store) == [True]
    assert names(store) == ["cells.jsonl"]


@pytest.mark.usefixtures("_checkpoint_each_round")
def test_a_failed_cell_goes_on_from_its_checkpoint(tmp_path, images, monkeypatch, trained):
    wanted, store = cells("raises", seeds=(0,), options={"at": [0, 3]}), Store(tmp_path / "failed")
    measure(wanted, store)
    assert store.failures()
    monkeypatch.setattr(Raises, "step", FedAvg.step)
    store.forget_failures(wanted)
    trained.clear()
    measure(wanted, store)
    assert trained == [(0, 3)] * 3
    assert found(store, wanted) == here(tmp_path / "whole", wanted, images)


def test_a_stop_in_the_step_that_fails_is_heard(tmp_path, monkeypatch, trained):
    def step(self, client, batch):
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("a mistake")

    monkeypatch.setattr(Raises, "step", step)
    with pytest.raises(runner.GridStopped):
        measure(cells("raises", "fedavg"), Store(tmp_path))
    assert {seed for seed, _ in trained} == {0}


def test_what_concerns_all_cells_ends_the_grid(tmp_path, monkeypatch):
    def step(self, client, batch):
        raise RunError("what all cells share")

    wanted, store = cells("raises", "fedavg"), Store(tmp_path)
    with pytest.raises(ConfigError, match="cuda was given"):
        measure(cells("fedavg", **{"engine.device": "cuda"}), store)
    with monkeypatch.context() as patch:
        patch.setattr(Raises, "step", step)
        with pytest.raises(RunError, match="what all cells share"):
            measure(wanted, store)
    monkeypatch.setattr(runner.failures, "is_usable", lambda device: False)
    with pytest.raises(RunError, match=r"a mistake\nThe error left this process without its GPU"):
        measure(cells("raises", "fedavg", options={"at": [0, 1]}), store)
    assert not any(measured(wanted, store))


def full(number):
    def write(*_, **__):
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize(
    ("place", "number"),
    [("record", errno.ENOSPC), ("checkpoint", errno.EDQUOT), ("cell", errno.ENOSPC), ("claim", errno.EROFS)],
)
def test_a_full_disk_ends_the_grid_and_finished_cells_stay(tmp_path, monkeypatch, number, place):
    done, *wanted = cells("fedavg", "fedavg-matched", "feddure", seeds=(0,), rounds=2)
    store = Store(tmp_path)
    measure([done], store)
    with monkeypatch.context() as patch:
        if place == "record":
            patch.setattr(records.Writer, "write", full(number))
        elif place == "claim":
            patch.setattr(Path, "mkdir", full(number))
        else:
            patch.setattr(os, "fsync", full(number))
            if place == "checkpoint":
                patch.setattr(runner, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(RunError, match="finished cells are kept") as caught:
            measure([done, *wanted], store)
    assert str(caught.value).startswith(str(tmp_path))
    assert measured([done, *wanted], store) == [True, False, False]
    measure(wanted, store)
    assert all(measured(wanted, store))


# --- the user's own code -------------------------------------------------------------------------------------
METHOD = """
from feddure.methods.fedavg import FedAvg

class Mine(FedAvg):
    step_size = {}
"""


@pytest.fixture
def write_code(tmp_path, monkeypatch):
    """Writes the module, as another process would then find it."""
    monkeypatch.chdir(tmp_path)

    def forget():
        sys.modules.pop("some_own_module", None)
        plugins._hash.cache_clear()

    def write(text):
        (tmp_path / "some_own_module.py").write_text(text)
        forget()

    write(METHOD.format(1))
    yield write
    forget()


def test_a_cell_is_measured_again_when_its_code_has_changed(tmp_path, write_code, monkeypatch):
    store, (one, builtin) = Store(tmp_path / "grid"), cells("some_own_module:Mine", "fedavg", seeds=(0,), rounds=1)
    measure([one, builtin], store)
    before = store.find(one)
    assert "own_code" not in store.find(builtin).environment
    write_code(METHOD.format(2))
    assert store.find(one) is None
    assert unmeasured([one, builtin], store) == store.outdated([one, builtin]) == [one]
    measure([one], store)
    assert store.find(one).environment["own_code"] != before.environment["own_code"]
    assert store.outdated([one]) == []
    assert before.environment["own_code"] in (store.folder / "outdated.jsonl").read_text()  # nothing is lost
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plugins._hash.cache_clear()
    assert store.has(one)  # code that is not here does not hide what it gave


@pytest.mark.usefixtures("_checkpoint_each_round")
def test_a_cell_under_way_starts_afresh_with_new_code(tmp_path, write_code, trained):
    store, wanted = Store(tmp_path / "grid"), cells("some_own_module:Mine", seeds=(0,))
    with pytest.raises(runner.GridStopped):
        measure(wanted, store, refresh=lambda: len(trained) > 3 and os.kill(os.getpid(), signal.SIGTERM))
    assert (store.unfinished(wanted[0].hash) / "checkpoint" / "state.safetensors").exists()
    write_code(METHOD.format(2))
    trained.clear()
    measure(wanted, store)
    assert (0, 1) in trained


def test_a_run_that_goes_on_with_other_code_says_so(tmp_path, images, write_code, recwarn):
    (one,) = cells("some_own_module:Mine", seeds=(0,))
    runs.execute(one.experiment, images, tmp_path / "run", progress=False)
    runs.execute(one.experiment, images, tmp_path / "run", resume=True, progress=False)
    assert not [warning for warning in recwarn if issubclass(warning.category, FeddureWarning)]
    write_code(METHOD.format(2))
    with pytest.warns(FeddureWarning, match="your own code .* has changed since this run was started"):
        runs.execute(one.experiment, images, tmp_path / "run", resume=True, progress=False)
