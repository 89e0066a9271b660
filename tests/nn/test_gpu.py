"""Networks on a GPU in single precision, eager and compiled, against float64 on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from feddure import nn as networks
from feddure.config import OptimizerOptions
from feddure.nn import optimizers
from feddure.nn.network import Network

pytestmark = pytest.mark.gpu

CASES = [("cnn", "batch"), ("cnn", "group"), ("resnet9-slim", "batch"), ("resnet9-slim", "group")]


@pytest.fixture(autouse=True)
def _full_single_precision():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def results(name, norm, device, precision, compiled):
    """Logits, statistics, gradient and tangent of one network, in double precision on the CPU."""
    module = networks.make(name, 3, 4, norm, seed=1)
    path, last = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)][-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        heads = {"space": torch.nn.Linear(last.in_features, 5)}
    network = Network(module, torch.device(device), precision, compiled, path, heads)
    theta, statistics = network.take(module, heads)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64).to(device, network.compute)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(8, device=device) % 4
    weights = network.weights(theta)
    trained = network.forward(weights, statistics, images)
    gradient = torch.cat([values for _, values in network.gradient(F.cross_entropy(trained, labels), weights)])
    direction = [
        torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(device, leaf.dtype)
        for leaf in weights.leaves
    ]
    probed, derivative = network.tangent(network.weights(theta), direction, images)
    found = {
        "forward": trained,
        "features": network.features(weights, statistics.clone(), images)[1],
        "head": network.head("space", weights, network.rows(weights.named).to(network.master)),
        "statistics": statistics,
        "gradient": gradient,
        "probe": network.probe(network.weights(theta), images),
        "tangent's logits": probed,
        "tangent": derivative,
        "evaluate": network.evaluate(theta, statistics, images),
        "evaluator": network.evaluator(theta, statistics)(images),
    }
    return {key: value.detach().cpu().double() for key, value in found.items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_every_way_to_run_a_network(name, norm, compiled):
    found = results(name, norm, "cuda", "fp32", compiled)
    for key, expected in results(name, norm, "cpu", "fp64", False).items():
        if expected.numel():
            assert (found[key] - expected).norm() <= 1e-3 * expected.norm(), key


def test_compiled_adam_equals_torchs():
    ours = torch.linspace(-1, 1, 5000, device="cuda")
    theirs = torch.nn.Parameter(ours.clone())
    adam = optimizers.make(OptimizerOptions(), ours, torch.compile)
    reference = torch.optim.Adam([theirs], lr=5e-4)
    generator = torch.Generator(device="cuda").manual_seed(3)
    for _ in range(50):
        gradient = torch.randn(5000, generator=generator, device="cuda")
        adam.step(ours, [(slice(0, 2000), gradient[:2000]), (slice(2000, 5000), gradient[2000:])])
        theirs.grad = gradient
        reference.step()
    # A hundredth of one step of 5e-4.
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=5e-6)
