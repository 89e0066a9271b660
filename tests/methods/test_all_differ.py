"""What all methods have in common, and that no two of them are the same."""

from dataclasses import replace

import pytest
import torch

import tiny
from feddure import methods
from feddure.data.batches import Batch
from feddure.methods import METHODS, Client
from feddure.simulation.program import make_network

CHANGES = {
    "local_steps": 2,  # another number than that of a pass over the labels: fedavg-matched is not fedavg
    "rounds": 1,
    # So low that some pseudo labels of a network that knows nothing pass, and some do not.
    "fixmatch.threshold": 0.35,
    "uda.threshold": 0.35,
    "feddure.threshold": 0.35,
    "fedmatch.threshold": 0.35,
    "sage.threshold": 0.35,
    "proxyfl.threshold": 0.35,
    "proxyfl.tuning_epochs": 3,
}
BUILT_IN = tuple(METHODS)  # other tests register methods of their own
WITH_PSEUDO_LABELS = tuple(name for name in BUILT_IN if METHODS[name].needs.unlabelled)
META = torch.device("meta")


@pytest.fixture(scope="module")
def after_a_round():
    """The federation of each method after one round from the same start, and its record."""
    images = tiny.dataset(size=80, tests=8, side=8)
    found = {}
    for method in BUILT_IN:
        federation = tiny.federation(tiny.experiment({**CHANGES, "method": method}), images)
        found[method] = federation, tiny.play_round(federation)
    return found


def _classifier(server):
    """What every method's model has, with heads or without."""
    network, (theta, _) = server.program.network, server.method.global_model(server.state)
    return network.rows(network.parameters.views(theta))


@pytest.mark.parametrize("method", BUILT_IN)
def test_no_other_method_gives_the_same_weights(after_a_round, method):
    models = {name: _classifier(made.server) for name, (made, _) in after_a_round.items()}
    theta = models.pop(method)
    assert torch.isfinite(theta).all()
    for other, weights in models.items():
        assert ((theta - weights).abs().max() / theta.abs().max()).item() > 1e-9, other


@pytest.mark.parametrize("method", WITH_PSEUDO_LABELS)
def test_pseudo_labels_are_neither_all_taken_nor_all_left(after_a_round, method):
    _, record = after_a_round[method]
    mean = record["diagnostics"]["weight_mean"]
    assert mean == 1 if method == "fedtutor" else 0 < mean < 1  # a tutor's soft labels all count


@pytest.mark.parametrize("method", BUILT_IN)
def test_communication_is_counted(after_a_round, method):
    federation, record = after_a_round[method]
    network = federation.server.program.network
    model = 3 * 4 * (network.parameters.size + network.statistics.size) * METHODS[method].exchanges
    assert record["communication"]["down"] >= model
    assert record["communication"]["up"] >= model
    if method.startswith(("fedavg", "fedprox")) or method == "feddure":
        assert record["communication"] == {"down": model, "up": model}


@pytest.mark.parametrize(
    ("method", "labelled", "unlabelled"),
    [*((name, 5, count) for name in BUILT_IN for count in (6, 0)), *((name, 0, 6) for name in WITH_PSEUDO_LABELS)],
)
def test_a_step_never_looks_at_its_data(method, labelled, unlabelled):
    """Tensors without any content: what would wait for a number, or for a size that hangs on one, fails."""
    experiment = tiny.experiment({**CHANGES, "method": method})
    algorithm = methods.make(experiment)
    network = make_network(experiment, tiny.dataset(), META, "fp32", compiled=False)
    client = Client(network, experiment, proximal=0.1, classes=4)
    algorithm.allocate(client)
    counts = {name: unlabelled if getattr(algorithm.needs, name) else 0 for name in ("plain", "weak", "strong")}
    views = {name: torch.empty(count, 1, 12, 12, device=META) for name, count in counts.items()}
    batch = Batch(
        labelled=torch.empty(labelled, 1, 12, 12, device=META),
        labels=torch.empty(labelled, dtype=torch.int64, device=META),
        truth=torch.empty(unlabelled, dtype=torch.int64, device=META),
        index=torch.empty(unlabelled, dtype=torch.int64, device=META),
        **views,
    )
    model = {"theta": client.theta, "statistics": client.statistics}
    client.received = model | {f"teacher.{name}": tensor for name, tensor in model.items()}
    made = algorithm.before_steps(client, batch.map(lambda tensor: tensor.unsqueeze(0)))
    step = replace(batch, made={name: tensor.squeeze(0) for name, tensor in made.items()})
    record = algorithm.step(client, step)
    assert all(tensor.device == META for tensor in record.values())
