"""The engine on a GPU: streams, captured graphs and compiled code compute what a plain CPU computes in float64.

Single precision differs from double in the last of some 7 digits, and Adam and max pooling magnify a few of these
differences. Adam runs with a large ε here, which keeps them small; "near" means that two global models differ by
less than a fiftieth of what training changed. (On a CPU, float32 stays below a three-hundredth.)
"""

import pytest
import torch

import feddure
import tiny
from feddure.errors import FeddureWarning
from feddure.methods.fedavg import FedAvg
from feddure.simulation import checkpoint
from feddure.simulation.engine import Engine
from feddure.simulation.federation import run
from feddure.simulation.lanes import Lanes
from oracle.fedavg_twin import Twin

pytestmark = pytest.mark.gpu

NEAR = 0.02
STEADY = {"optimizer.epsilon": 1e-2, "clients_per_round": 4, "engine.lanes": 4}
EAGER = {"engine.device": "cuda", "engine.precision": "fp32", "engine.compile": False}
COMPILED = EAGER | {"engine.compile": True}


@pytest.fixture(scope="module")
def colour():
    return tiny.dataset(channels=3, side=16)


def on_gpu(changes, base=EAGER):
    return tiny.experiment(STEADY | base | changes)


def on_cpu(changes):
    return tiny.experiment(STEADY | changes)


def assert_models_near(found, expected, start, tolerance=NEAR):
    """Both the parameters and the statistics, by what training changed in them."""
    for name in ("theta", "statistics"):
        one, other, before = (state[name].cpu().double() for state in (found, expected, start))
        change = (other - before).norm()
        if other.numel():
            assert (one - other).norm() <= tolerance * change, f"{name}: {(one - other).norm() / change:.2g}"


def assert_agrees_with_cpu(changes, images, base=EAGER):
    start = tiny.federation(on_cpu(changes), images).server.state
    expected = tiny.finished(on_cpu(changes), images).server.state
    found = tiny.finished(on_gpu(changes, base), images)
    assert found.server.program.captures, "the step was not captured"
    assert_models_near(found.server.state, expected, start)
    return found


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("method", ["fedavg", "fedavg-matched", "fedprox-sl"])
def test_rounds_equal_the_textbook(colour, method, norm):
    experiment = on_gpu({"method": method, "norm": norm})
    owned = tiny.partition(experiment, colour)
    twin = Twin(experiment, colour, owned)
    start = tiny.federation(experiment, colour, owned=owned)
    federation = tiny.finished(experiment, colour, owned=owned)
    for _ in range(experiment.rounds):
        twin.play()
    expected = dict(zip(("theta", "statistics"), start.server.program.network.take(twin.module), strict=True))
    assert_models_near(federation.server.state, expected, start.server.state)


