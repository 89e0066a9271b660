"""Every client alone: nothing is exchanged, and each goes on from its own model."""

import torch

import tiny

IMAGES = tiny.dataset(size=80, tests=16, side=8)


def test_clients_go_on_from_their_own_models_and_nothing_is_sent():
    federation = tiny.federation(tiny.experiment({"method": "local", "local_steps": 2, "rounds": 3}), IMAGES)
    start = {name: tensor.clone() for name, tensor in federation.server.state.items()}
    before: dict[int, torch.Tensor] = {}
    for _ in range(3):
        tasks = federation.tasks()
        for task in tasks:
            expected = before.get(task.client)
            assert ("own_theta" in task.memory) == (expected is not None)
            assert expected is None or torch.equal(task.memory["own_theta"], expected)
        record = federation.finish_round(tasks, federation.engine.run(tasks))
        assert record["communication"] == {"down": 0, "up": 0}
        before = {client: memory["own_theta"] for client, memory in federation.server.memories.items()}
    assert all(torch.equal(federation.server.state[name], tensor) for name, tensor in start.items())
    assert len({tuple(theta[:50].tolist()) for theta in before.values()}) == len(before) > 1


def test_alone_equals_a_federation_of_one():
    """One client without anybody to average with learns what it would in a federation."""
    changes = {"partition.clients": 1, "clients_per_round": 1, "rounds": 2, "partition.setting": "iid-iid"}
    alone = tiny.finished(tiny.experiment({**changes, "method": "local"}), IMAGES)
    federated = tiny.finished(tiny.experiment({**changes, "method": "fedavg-matched"}), IMAGES)
    torch.testing.assert_close(alone.server.memories[0]["own_theta"], federated.server.state["theta"])


def test_the_clients_models_are_what_is_tested():
    federation = tiny.finished(tiny.experiment({"method": "local", "rounds": 2}), IMAGES)
    found = federation.server.test()["test"]
    shares = list(found["by_client"].values())
    assert len(shares) == len(federation.server.memories)
    assert found["accuracy"] == sum(shares) / len(shares)
    assert sum(map(sum, found["confusion"])) == 16 * len(shares)
