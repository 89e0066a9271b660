"""Stopping and going on: however a run ends early, resuming it leaves the very same files."""

import signal

import pytest
import torch

import feddure
import folders
import tiny
from feddure.errors import RunError
from feddure.methods.fedavg import FedAvg
from feddure.simulation import checkpoint, runs
from feddure.tracking import records
from folders import LONG, contents, execute

pytestmark = pytest.mark.usefixtures("quiet")


def stop_after(patch, turns):
    """Let the user press Ctrl-C when the lanes have taken so many turns."""
    taken = iter(range(10**9))
    patch.setattr(runs.Stop, "__call__", lambda self: next(taken) >= turns)
    patch.setattr(runs.Stop, "signal", signal.SIGINT)


@pytest.mark.parametrize("turns", [0, 1, 7, 20])
def test_a_stopped_run_resumes_to_identical_files(tmp_path, monkeypatch, whole, turns):
    with monkeypatch.context() as patch:
        stop_after(patch, turns)
        with pytest.raises(runs.Interrupted) as caught:
            execute(tmp_path, **LONG)
    assert caught.value.exit_code == 130
    assert f"feddure run --out {tmp_path} --resume" in str(caught.value)
    assert contents(execute(tmp_path, resume=True, **LONG).folder) == whole


def test_regulators_that_clients_remember_survive(tmp_path, monkeypatch):
    changes = {"method": "feddure", "feddure.f_reg_memory": "client", "rounds": 3, "local_steps": 1}
    execute(tmp_path / "whole", **changes)
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(runs.Interrupted, match="stopped after round 2"):
            execute(tmp_path / "stopped", **changes)
    execute(tmp_path / "stopped", resume=True, **changes)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_network_without_statistics(tmp_path, monkeypatch):
    changes = {"norm": "group", "rounds": 3}
    execute(tmp_path / "whole", **changes)
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(runs.Interrupted):
            execute(tmp_path / "stopped", **changes)
    execute(tmp_path / "stopped", resume=True, **changes)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_resuming_many_times_changes_nothing(tmp_path, monkeypatch, whole):
    interruptions = 0
    while not (tmp_path / "model.safetensors").exists():
        assert interruptions < 20
        with monkeypatch.context() as patch:
            stop_after(patch, 15)
            try:
                execute(tmp_path, resume=True, **LONG)
            except runs.Interrupted:
                interruptions += 1
    assert interruptions > 1
    assert contents(tmp_path) == whole


class Crash(Exception):
    pass


def crash_in(patch, observer, number, after=False):
    """End the process when this observer is shown round `number`, before or after it has done its work."""
    inner = observer.round_done

    def round_done(self, federation, record, seconds):
        if after:
            inner(self, federation, record, seconds)
        if record["round"] == number:
            raise Crash
        if not after:
            inner(self, federation, record, seconds)

    patch.setattr(observer, "round_done", round_done)


@pytest.mark.parametrize("number", [1, 4, 5])
@pytest.mark.parametrize("moment", ["before the record", "before the checkpoint", "after the checkpoint"])
def test_a_crash_at_any_moment_of_a_round_costs_rounds_but_no_numbers(tmp_path, monkeypatch, whole, moment, number):
    observer = records.Recorder if moment == "before the record" else checkpoint.Checkpoints
    with monkeypatch.context() as patch:
        crash_in(patch, observer, number, after=moment == "after the checkpoint")
        with pytest.raises(Crash):
            execute(tmp_path, **LONG)
    assert contents(execute(tmp_path, resume=True, **LONG).folder) == whole


def test_resuming_a_finished_run_makes_its_last_files_again(tmp_path, whole):
    execute(tmp_path, **LONG)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "report.html").unlink()
    execute(tmp_path, resume=True, **LONG)
    assert contents(tmp_path) == whole
    assert (tmp_path / "report.html").exists()


def test_how_the_work_is_done_may_change(tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        stop_after(patch, 10)
        with pytest.raises(runs.Interrupted):
            execute(tmp_path, **LONG)
    execute(tmp_path, resume=True, **{**LONG, "engine.lanes": 3, "checkpoint_every": 1})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole["metrics.jsonl"]


def test_resume_in_a_new_folder_starts_from_the_beginning(tmp_path):
    assert execute(tmp_path / "new", resume=True).finished


def test_signals_are_left_as_they_were(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    execute(tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_command_to_resume_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    stop_after(monkeypatch, 3)
    with pytest.raises(runs.Interrupted) as stopped:
        execute(tmp_path / "my runs")
    assert f"feddure run --out '{tmp_path}/my runs' --resume" in str(stopped.value)


def test_a_finished_run_is_left_as_it_is(tmp_path):
    """Even one whose checkpoint an older version wrote."""
    folder = execute(tmp_path).folder
    (folder / checkpoint.FILE).write_bytes(b"of another time")
    assert execute(folder, resume=True).finished
    assert (folder / checkpoint.FILE).read_bytes() == b"of another time"


# --- the checkpoint itself -----------------------------------------------------------------------------


def unfinished(folder, **changes):
    """A run whose end is still to be written."""
    (execute(folder, **changes).folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", ["empty", "nonsense", "half", "length"])
def test_a_damaged_checkpoint_is_refused_and_stays(tmp_path, whole, damage):
    unfinished(tmp_path, **LONG)
    path, good = tmp_path / checkpoint.FILE, whole[str(checkpoint.FILE)]
    broken = {
        "empty": b"",
        "nonsense": b"nonsense" * 100,
        "half": good[: len(good) // 2],
        "length": b"\xff" * 8 + good[8:],
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(RunError, match=r"the checkpoint cannot be read.*delete it to start over") as caught:
        execute(tmp_path, resume=True, **LONG)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == broken
    path.unlink()
    execute(tmp_path, resume=True, **LONG)
    assert contents(tmp_path) == whole


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    unfinished(tmp_path / "run")
    execute(tmp_path / "other", seed=1, **{"partition.seed": 0})
    (tmp_path / "run" / checkpoint.FILE).write_bytes((tmp_path / "other" / checkpoint.FILE).read_bytes())
    with pytest.raises(RunError, match="belongs to another configuration"):
        execute(tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_partition_is_refused(tmp_path):
    unfinished(tmp_path)
    tiny.partition(tiny.experiment({"partition.seed": 9}), folders.IMAGES).save(tmp_path / "partition.npz")
    with pytest.raises(RunError, match="another partition"):
        execute(tmp_path, resume=True)


class TwoNames(FedAvg):
    """Keeps the first global model beside the current one."""

    def start(self, theta, statistics, *rest):
        half = theta[: len(theta) // 2]
        return {"theta": theta, "statistics": statistics, "first": theta, "half": half}


def test_the_server_may_hold_one_tensor_under_two_names(images, tmp_path):
    feddure.register_method("two-names", TwoNames)
    federation = tiny.federation(tiny.experiment(method="two-names"), images)
    checkpoint.write(federation.server, tmp_path)
    other = tiny.federation(tiny.experiment(method="two-names"), images)
    other.server.state = {name: torch.zeros_like(tensor) for name, tensor in other.server.state.items()}
    assert checkpoint.read(other.server, tmp_path)
    tiny.assert_equal(other.server.state, federation.server.state)


def test_no_checkpoint_yet(images, tmp_path):
    assert not checkpoint.read(tiny.federation(tiny.experiment(), images).server, tmp_path)
