"""FedDure's coupled steps on a small smooth network, many independent lanes at once.

Parameters are [lane, parameter] and images [lane, image, pixel] in float64. Every loss has one value per lane, so
the gradient of their sum is each lane's own. Both networks are perceptrons with one tanh layer: the theorems ask
for second derivatives, so F-reg, too, has tanh where FedDure has ReLU.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from feddure import rng as draws
from feddure.data import Dataset, augment

LABELLED, UNLABELLED, OTHERS = 64, 128, 300
"""Images of the client, and of the other clients whose labels made the model it received."""
POOLING = 4
HIDDEN = 16

_WARM_UP_STEPS, _WARM_UP_RATE = 100, 0.5
_POWER_ITERATIONS = 20


class Client(NamedTuple):
    """What one client holds; with a leading lane dimension once stacked."""

    labelled: Tensor
    labels: Tensor
    weak: Tensor
    strong: Tensor

    def lanes(self, index: Tensor | slice) -> "Client":
        return Client(*(tensor[index] for tensor in self))


class Start(NamedTuple):
    """A client and the parameters it begins with; C-reg begins as a copy of theta."""

    client: Client
    theta: Tensor
    w: Tensor


class Step(NamedTuple):
    """One step's results: new parameters, and the gradients the two theorems speak of."""

    phi: Tensor
    w: Tensor
    meta_gradient: Tensor  # ∇_θ L_s(φ_{t+1}(θ_t))
    c_reg_gradient: Tensor  # ∇_φ H·L at φ_t and w_{t+1}


def make_start(dataset: Dataset, seed: int) -> Start:
    """One client's images, each with one weak and one strong view, and a model trained on other clients' labels."""
    chosen = draws.sample(len(dataset.images), LABELLED + UNLABELLED + OTHERS, seed, "theory images")
    labelled, unlabelled, others = np.split(chosen, [LABELLED, LABELLED + UNLABELLED])
    normalise = augment.Normalise(dataset.mean, dataset.std, torch.float64)
    side = dataset.shape[0]

    def images(index: np.ndarray) -> Tensor:
        return torch.from_numpy(dataset.images[index])

    def decided(words: int, purpose: str) -> np.ndarray:
        return draws.bits(UNLABELLED * words, seed, purpose).reshape(UNLABELLED, words)

    weak = augment.weak_decisions(decided(augment.WEAK_BITS, "theory weak"), side)
    strong = augment.strong_decisions(decided(augment.STRONG_BITS, "theory strong"), side)
    client = Client(
        _pool(augment.plain(images(labelled), normalise)),
        torch.from_numpy(dataset.labels[labelled]),
        _pool(augment.weak(images(unlabelled), weak, normalise)),
        _pool(augment.strong(images(unlabelled), strong, normalise)),
    )
    pixels, classes = client.labelled.shape[1], len(dataset.classes)
    theta = _uniform(_layers(pixels, classes), seed, "theory theta")
    elsewhere = _pool(augment.plain(images(others), normalise))
    theta = _warm_up(theta, elsewhere, torch.from_numpy(dataset.labels[others]))
    return Start(client, theta, _uniform(_layers(classes, 1), seed, "theory w"))


def stack(starts: Sequence[Start]) -> tuple[Client, Tensor, Tensor]:
    """The clients, thetas and ws of these starts, one lane each."""
    client = Client(*(torch.stack(tensors) for tensors in zip(*(start.client for start in starts), strict=True)))
    return client, torch.stack([start.theta for start in starts]), torch.stack([start.w for start in starts])


def network(parameters: Tensor, images: Tensor) -> Tensor:
    """Logits [lane, image, class] of the tanh perceptron; theta and phi share this architecture."""
    pixels = images.shape[2]
    classes = (parameters.shape[1] - (pixels + 1) * HIDDEN) // (HIDDEN + 1)
    return _perceptron(parameters, images, classes)


def weigh(w: Tensor, probabilities: Tensor) -> Tensor:
    """F-reg: H = f_w(softmax z), a weight in (0, 1) for each image."""
    return _perceptron(w, probabilities, 1).squeeze(2).sigmoid()


def supervised(parameters: Tensor, client: Client) -> Tensor:
    """L_s: mean cross-entropy of the labelled images."""
    logits = network(parameters, client.labelled)
    return functional.cross_entropy(logits.transpose(1, 2), client.labels, reduction="none").mean(1)


def unsupervised(logits: Tensor, targets: Tensor, w: Tensor | None) -> Tensor:
    """Mean of H·L over C-reg's logits for the strong views; without F-reg where w is None."""
    logarithms = logits.log_softmax(2)
    losses = -(targets * logarithms).sum(2)
    return (losses if w is None else weigh(w, logarithms.exp()) * losses).mean(1)


def pseudo_labels(theta: Tensor, client: Client, hard: bool = False) -> Tensor:
    """Soft pseudo labels, a smooth function of theta; or the one-hot ones of Eq. 1, a piecewise constant one."""
    logits = network(theta, client.weak)
    if hard:
        return functional.one_hot(logits.argmax(2), logits.shape[2]).to(logits.dtype)
    return logits.softmax(2)


def next_phi(phi: Tensor, w: Tensor, targets: Tensor, client: Client, eta_s: Tensor) -> Tensor:
    """φ_{t+1}, the one-step map, as a differentiable function of the targets (Eq. 2) or of w (Eq. 4)."""
    return phi - eta_s * _gradient(unsupervised(network(phi, client.strong), targets, w), phi, create_graph=True)


