"""Both theorems of the paper, measured where their assumptions hold, each beside a control.

Theorem 1: min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖² ≤ O(1/√T) with η_s = min(1, e/T) and η = min(1/L, c/√T).
Theorem 2: ‖∇_φ H·L‖² → 0 with η_s = min(1, k/T) and η_w = min(1/L, c/√T).

Soft pseudo labels, plain gradient descent, float64, and whole-set gradients: the expectations are exact. Both networks
are perceptrons with one tanh layer: the theorems ask for second derivatives, so F-reg, too, has tanh where FedDure has
ReLU. All runs of all T, seeds and controls go side by side as lanes of one batch: parameters are [lane, parameter],
images [lane, image, pixel]. Every loss has one value per lane, so the gradient of their sum is each lane's own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from feddure import data, rng
from feddure.data import Dataset, augment
from feddure.errors import ConfigError

LABELLED, UNLABELLED, OTHERS = 64, 128, 300
"""Images of the client, and of the other clients whose labels made the model it received."""
POOLING = 4
HIDDEN = 16
_WARM_UP_STEPS, _WARM_UP_RATE = 100, 0.5

SMALLEST = 64
"""The least T; c is chosen so that c/√T ≤ 1/L already here."""
DEFAULT_E = 16.0
"""The theorems' constants e and k: the sum of η_s over a run."""
HEADROOM = 2.0
"""L is this many times the largest curvature met by the pilot run."""
_PILOT_STOPS = (0, 16, 32, 48, 64)
_POWER_ITERATIONS = 20

PAPER, FIXED = "e/T", "fixed"
"""Schedules of η_s: the theorems', and that of the least T at every T."""
MOVING, FROZEN_THETA, FROZEN_BOTH, EAGER = "moving", "frozen θ", "frozen θ and w", "eager F-reg"
"""Who moves beside C-reg: θ and w; only w; neither; both, with w as fast as its own curvature allows."""

RADII = (1e-6, 1e-4, 1e-2, 1.0)
DIRECTIONS = 64

Progress = Callable[[int, int], None]


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


COLUMNS = (
    "schedule", "arm", "horizon", "seed", "step", "eta_s", "eta", "eta_w", "meta_gradient", "smallest_meta_gradient",
    "c_reg_gradient", "unweighted_gradient", "mean_weight", "labelled_loss", "theta_moved",
)  # fmt: skip
"""Of the records, a row for a run at a step: `horizon` is T and `step` t. All norms are squared: `meta_gradient` is
‖∇_θ L_s(φ_{t+1}(θ_t))‖² and `smallest_meta_gradient` the least of them up to t; `c_reg_gradient` is ‖∇_φ H·L‖² and
`unweighted_gradient` ‖∇_φ L‖². `mean_weight` is of H, `labelled_loss` L_s(φ_t), `theta_moved` ‖θ_t − θ_0‖ / ‖θ_0‖."""


class Constants(NamedTuple):
    """The step sizes' constants, from the curvatures a pilot run met."""

    e: float
    L_theta: float  # of θ ↦ L_s(φ_{t+1}(θ)), Theorem 1's L
    c_theta: float
    L_losses: float  # of L_s(φ) and H·L(φ), Theorem 2's L
    c_w: float
    L_w: float  # of w ↦ L_s(φ⁻(w)), for the eager F-reg
    c_eager: float


class Perturbation(NamedTuple):
    """What moving θ by `radius` in random directions does to L_s(φ_{t+1}(θ)), largest over directions and seeds."""

    radius: float
    flips: int  # directions in which some hard pseudo label changes
    hard: float  # the change with hard labels where none of them flips
    soft: float  # the change with soft labels


@dataclass(frozen=True)
class Study:
    """All that was measured."""

    largest: int
    seeds: int
    constants: Constants
    step_times_curvature: float  # the largest η·L met where θ moves; the theorem asks for at most 1
    records: pd.DataFrame  # with `COLUMNS`
    perturbations: list[Perturbation]


def horizons(largest: int) -> list[int]:
    """The values of T: powers of two from the least to `largest`."""
    if largest < 2 * SMALLEST or largest & (largest - 1):
        raise ConfigError(
            f"--largest {largest}: expected a power of two of {2 * SMALLEST} or more, for example 1024 or 4096"
        )
    return [2**power for power in range(int(math.log2(SMALLEST)), int(math.log2(largest)) + 1)]


