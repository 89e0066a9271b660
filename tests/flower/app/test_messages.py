"""What travels: exact both ways, and anything else is named."""

import pytest
import torch
from flwr.app import ConfigRecord

from feddure.errors import RunError
from feddure.flower.app import messages
from feddure.flower.app.messages import Task
from feddure.simulation.server import Assignment

CPU = torch.device("cpu")
STATE = {
    "sigma": torch.tensor([0.1, -1e-300, 3.0], dtype=torch.float64),
    "helper.0": torch.rand(7, dtype=torch.float32),
    "statistics": torch.rand(4, dtype=torch.float64),
}


def test_tensors_come_back_to_the_bit():
    content = messages.pack_state(STATE)
    assert set(content.array_records[messages.PARAMETERS]) == {"sigma", "helper.0"}
    assert set(content.array_records[messages.STATISTICS]) == {"statistics"}
    found = messages.unpack_state(content, CPU)
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_task_comes_back_whole():
    task = Task(Assignment(2, 7, 2**63 - 1, 5, 9), "method: feddure", "name", 6, 5, True, 1.5, 0.5, "hash")
    assert Task.unpack(task.pack()) == task


def test_a_message_of_another_version_is_named():
    with pytest.raises(RunError, match=r"the server's message has no 'client'.*same version"):
        Task.unpack(ConfigRecord({"round": 1}))