def take_step(theta: Tensor, phi: Tensor, w: Tensor, client: Client, eta_s: Tensor, eta_w: Tensor) -> Step:
    """F-reg's step (Eqs. 4, 5), C-reg's step (Eq. 2), and the exact gradient through the latter; theta stays.

    w_{t+1} counts as a constant in φ_{t+1}(θ), as in the paper.
    """
    theta, phi, w = (tensor.detach().requires_grad_() for tensor in (theta, phi, w))
    targets = pseudo_labels(theta, client)
    virtual = next_phi(phi, w, targets.detach(), client, eta_s)
    new_w = (w - eta_w * _gradient(supervised(virtual, client), w)).detach()
    c_reg_gradient = _gradient(unsupervised(network(phi, client.strong), targets, new_w), phi, create_graph=True)
    new_phi = phi - eta_s * c_reg_gradient
    meta_gradient = _gradient(supervised(new_phi, client), theta)
    return Step(new_phi.detach(), new_w, meta_gradient, c_reg_gradient.detach())


def meta_loss(theta: Tensor, phi: Tensor, w: Tensor, client: Client, eta_s: Tensor, hard: bool = False) -> Tensor:
    """L_s(φ_{t+1}(θ)), with φ_t and w_{t+1} given."""
    targets = pseudo_labels(theta, client, hard)
    return supervised(next_phi(phi.detach().requires_grad_(), w, targets, client, eta_s), client)


def squared_norm(gradients: Tensor) -> Tensor:
    return gradients.square().sum(1)


class Curvature(NamedTuple):
    """The largest curvature, per lane, of the losses in their own parameters and through one step of C-reg."""

    losses: Tensor  # of φ ↦ L_s(φ) and φ ↦ H·L(φ)
    through_theta: Tensor  # of θ ↦ L_s(φ_{t+1}(θ))
    through_w: Tensor  # of w ↦ L_s(φ⁻(w))


def curvature(theta: Tensor, phi: Tensor, w: Tensor, client: Client, eta_s: Tensor) -> Curvature:
    """Measure the smoothness constants the theorems assume, here: the Hessians' largest absolute eigenvalues."""
    targets = pseudo_labels(theta, client).detach()
    start = phi.detach().requires_grad_()

    def weighted(variable: Tensor) -> Tensor:
        return unsupervised(network(variable, client.strong), targets, w)

    def through_w(variable: Tensor) -> Tensor:
        return supervised(next_phi(start, variable, targets, client, eta_s), client)

    of_supervised = largest_eigenvalue(lambda variable: supervised(variable, client), phi)
    return Curvature(
        torch.maximum(of_supervised, largest_eigenvalue(weighted, phi)),
        largest_eigenvalue(lambda variable: meta_loss(variable, phi, w, client, eta_s), theta),
        largest_eigenvalue(through_w, w),
    )


def largest_eigenvalue(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Absolute value of each lane's dominant Hessian eigenvalue, by power iteration from a fixed direction."""
    variable = at.detach().requires_grad_()
    slope = _gradient(loss(variable), variable, create_graph=True)
    direction = torch.linspace(-1, 1, at.shape[1], dtype=at.dtype).cos().expand_as(at)
    for _ in range(_POWER_ITERATIONS):
        direction = direction / direction.norm(dim=1, keepdim=True)
        direction = torch.autograd.grad(slope, variable, direction, retain_graph=True)[0]
    return direction.norm(dim=1)


def _gradient(losses: Tensor, variable: Tensor, create_graph: bool = False) -> Tensor:
    return torch.autograd.grad(losses.sum(), variable, create_graph=create_graph)[0]


def _pool(images: Tensor) -> Tensor:
    return functional.avg_pool2d(images, POOLING).flatten(1)


def _layers(inputs: int, outputs: int) -> list[tuple[int, int]]:
    """(number of parameters, fan-in) of both layers."""
    return [((inputs + 1) * HIDDEN, inputs), ((HIDDEN + 1) * outputs, HIDDEN)]


def _uniform(layers: list[tuple[int, int]], *key: draws.Key) -> Tensor:
    """Fresh parameters, uniform in ±1/√fan-in as PyTorch's linear layers start."""
    scale = np.concatenate([np.full(size, fan_in**-0.5) for size, fan_in in layers])
    return torch.from_numpy((draws.bits(len(scale), *key) / 2.0**64 * 2 - 1) * scale)


def _perceptron(parameters: Tensor, inputs: Tensor, outputs: int) -> Tensor:
    lanes, _, features = inputs.shape
    sizes = [features * HIDDEN, HIDDEN, HIDDEN * outputs, outputs]
    first, first_bias, second, second_bias = parameters.split(sizes, dim=1)
    inner = torch.baddbmm(first_bias.unsqueeze(1), inputs, first.reshape(lanes, features, HIDDEN))
    return torch.baddbmm(second_bias.unsqueeze(1), inner.tanh(), second.reshape(lanes, HIDDEN, outputs))


def _warm_up(theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    others = Client(images[None], labels[None], images[None], images[None])
    theta = theta[None]
    for _ in range(_WARM_UP_STEPS):
        theta = theta.detach().requires_grad_()
        theta = theta - _WARM_UP_RATE * _gradient(supervised(theta, others), theta)
    return theta.detach()[0]
