"""Clients' optimisers on a flat vector against PyTorch's own."""

import math

import pytest
import torch

from feddure.config import OptimizerOptions
from feddure.nn import optimizers


def gradients(steps, size=50, dtype=torch.float64):
    """Gradients of very different sizes, some of them exactly zero."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-9, 3, size, dtype=dtype)
    scale[::7] = 0
    return [scale * torch.randn(size, generator=generator, dtype=dtype) for _ in range(steps)]


def whole(gradient):
    return [(slice(0, len(gradient)), gradient)]


def pytorchs(options, parameters):
    common = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if options.name == "adam":
        return torch.optim.Adam(parameters, betas=(options.beta1, options.beta2), eps=options.epsilon, **common)
    return torch.optim.SGD(parameters, momentum=options.momentum, nesterov=options.nesterov, **common)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3},
        {"learning_rate": 1e-3, "beta1": 0.0, "beta2": 0.99},
        {"weight_decay": 0.1},
        {"clip_norm": 0.5},
        {"name": "sgd", "learning_rate": 0.1},
        {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9, "nesterov": True, "clip_norm": 2.0},
    ],
    ids=str,
)
def test_equal_to_torch_over_many_steps(fields):
    options = OptimizerOptions(**fields)
    ours = torch.linspace(-1, 1, 50, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer, reference = optimizers.make(options, ours), pytorchs(options, [theirs])
    for gradient in gradients(300):
        optimizer.step(ours, [(slice(0, 20), gradient[:20]), (slice(20, 50), gradient[20:])])
        theirs.grad = gradient.clone()
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([theirs], options.clip_norm)
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-11, atol=1e-13)


def test_close_to_torch_in_single_precision():
    ours = torch.linspace(-1, 1, 50)
    theirs = torch.nn.Parameter(ours.clone())
    adam, reference = optimizers.make(OptimizerOptions(), ours), torch.optim.Adam([theirs], lr=5e-4)
    for gradient in gradients(100, dtype=torch.float32):
        adam.step(ours, whole(gradient))
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=5e-6)  # a hundredth of one step of 5e-4


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_after_a_reset_it_is_as_new(name):
    options = OptimizerOptions(name=name, momentum=0.9)
    used, fresh = torch.ones(50, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    one, other = optimizers.make(options, used), optimizers.make(options, fresh)
    for gradient in gradients(5):
        one.step(used, whole(gradient))
    one.reset()
    used.fill_(1)
    for gradient in gradients(3):
        one.step(used, whole(gradient))
        other.step(fresh, whole(gradient))
    assert torch.equal(used, fresh)


def test_what_has_no_gradient_does_not_move():
    parameters = torch.ones(10)
    optimizers.make(OptimizerOptions(), parameters).step(parameters, [(slice(0, 4), torch.ones(4))])
    assert torch.equal(parameters[4:], torch.ones(6))
    assert (parameters[:4] < 1).all()


def test_the_rate_is_a_tensor_that_steps_follow():
    parameters = torch.ones(4, dtype=torch.float64)
    sgd = optimizers.make(OptimizerOptions(name="sgd", learning_rate=1.0), parameters)
    sgd.rate.fill_(0.25)
    sgd.step(parameters, whole(torch.ones(4, dtype=torch.float64)))
    assert torch.equal(parameters, torch.full((4,), 0.75, dtype=torch.float64))


def test_schedules_over_rounds():
    def rates(**fields):
        options = OptimizerOptions(learning_rate=1.0, **fields)
        return [optimizers.scheduled_rate(options, number, 10) for number in range(1, 11)]

    assert rates() == [1.0] * 10
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1.0
    assert cosine[5] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
    assert 0 < cosine[-1] == pytest.approx((1 + math.cos(0.9 * math.pi)) / 2)
    assert rates(warm_up=3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates(schedule="cosine", warm_up=2)[2] == 1.0
