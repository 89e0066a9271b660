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


# --- what is kept of each client ------------------------------------------------------------------------
ALONE = {"method": "local", "rounds": 6, "checkpoint_every": 2, "clients_per_round": 2}


@pytest.fixture
def own_files(monkeypatch):
    """Clients' memories, tiny as they are here, have files of their own."""
    monkeypatch.setattr(checkpoint, "LARGE", 0)


def files_of_clients(folder):
    return {path.name: path.read_bytes() for path in (folder / checkpoint.CLIENTS).iterdir()}


@pytest.mark.usefixtures("own_files")
def test_files_of_clients_survive_a_stop_and_a_crash_between_them_and_their_checkpoint(tmp_path, monkeypatch):
    whole, stopped, crashed = tmp_path / "whole", tmp_path / "stopped", tmp_path / "crashed"
    execute(whole, **ALONE)
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        with pytest.raises(runs.Interrupted):
            execute(stopped, **ALONE)
    with monkeypatch.context() as patch:
        inner, written = checkpoint.write_whole, iter(range(10**9))

        def write_whole(path, *rest, **options):
            if path.name == checkpoint.FILE.name and next(written) == 1:
                raise Crash
            inner(path, *rest, **options)

        patch.setattr(checkpoint, "write_whole", write_whole)
        with pytest.raises(Crash):
            execute(crashed, **ALONE)
    for folder in (stopped, crashed):
        execute(folder, resume=True, **ALONE)
        assert contents(folder) == contents(whole)
        assert files_of_clients(folder) == files_of_clients(whole)
    assert len(files_of_clients(whole)) == 4  # one a client: older ones are gone


@pytest.mark.usefixtures("own_files")
def test_a_checkpoint_writes_the_clients_that_have_trained_since_the_last_one(images, tmp_path):
    federation = tiny.federation(tiny.experiment(ALONE), images)
    federation.train_round()
    checkpoint.write(federation.server, tmp_path)
    before, drawn = files_of_clients(tmp_path), federation.server.sample(2)
    federation.train_round()
    checkpoint.write(federation.server, tmp_path)
    new = files_of_clients(tmp_path).keys() - before.keys()
    assert sorted(int(name.partition("-")[0]) for name in new) == sorted(drawn)


def test_models_beside_files_of_clients_are_left_alone(images, tmp_path):
    """A stranger's run may have a link there, to a folder of its new owner's."""
    mine = tmp_path / "mine" / "model.safetensors"
    mine.parent.mkdir()
    mine.write_bytes(b"of weeks")
    clients = tmp_path / checkpoint.CLIENTS
    clients.parent.mkdir()
    clients.symlink_to(mine.parent)
    checkpoint.write(tiny.federation(tiny.experiment(ALONE), images).server, tmp_path)
    assert mine.exists()


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize("damage", ["a flipped byte", "gone"])
def test_a_damaged_file_of_a_client_is_refused(images, tmp_path, damage):
    federation = tiny.federation(tiny.experiment(ALONE), images)
    federation.train_round()
    checkpoint.write(federation.server, tmp_path)
    path = next((tmp_path / checkpoint.CLIENTS).iterdir())
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "a flipped byte":
        content[-4] ^= 1
        path.write_bytes(content)
    with pytest.raises(RunError, match="a part of the checkpoint cannot be read") as caught:
        checkpoint.read(tiny.federation(tiny.experiment(ALONE), images).server, tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.usefixtures("own_files")
def test_a_run_goes_on_from_a_checkpoint_that_has_everything_in_one_file(tmp_path, monkeypatch):
    """As versions up to 0.2 wrote them."""
    execute(tmp_path / "whole", **ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "LARGE", 2**60)
        stop_after(patch, 12)
        with pytest.raises(runs.Interrupted):
            execute(tmp_path / "old", **ALONE)
    assert not (tmp_path / "old" / checkpoint.CLIENTS).exists()
    execute(tmp_path / "old", resume=True, **ALONE)
    assert contents(tmp_path / "old") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("own_files")
def test_files_that_an_earlier_checkpoint_needs_stay(images, tmp_path):
    federation = tiny.federation(tiny.experiment(ALONE), images)
    for number in (1, 2, 3):
        federation.train_round()
        checkpoint.write(federation.server, tmp_path)
        if number == 1:
            checkpoint.keep(tmp_path, 1, ())
            first = {client: dict(memory) for client, memory in federation.server.memories.items()}
    back = tiny.federation(tiny.experiment(ALONE), images)
    assert checkpoint.read(back.server, tmp_path, 1)
    assert back.server.memories.keys() == first.keys()
    for client, memory in first.items():
        tiny.assert_equal(back.server.memories[client], memory)


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
