"""Stopping and going on: however a run ends early, resuming it leaves the very same files."""

import signal

import pytest
import torch

import feddure
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


@pytest.mark.parametrize("turns", [0, 7, 20])
def test_a_stopped_run_resumes_to_identical_files(tmp_path, monkeypatch, whole, turns):
    with monkeypatch.context() as patch:
        stop_after(patch, turns)
        with pytest.raises(runs.Interrupted) as caught:
            execute(tmp_path, **LONG)
    assert caught.value.exit_code == 130
    assert contents(execute(tmp_path, resume=True, **LONG).folder) == whole


@pytest.mark.parametrize(
    "changes",
    [{"method": "feddure", "feddure.f_reg_memory": "client", "local_steps": 1}, {"norm": "group"}],
    ids=["regulators that clients remember", "a network without statistics"],
)
def test_all_state_survives(tmp_path, monkeypatch, changes):
    execute(tmp_path / "whole", rounds=3, **changes)
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(runs.Interrupted, match=r"stopped after round [12]"):
            execute(tmp_path / "stopped", rounds=3, **changes)
    execute(tmp_path / "stopped", rounds=3, resume=True, **changes)
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


@pytest.mark.parametrize("number", [1, 4])
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


@pytest.fixture
def server(images):
    return tiny.federation(tiny.experiment(), images).server


@pytest.mark.parametrize("damage", ["empty", "nonsense", "half", "length"])
def test_a_damaged_checkpoint_is_refused_and_stays(server, tmp_path, damage):
    checkpoint.write(server, tmp_path)
    path = tmp_path / checkpoint.FILE
    good = path.read_bytes()
    broken = {
        "empty": b"",
        "nonsense": b"nonsense" * 100,
        "half": good[: len(good) // 2],
        "length": b"\xff" * 8 + good[8:],
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(RunError, match=r"the checkpoint cannot be read.*delete it to start over") as caught:
        checkpoint.read(server, tmp_path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == broken


def test_a_flipped_byte_in_a_checkpoint_is_noticed(server, tmp_path):
    """Also in an exponent or in the round's number, where the file stays one that can be read."""
    checkpoint.write(server, tmp_path)
    path = tmp_path / checkpoint.FILE
    good = path.read_bytes()
    for position in (good.index(b'round\\": 0') + 9, len(good) - 4, len(good) // 2):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(RunError, match="the checkpoint is damaged"):
            checkpoint.read(server, tmp_path)
    path.write_bytes(good)
    assert checkpoint.read(server, tmp_path)


def test_a_run_without_its_checkpoint_starts_over(tmp_path, whole):
    execute(tmp_path, **LONG)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / checkpoint.FILE).unlink()
    execute(tmp_path, resume=True, **LONG)
    assert contents(tmp_path) == whole


def test_a_checkpoint_of_another_configuration_is_refused(server, images, tmp_path):
    checkpoint.write(tiny.federation(tiny.experiment(rounds=9), images).server, tmp_path)
    with pytest.raises(RunError, match="belongs to another configuration"):
        checkpoint.read(server, tmp_path)


def test_a_checkpoint_of_another_partition_is_refused(server, images, tmp_path):
    checkpoint.write(server, tmp_path)
    owned = tiny.partition(tiny.experiment({"partition.seed": 9}), images)
    with pytest.raises(RunError, match="another partition"):
        checkpoint.read(tiny.federation(tiny.experiment(), images, owned=owned).server, tmp_path)


class TwoNames(FedAvg):
    """Keeps the first global model beside the current one."""

    def start(self, theta, statistics, *rest):
        half = theta[: len(theta) // 2]
        return {"theta": theta, "statistics": statistics, "first": theta, "half": half}


def test_the_server_may_hold_one_tensor_under_two_names(images, tmp_path):
    feddure.register_method("two-names", TwoNames)
    one, other = (tiny.federation(tiny.experiment(method="two-names"), images).server for _ in range(2))
    assert not checkpoint.read(other, tmp_path)
    checkpoint.write(one, tmp_path)
    other.state = {name: torch.zeros_like(tensor) for name, tensor in other.state.items()}
    assert checkpoint.read(other, tmp_path)
    tiny.assert_equal(other.state, one.state)
