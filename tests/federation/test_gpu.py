"""The engine on a GPU: float32 in lanes, captured and compiled, against float64 on the CPU.

Float32 rounding, amplified by Adam's division where gradients are tiny, separates the two by far less than a round of
training moves the weights. The tolerance is therefore a share of that movement.
"""

import pytest
import torch

import tiny
from feddure.federation.engine import Engine
from feddure.federation.rounds import run

pytestmark = pytest.mark.gpu

METHODS = ["fedavg", "fedprox-sl", "fedavg-fixmatch", "fedavg-uda", "fedmatch", "feddure", "f-reg", "avg-c-reg"]
LOW_THRESHOLDS = {"fixmatch.threshold": 0.3, "uda.threshold": 0.3, "fedmatch.threshold": 0.3, "feddure.threshold": 0.3}
TOLERANCE = 0.02


def experiment(method: str, **changes):
    on_gpu = {"engine.device": "cuda", "engine.precision": "fp32", "engine.compile": False}
    return tiny.experiment({"method": method, "local_steps": 3, **LOW_THRESHOLDS, **on_gpu, **changes})


def model(federation) -> torch.Tensor:
    return federation.method.global_model(federation.state)[0].double().cpu()


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, start: torch.Tensor, tolerance: float = TOLERANCE
) -> None:
    moved = (expected - start).norm()
    assert moved > 0
    assert (found - expected).norm() <= tolerance * moved


def start_of(images, method: str) -> torch.Tensor:
    return model(tiny.federation(tiny.experiment({"method": method, **LOW_THRESHOLDS}), images))


@pytest.mark.parametrize("method", METHODS)
def test_captured_rounds_equal_the_cpu(images, method):
    cpu = tiny.finished(tiny.experiment({"method": method, "local_steps": 3, **LOW_THRESHOLDS}), images)
    gpu = tiny.finished(experiment(method), images)
    assert gpu.program.captures
    assert_close(model(gpu), model(cpu), start_of(images, method))


@pytest.mark.parametrize("method", ["fedavg-sl", "feddure"])
def test_compiled_rounds_equal_the_cpu(images, method):
    cpu = tiny.finished(tiny.experiment({"method": method, "local_steps": 3, **LOW_THRESHOLDS}), images)
    gpu = tiny.finished(experiment(method, **{"engine.compile": True}), images)
    assert gpu.program.captures
    assert gpu.program.network.compiled
    assert_close(model(gpu), model(cpu), start_of(images, method))


def test_concurrent_lanes_equal_one_lane(images):
    one = tiny.finished(experiment("feddure", **{"engine.lanes": 1, "clients_per_round": 4}), images)
    four = tiny.finished(experiment("feddure", **{"engine.lanes": 4, "clients_per_round": 4}), images)
    assert_close(model(four), model(one), start_of(images, "feddure"), 1e-3)


def test_federations_together_equal_each_alone(images):
    wanted = [experiment("feddure"), experiment("feddure", seed=1), experiment("fedavg-fixmatch")]
    engine = Engine(wanted[0].engine)
    together = [tiny.federation(one, images, engine) for one in wanted]
    starts = [model(federation) for federation in together]
    run(together, engine)
    for one, federation, start in zip(wanted, together, starts, strict=True):
        assert_close(model(federation), model(tiny.finished(one, images)), start, 1e-3)


def test_deterministic_runs_are_bit_identical(images):
    wanted = experiment("feddure", **{"engine.deterministic": True, "engine.precision": "bf16", "engine.lanes": 2})
    assert model(tiny.finished(wanted, images)).equal(model(tiny.finished(wanted, images)))


def test_a_network_that_cannot_be_captured_still_trains(images):
    from feddure import nn

    class Talkative(torch.nn.Module):
        """Looks at its data from the host, which a captured graph cannot."""

        def __init__(self, channels: int, classes: int):
            super().__init__()
            self.inner = nn.make("cnn", channels, classes, "batch", 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (1.0 if float(x.mean()) < 1e9 else 0.0)

    nn.register("talkative", Talkative)
    with pytest.warns(UserWarning, match="cannot be captured"):
        federation = tiny.finished(experiment("fedavg", model="talkative"), images)
    assert not federation.program.captures
    assert federation.test()["test"]["accuracy"] > 0