def measure(
    largest: int = 4096, seeds: int = 3, e: float = DEFAULT_E, progress: Progress = lambda done, total: None
) -> Study:
    """Run everything; `progress` hears how many of all lane steps are done."""
    ladder = horizons(largest)
    dataset = data.load("fashion-mini")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain little from threads, and waiting for each other costs much
    try:
        starts = [make_start(dataset, seed) for seed in range(seeds)]
        constants = pilot(starts, e)
        records, met = _run(_lanes(ladder, seeds, constants), starts, progress)
        return Study(largest, seeds, constants, met, records, perturb(starts, e))
    finally:
        torch.set_num_threads(threads)


def pilot(starts: list[Start], e: float) -> Constants:
    """Choose c for the least T: with θ and w frozen, meet the curvatures on C-reg's way, and leave headroom."""
    client, theta, w = stack(starts)
    phi = theta
    eta_s = torch.full((len(starts), 1), min(1.0, e / SMALLEST), dtype=torch.float64)
    met = []
    for step in range(SMALLEST + 1):
        if step in _PILOT_STOPS:
            met.append(curvature(theta, phi, w, client, eta_s))
        phi = take_step(theta, phi, w, client, eta_s, torch.zeros_like(eta_s)).phi
    losses, through_theta, through_w = (HEADROOM * torch.stack(met).amax((0, 2))).tolist()
    root = math.sqrt(SMALLEST)
    return Constants(e, through_theta, root / through_theta, losses, root / losses, through_w, root / through_w)


def perturb(starts: list[Start], e: float) -> list[Perturbation]:
    """Move θ a little: with hard labels L_s(φ_{t+1}(θ)) does not change by a single bit until a label flips."""
    eta_s = torch.full((DIRECTIONS, 1), min(1.0, e / SMALLEST), dtype=torch.float64)
    found = []
    for radius in RADII:
        flips, largest = 0, torch.zeros(2, dtype=torch.float64)
        for seed, start in enumerate(starts):
            client, still, w = stack([start] * DIRECTIONS)
            bits = rng.bits(still.numel(), seed, "theory directions")
            noise = torch.from_numpy(bits / 2.0**64 - 0.5).reshape(still.shape)
            moved = still + radius * noise / noise.norm(dim=1, keepdim=True)
            before, after = (pseudo_labels(theta, client, hard=True) for theta in (still, moved))
            flipped = (before != after).any(2).any(1)
            hard, soft = (
                meta_loss(moved, still, w, client, eta_s, kind) - meta_loss(still, still, w, client, eta_s, kind)
                for kind in (True, False)
            )
            flips += int(flipped.sum())
            changes = torch.stack([hard.masked_fill(flipped, 0), soft]).detach().abs().amax(1)
            largest = torch.maximum(largest, changes)
        found.append(Perturbation(radius, flips, *largest.tolist()))
    return found


def _lanes(ladder: list[int], seeds: int, constants: Constants) -> pd.DataFrame:
    """All runs, those with the largest T first, so that the ones still running are always a prefix."""
    wanted = [(PAPER, arm, horizon) for horizon in ladder for arm in (MOVING, FROZEN_THETA, FROZEN_BOTH)]
    wanted += [(FIXED, arm, horizon) for horizon in ladder for arm in (MOVING, FROZEN_THETA)]
    # With nothing but C-reg moving at a fixed η_s, the longest run contains the shorter ones.
    wanted += [(FIXED, arm, ladder[-1]) for arm in (FROZEN_BOTH, EAGER)]
    lanes = []
    for schedule, arm, horizon in wanted:
        root = math.sqrt(horizon)
        eta_s = min(1.0, constants.e / (horizon if schedule == PAPER else SMALLEST))
        eta = min(1 / constants.L_theta, constants.c_theta / root) if arm in (MOVING, EAGER) else 0.0
        eta_w = min(1 / constants.L_losses, constants.c_w / root)
        if arm == EAGER:
            eta_w = min(1 / constants.L_w, constants.c_eager / root)
        elif arm == FROZEN_BOTH:
            eta_w = 0.0
        lanes += [(schedule, arm, horizon, seed, eta_s, eta, eta_w) for seed in range(seeds)]
    columns = [name for name in COLUMNS[:8] if name != "step"]
    return pd.DataFrame(lanes, columns=columns).sort_values("horizon", ascending=False, kind="stable")


@dataclass
class _State:
    """The lanes that still run."""

    client: Client
    first_theta: Tensor
    theta: Tensor
    phi: Tensor
    w: Tensor
    eta_s: Tensor
    eta: Tensor
    eta_w: Tensor
    smallest: Tensor

    def keep(self, count: int) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value.lanes(slice(count)) if isinstance(value, Client) else value[:count])


