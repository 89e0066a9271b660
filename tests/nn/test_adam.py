"""Adam on a flat vector against PyTorch's own."""

import pytest
import torch

from feddure.nn.adam import Adam


def gradients(steps):
    """Gradients of very different sizes, some of them exactly zero."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-9, 3, 50, dtype=torch.float64)
    scale[::7] = 0
    return [scale * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(steps)]


def whole(gradient):
    return [(slice(0, len(gradient)), gradient)]


@pytest.mark.parametrize(
    "constants", [(5e-4, 0.9, 0.999, 1e-8), (0.1, 0.5, 0.9, 1e-3), (1e-3, 0.0, 0.99, 1e-8)], ids=str
)
def test_equal_to_torch_over_many_steps(constants):
    learning_rate, beta1, beta2, epsilon = constants
    ours = torch.linspace(-1, 1, 50, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    adam = Adam(ours, *constants)
    reference = torch.optim.Adam([theirs], lr=learning_rate, betas=(beta1, beta2), eps=epsilon)
    for gradient in gradients(300):
        adam.step(ours, whole(gradient))
        theirs.grad = gradient
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-14)


def test_after_a_reset_it_is_as_new():
    used, fresh = torch.ones(50, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    one, other = Adam(used, 1e-3, 0.9, 0.999, 1e-8), Adam(fresh, 1e-3, 0.9, 0.999, 1e-8)
    for gradient in gradients(5):
        one.step(used, whole(gradient))
    one.reset()
    used.fill_(1)
    for gradient in gradients(3):
        one.step(used, whole(gradient))
        other.step(fresh, whole(gradient))
    assert torch.equal(used, fresh)


def test_pieces_count_as_one_step():
    together, apart = torch.ones(50, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    one, other = Adam(together, 1e-3, 0.9, 0.999, 1e-8), Adam(apart, 1e-3, 0.9, 0.999, 1e-8)
    for gradient in gradients(4):
        one.step(together, whole(gradient))
        other.step(apart, [(slice(0, 20), gradient[:20]), (slice(20, 50), gradient[20:])])
    assert torch.equal(together, apart)
    assert other.count == 4


def test_what_has_no_gradient_does_not_move():
    parameters = torch.ones(10)
    adam = Adam(parameters, 1e-3, 0.9, 0.999, 1e-8)
    adam.step(parameters, [(slice(0, 4), torch.ones(4))])
    assert torch.equal(parameters[4:], torch.ones(6))
    assert (parameters[:4] < 1).all()
