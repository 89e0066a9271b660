"""What a client remembers, by run and by round."""

import pytest
import torch
from flwr.app import RecordDict

from feddure.errors import RunError
from feddure.flower.app.memory import InContext, OnDisk


@pytest.fixture(params=["disk", "context"])
def remembering(request, tmp_path):
    """Opens the same store again, as a new process does."""
    state = RecordDict()
    return (lambda run: OnDisk(tmp_path, run)) if request.param == "disk" else (lambda run: InContext(state, run))


def value(memory, round_number):
    found = memory.recall(round_number)
    return None if found is None else found["w"].item()


def test_a_memory_is_that_of_its_run_and_round(remembering):
    remembering("one").keep(3, {"w": torch.tensor([1 / 3], dtype=torch.float64)}, ())
    assert value(remembering("one"), 3) == 1 / 3
    assert remembering("one").recall(3)["w"].dtype == torch.float64
    assert value(remembering("one"), 2) is None
    assert value(remembering("two"), 3) is None


def test_only_what_the_server_may_go_back_to_is_kept(remembering):
    memory = remembering("one")
    memory.keep(1, {"w": torch.tensor([1.0])}, ())
    memory.keep(2, {"w": torch.tensor([2.0])}, (1,))
    memory.keep(3, {"w": torch.tensor([3.0])}, (2, 1))
    memory.keep(4, {"w": torch.tensor([4.0])}, (3, 1))
    assert [value(memory, number) for number in range(1, 5)] == [1, None, 3, 4]


def test_a_round_that_is_repeated_replaces_its_memory(remembering):
    memory = remembering("one")
    memory.keep(1, {"w": torch.tensor([1.0])}, ())
    memory.keep(2, {"w": torch.tensor([2.0])}, (1,))
    memory.keep(2, {"w": torch.tensor([5.0])}, (1,))
    assert (value(memory, 1), value(memory, 2)) == (1, 5)


def test_a_damaged_file_counts_as_lost(tmp_path):
    OnDisk(tmp_path, "one").keep(1, {"w": torch.ones(1)}, ())
    (file,) = (tmp_path / "memory" / "one").iterdir()
    file.write_bytes(file.read_bytes()[:20])
    assert OnDisk(tmp_path, "one").recall(1) is None


def test_nobody_else_can_read_a_memory(tmp_path):
    state = tmp_path / "state"
    OnDisk(state, "one").keep(1, {"w": torch.ones(1)}, ())
    modes = {path.name: path.stat().st_mode & 0o777 for path in (state, *state.rglob("*"))}
    assert modes == {"state": 0o700, "memory": 0o700, "one": 0o700, "round-1.safetensors": 0o600}


@pytest.mark.parametrize("name", ["../other", "", "a/b", "..", "a.b"])
def test_the_server_cannot_choose_a_path_at_the_site(name, tmp_path):
    with pytest.raises(RunError, match="expected letters and digits"):
        OnDisk(tmp_path, name)
