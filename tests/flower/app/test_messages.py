"""What travels: exact both ways, and anything else is named."""

import pytest
import torch
from flwr.app import ConfigRecord

import federated
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


def test_received_tensors_can_be_written_to():
    messages.unpack_state(messages.pack_state(STATE), CPU)["sigma"].zero_()


def test_a_network_without_statistics():
    empty = {"theta": torch.rand(3), "statistics": torch.empty(0)}
    assert messages.unpack_state(messages.pack_state(empty), CPU)["statistics"].shape == (0,)


def test_a_task_comes_back_whole():
    task = Task(Assignment(2, 7, 2**63 - 1, 5, 9), "method: feddure", "name", 6, 5, True, 1.5, 0.5, 1e-6)
    assert Task.unpack(task.pack()) == task


def test_a_message_of_another_version_is_named():
    with pytest.raises(RunError, match=r"the server's message has no 'client'.*same version"):
        Task.unpack(ConfigRecord({"round": 1}))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    root = federated.write_images(tmp_path_factory.mktemp("shapes"))
    return messages.upload_shapes(
        federated.simulator(root, federated.experiment({"method": "fedmatch"})).server.program
    )


def upload(shapes, **changes):
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()} | changes


def test_a_proper_upload_has_no_problem(shapes):
    assert set(shapes) == {"sigma", "psi", "statistics"}
    assert messages.find_problem(upload(shapes), shapes) == ""


def test_wrong_names_shapes_and_types_are_problems(shapes):
    nameless = upload(shapes)
    nameless["phi"] = nameless.pop("psi")
    assert messages.find_problem(nameless, shapes) == (
        "sent arrays phi, sigma, statistics, expected psi, sigma, statistics"
    )
    assert "sent 'psi' with shape [3], expected [" in messages.find_problem(upload(shapes, psi=torch.ones(3)), shapes)
    single = upload(shapes)["psi"].float()
    assert messages.find_problem(upload(shapes, psi=single), shapes) == "sent 'psi' as float32, expected float64"
