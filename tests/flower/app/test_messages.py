"""What travels: exact both ways, and anything else is named."""

import hashlib

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

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


# --- what others could guess ------------------------------------------------------------------------------
def names(content):
    """Those of all parts of a message, as Flower gives them."""
    return {each.object_id for each in iterate_object_tree(get_object_tree(content))}


@pytest.mark.parametrize(
    "make",
    [
        lambda: messages.pack_state({"theta": torch.zeros(3_000_000), "statistics": torch.zeros(0)}),
        lambda: RecordDict({"task": Task(Assignment(2, 7, 1, 5, 9), "method: feddure", "name", 0, 0).pack()}),
        lambda: RecordDict({"answer": messages.pack({"problem": "not approved yet", "site": "north"})}),
    ],
    ids=["arrays", "task", "answer"],
)
def test_an_insider_cannot_name_parts_of_a_message_before_it_is_sent(make, tmp_path):
    """The SuperLink believes whoever names a part first, and would refuse the message."""
    store = SqlObjectStore(str(tmp_path / "objects.db"))
    store.initialize()
    for name in names(make()):
        bogus = ObjectTree(object_id=hashlib.sha256(name.encode()).hexdigest())
        store.preregister(1, ObjectTree(object_id=name, children=[bogus]))
    sent = make()
    assert len(store.preregister(1, get_object_tree(sent))) == len(names(sent))


def test_sites_of_a_round_share_what_they_receive():
    first, second = (messages.pack_state(STATE, b"of one round....") for _ in range(2))
    assert names(first) == names(second)
