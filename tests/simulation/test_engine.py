"""bf16 on a CPU: what it computes, and CPUs without it."""

import gc

import pytest
import torch

import tiny
from feddure.config import EngineOptions
from feddure.environment import computes_bf16
from feddure.errors import ConfigError
from feddure.simulation import compiler, engine
from feddure.simulation.engine import Engine

SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.05, "rounds": 1}


@pytest.mark.skipif(not computes_bf16(), reason="needs a CPU with AVX-512 BF16")
@pytest.mark.parametrize("method", ["fedavg", "fedtutor", "fedavg-fixmatch", "feddure", "sage", "proxyfl"])
def test_bf16_on_a_cpu_moves_as_double_precision_does(images, method):
    changes = SGD | {"method": method}
    start = tiny.federation(tiny.experiment(changes), images).server.state["theta"]
    exact = tiny.finished(tiny.experiment(changes), images).server.state["theta"]
    found = tiny.finished(tiny.experiment(changes | {"engine.precision": "bf16"}), images).server.state["theta"]
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found - start, exact - start, dim=0) > 0.9
    assert not torch.equal(found, exact.float())


def test_bf16_is_refused_where_a_cpu_only_imitates_it(monkeypatch):
    monkeypatch.setattr(engine, "computes_bf16", lambda: False)
    with pytest.raises(ConfigError, match="bf16 was given, but this CPU has no AVX-512 BF16"):
        Engine(EngineOptions(device="cpu", precision="bf16"))
    assert Engine(EngineOptions(device="cpu")).precision == "fp32"


def test_a_compiler_that_cannot_be_imported_is_told_of_where_it_is_needed(monkeypatch):
    def broken(name):
        raise ImportError("cannot import name 'AttrsDescriptor' from 'triton'")

    monkeypatch.setattr(compiler, "import_module", broken)
    monkeypatch.delattr("torch._inductor.async_compile.maybe_warm_pool")
    compiler._import_compiler(with_workers=True)
    assert gc.isenabled()