def _run(lanes: pd.DataFrame, starts: list[Start], progress: Progress) -> tuple[pd.DataFrame, float]:
    """Take every lane to its T; give the records, and the largest product of η and the curvature it met."""
    client, theta, w = stack([starts[seed] for seed in lanes.seed])
    eta_s, eta, eta_w = (torch.tensor(lanes[[name]].to_numpy()) for name in ("eta_s", "eta", "eta_w"))
    smallest = torch.full((len(lanes),), math.inf, dtype=torch.float64)
    state = _State(client, theta, theta, theta, w, eta_s, eta, eta_w, smallest)
    horizons = lanes.horizon.to_numpy()
    largest, total, done = horizons[0], int(horizons.sum()) + len(lanes), 0
    records, met = [], 0.0
    for step in range(largest + 1):
        running = int((horizons >= step).sum())
        if running < len(state.theta):
            state.keep(running)
        taken = take_step(state.theta, state.phi, state.w, state.client, state.eta_s, state.eta_w)
        state.smallest = torch.minimum(state.smallest, _squared_norm(taken.meta_gradient))
        if step & (step - 1) == 0:  # 0 and the powers of two
            watched = (horizons == step) | (horizons == largest) | (step == 0)
            index = torch.from_numpy(watched.nonzero()[0])
            records.append(lanes[watched].assign(step=step, **_quantities(state, taken, index)))
            met = max(met, _step_times_curvature(state, taken.w))
        state.theta = state.theta - state.eta * taken.meta_gradient
        state.phi, state.w = taken.phi, taken.w
        done += running
        progress(done, total)
    return pd.concat(records, ignore_index=True)[list(COLUMNS)], met


def _quantities(state: _State, taken: Step, index: Tensor) -> dict[str, np.ndarray]:
    """What a record says of these lanes at a step."""
    client, phi = state.client.lanes(index), state.phi[index].detach().requires_grad_()
    logits = network(phi, client.strong)
    unweighted = unsupervised(logits, pseudo_labels(state.theta[index], client), None)
    moved = (state.theta - state.first_theta).norm(dim=1) / state.first_theta.norm(dim=1)
    found = {
        "meta_gradient": _squared_norm(taken.meta_gradient)[index],
        "smallest_meta_gradient": state.smallest[index],
        "c_reg_gradient": _squared_norm(taken.c_reg_gradient)[index],
        "unweighted_gradient": _squared_norm(_gradient(unweighted, phi)),
        "mean_weight": weigh(taken.w[index], logits.softmax(2)).mean(1),
        "labelled_loss": supervised(phi, client),
        "theta_moved": moved[index],
    }
    return {name: values.detach().numpy() for name, values in found.items()}


def _step_times_curvature(state: _State, w: Tensor) -> float:
    """The largest product of η and the curvature of θ ↦ L_s(φ_{t+1}(θ)), to check that L was large enough."""
    index = (state.eta[:, 0] > 0).nonzero()[:, 0]
    client, phi, w, eta_s = state.client.lanes(index), state.phi[index], w[index], state.eta_s[index]
    met = largest_eigenvalue(lambda theta: meta_loss(theta, phi, w, client, eta_s), state.theta[index])
    return (state.eta[index, 0] * met).max().item()


# FedDure's coupled steps.


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


def next_phi(phi: Tensor, w: Tensor, targets: Tensor, client: Client, eta_s: Tensor) -> Tensor:
    """φ_{t+1}, the one-step map, as a differentiable function of the targets (Eq. 2) or of w (Eq. 4)."""
    return phi - eta_s * _gradient(unsupervised(network(phi, client.strong), targets, w), phi, create_graph=True)


def meta_loss(theta: Tensor, phi: Tensor, w: Tensor, client: Client, eta_s: Tensor, hard: bool = False) -> Tensor:
    """L_s(φ_{t+1}(θ)), with φ_t and w_{t+1} given."""
    targets = pseudo_labels(theta, client, hard)
    return supervised(next_phi(phi.detach().requires_grad_(), w, targets, client, eta_s), client)


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


def network(parameters: Tensor, inputs: Tensor) -> Tensor:
    """Outputs [lane, image, output] of the tanh perceptron, as many as these parameters are for."""
    lanes, _, features = inputs.shape
    outputs = (parameters.shape[1] - (features + 1) * HIDDEN) // (HIDDEN + 1)
    sizes = [features * HIDDEN, HIDDEN, HIDDEN * outputs, outputs]
    first, first_bias, second, second_bias = parameters.split(sizes, dim=1)
    inner = torch.baddbmm(first_bias.unsqueeze(1), inputs, first.reshape(lanes, features, HIDDEN))
    return torch.baddbmm(second_bias.unsqueeze(1), inner.tanh(), second.reshape(lanes, HIDDEN, outputs))