@pytest.mark.parametrize("model", ["cnn", "resnet9-slim"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_feddure(colour, model, norm):
    assert_agrees_with_cpu({"method": "feddure", "model": model, "norm": norm, "rounds": 1}, colour)


@pytest.mark.parametrize("method", ["fedavg-matched", "feddure"])
def test_compiled(colour, method):
    found = assert_agrees_with_cpu({"method": method, "rounds": 1}, colour, COMPILED)
    assert found.server.program.network.compiled


@pytest.mark.parametrize("base", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("method", ["fedavg-matched", "feddure"])
def test_the_number_of_lanes_changes_nothing(colour, method, base):
    changes = {"method": method, "partition.clients": 6, "partition.labels_per_class": 2, "clients_per_round": 6}
    states = [tiny.finished(on_gpu(changes | {"engine.lanes": lanes}, base), colour).server.state for lanes in (1, 4)]
    start = tiny.federation(on_cpu(changes), colour).server.state
    assert_models_near(*states, start)


def test_a_captured_step_equals_the_step(colour):
    changes = {"method": "feddure"}
    captured = tiny.finished(on_gpu(changes), colour)
    plain = tiny.federation(on_gpu(changes), colour)
    start = {name: tensor.clone() for name, tensor in plain.server.state.items()}
    plain.server.program.captures = False
    run(plain)
    assert_models_near(captured.server.state, plain.server.state, start)


def test_a_refilled_lane_equals_a_fresh_one(colour):
    experiment = on_gpu({"method": "feddure", "engine.deterministic": True})
    one, *others = tiny.federation(experiment, colour).tasks()
    device = torch.device("cuda")
    used = Lanes(device, 1)
    used.run(others)
    (found,), (expected,) = used.run([one]), Lanes(device, 1).run([one])
    tiny.assert_equal(found.upload, expected.upload)
    tiny.assert_equal(found.records, expected.records)


def test_repeats_are_identical_where_that_is_asked_for(colour):
    experiment = on_gpu({"method": "feddure", "engine.deterministic": True, "rounds": 3})
    one, other = (tiny.finished(experiment, colour) for _ in range(2))
    tiny.assert_equal(one.server.state, other.server.state)
    assert one.server.test() == other.server.test()


def test_resume_is_identical_where_that_is_asked_for(colour, tmp_path):
    changes = {"method": "feddure", "feddure.f_reg_memory": "client", "engine.deterministic": True, "rounds": 4}
    whole = tiny.federation(on_gpu(changes), colour)
    for _ in range(2):
        whole.train_round()
    checkpoint.write(whole.server, tmp_path)
    run(whole)
    resumed = tiny.federation(on_gpu(changes), colour)
    assert checkpoint.read(resumed.server, tmp_path)
    assert resumed.server.state["theta"].device.type == "cuda"
    run(resumed)
    tiny.assert_equal(resumed.server.state, whole.server.state)


@pytest.mark.parametrize("method", ["fedmatch", "local"])
def test_what_is_kept_of_each_client_takes_no_room_on_the_device(colour, method):
    server = tiny.finished(on_gpu({"method": method, "rounds": 2}), colour).server
    kept = [tensor for name, tensor in server.state.items() if server.owner(f"server.{name}") is not None]
    kept += [tensor for memory in server.memories.values() for tensor in memory.values()]
    assert kept
    assert {tensor.device.type for tensor in kept} == {"cpu"}


def test_federations_on_one_engine_equal_each_alone(colour):
    wanted = [
        on_gpu({}),
        on_gpu({"seed": 5}),
        on_gpu({"method": "fedavg-matched", "local_steps": 3}),
        on_gpu({"method": "feddure"}),
        on_gpu({"method": "fedprox-sl", "norm": "group"}),
    ]
    engine = Engine(wanted[0].engine)
    together = [tiny.federation(experiment, colour, engine) for experiment in wanted]
    starts = [{name: tensor.clone() for name, tensor in federation.server.state.items()} for federation in together]
    for federation in together:
        run(federation)
    for federation, experiment, start in zip(together, wanted, starts, strict=True):
        assert_models_near(federation.server.state, tiny.finished(experiment, colour).server.state, start)


def test_rounds_with_an_update_that_cannot_be_used_are_made_again(colour, monkeypatch):
    """It is seen while the next round trains, which began from a model that is not finite."""
    tiny.poison(monkeypatch, {2, 3})
    with pytest.warns(FeddureWarning, match="left out were updates"):
        found = assert_agrees_with_cpu({"method": "fedavg-matched", "rounds": 4}, colour)
    assert found.finished


def test_evaluation_equals_the_cpus(colour):
    changes = {"method": "fedavg-sl", "optimizer.learning_rate": 0.01, "optimizer.epsilon": 1e-8}
    federation = tiny.finished(on_gpu(changes), colour)
    other = tiny.federation(on_cpu(changes), colour)
    other.server.state = {name: tensor.cpu().double() for name, tensor in federation.server.state.items()}
    found, expected = federation.server.test()["test"], other.server.test()["test"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert abs(found["accuracy"] - expected["accuracy"]) <= 1 / 60
    assert found["accuracy"] > 0.4


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_low_precision_learns(colour, precision):
    changes = {"method": "fedavg-sl", "optimizer.learning_rate": 0.01, "optimizer.epsilon": 1e-8, "rounds": 4}
    federation = tiny.finished(on_gpu(changes | {"engine.precision": precision}), colour)
    assert federation.server.state["theta"].dtype == torch.float32
    assert federation.server.test()["test"]["accuracy"] > 0.4


class Peeks(FedAvg):
    """Asks the device for a number in the middle of a step, which no graph can hold."""

    def step(self, client, batch):
        record = super().step(client, batch)
        return record | {"loss": torch.tensor(record["loss"].item(), device=record["loss"].device)}


def test_a_step_that_cannot_be_captured_runs_all_the_same(colour):
    feddure.register_method("peeks", Peeks)
    start = tiny.federation(on_cpu({}), colour).server.state
    with pytest.warns(FeddureWarning, match="cannot be captured"):
        found = tiny.finished(on_gpu({"method": "peeks"}), colour)
    assert not found.server.program.captures
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_models_near(found.server.state, tiny.finished(on_gpu({}), colour).server.state, start)


def test_clients_without_labelled_or_without_unlabelled_images(colour):
    """Each shape of batch has a graph of its own."""
    changes = {"method": "feddure", "rounds": 2}
    owned = tiny.partition(on_cpu(changes), colour)
    none = owned.labelled[0][:0]
    bare = type(owned)(
        (none, *owned.labelled[1:]), (owned.unlabelled[0], none, *owned.unlabelled[2:]), owned.parameters, owned.repairs
    )
    start = tiny.federation(on_cpu(changes), colour, owned=bare).server.state
    expected = tiny.finished(on_cpu(changes), colour, owned=bare).server.state
    found = tiny.finished(on_gpu(changes), colour, owned=bare)
    assert found.server.program.captures
    assert_models_near(found.server.state, expected, start)