def weigh(w: Tensor, probabilities: Tensor) -> Tensor:
    """F-reg: H = f_w(softmax z), a weight in (0, 1) for each image."""
    return network(w, probabilities).squeeze(2).sigmoid()


def curvature(theta: Tensor, phi: Tensor, w: Tensor, client: Client, eta_s: Tensor) -> Tensor:
    """The smoothness constants that the theorems assume: largest absolute eigenvalues of Hessians, [3, lane].

    Of the losses L_s(φ) and H·L(φ), of θ ↦ L_s(φ_{t+1}(θ)), and of w ↦ L_s(φ⁻(w)).
    """
    targets = pseudo_labels(theta, client).detach()
    start = phi.detach().requires_grad_()

    def weighted(variable: Tensor) -> Tensor:
        return unsupervised(network(variable, client.strong), targets, w)

    def through_w(variable: Tensor) -> Tensor:
        return supervised(next_phi(start, variable, targets, client, eta_s), client)

    of_supervised = largest_eigenvalue(lambda variable: supervised(variable, client), phi)
    losses = torch.maximum(of_supervised, largest_eigenvalue(weighted, phi))
    through_theta = largest_eigenvalue(lambda variable: meta_loss(variable, phi, w, client, eta_s), theta)
    return torch.stack([losses, through_theta, largest_eigenvalue(through_w, w)])


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


def _squared_norm(gradients: Tensor) -> Tensor:
    return gradients.square().sum(1)


# Where a run starts.


def make_start(dataset: Dataset, seed: int) -> Start:
    """One client's images, each with one weak and one strong view, and a model trained on other clients' labels."""
    chosen = rng.sample(len(dataset.images), LABELLED + UNLABELLED + OTHERS, seed, "theory images")
    labelled, unlabelled, others = np.split(chosen, [LABELLED, LABELLED + UNLABELLED])
    normalise = augment.Normalise(dataset.mean, dataset.std, torch.float64)
    side = dataset.shape[0]

    def images(index: np.ndarray) -> Tensor:
        return torch.from_numpy(dataset.images[index])

    def decided(words: int, purpose: str) -> np.ndarray:
        return rng.bits(UNLABELLED * words, seed, purpose).reshape(UNLABELLED, words)

    weak = augment.weak_decisions(decided(augment.WEAK_BITS, "theory weak"), side)
    strong = augment.strong_decisions(decided(augment.STRONG_BITS, "theory strong"), side)
    client = Client(
        _pool(augment.plain(images(labelled), normalise)),
        torch.from_numpy(dataset.labels[labelled]),
        _pool(augment.weak(images(unlabelled), weak, normalise)),
        _pool(augment.strong(images(unlabelled), strong, normalise)),
    )
    pixels, classes = client.labelled.shape[1], len(dataset.classes)
    theta = _uniform(pixels, classes, seed, "theory theta")
    elsewhere = _pool(augment.plain(images(others), normalise))
    theta = _warm_up(theta, elsewhere, torch.from_numpy(dataset.labels[others]))
    return Start(client, theta, _uniform(classes, 1, seed, "theory w"))


def stack(starts: Sequence[Start]) -> Start:
    """These starts, one lane each."""
    clients, thetas, ws = zip(*starts, strict=True)
    return Start(Client(*map(torch.stack, zip(*clients, strict=True))), torch.stack(thetas), torch.stack(ws))


def _pool(images: Tensor) -> Tensor:
    return functional.avg_pool2d(images, POOLING).flatten(1)


def _uniform(inputs: int, outputs: int, *key: rng.Key) -> Tensor:
    """A fresh perceptron, uniform in ±1/√fan-in as PyTorch's linear layers start."""
    layers = [((inputs + 1) * HIDDEN, inputs), ((HIDDEN + 1) * outputs, HIDDEN)]  # parameters, fan-in
    scale = np.concatenate([np.full(size, fan_in**-0.5) for size, fan_in in layers])
    return torch.from_numpy((rng.bits(len(scale), *key) / 2.0**64 * 2 - 1) * scale)


def _warm_up(theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    others = Client(images[None], labels[None], images[None], images[None])
    theta = theta[None]
    for _ in range(_WARM_UP_STEPS):
        theta = theta.detach().requires_grad_()
        theta = theta - _WARM_UP_RATE * _gradient(supervised(theta, others), theta)
    return theta.detach()[0]
