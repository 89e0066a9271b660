"""Both theorems of the paper, measured where their assumptions hold, each beside a control.

Theorem 1: min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖² ≤ O(1/√T) with η_s = min(1, e/T) and η = min(1/L, c/√T).
Theorem 2: ‖∇_φ H·L‖² → 0 with η_s = min(1, k/T) and η_w = min(1/L, c/√T).
Soft pseudo labels, plain gradient descent, float64, and whole-set gradients: the expectations are exact. All
runs of all T, seeds and controls go side by side as lanes of one batch; a lane leaves when its T is reached.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from feddure import data
from feddure import rng as draws
from feddure.errors import ConfigError
from feddure.studies.theory import mathematics
from feddure.studies.theory.mathematics import Client, Start

SMALLEST = 64
"""The least T; c is chosen so that c/√T ≤ 1/L already here."""
DEFAULT_E = 16.0
"""The theorems' constants e and k: the sum of η_s over a run."""
HEADROOM = 2.0
"""L is this many times the largest curvature met by the pilot run."""

PAPER, FIXED = "e/T", "fixed"
"""Schedules of η_s: the theorems', and that of the least T at every T."""
MOVING, FROZEN_THETA, FROZEN_BOTH, EAGER = "moving", "frozen θ", "frozen θ and w", "eager F-reg"
"""Who moves beside C-reg: θ and w; only w; neither; both, with w as fast as its own curvature allows."""

RADII = (1e-6, 1e-4, 1e-2, 1.0)
DIRECTIONS = 64
_PILOT_STOPS = (0, 16, 32, 48, 64)

Progress = Callable[[int, int], None]


class Record(NamedTuple):
    """One lane at one step, all norms squared."""

    schedule: str
    arm: str
    horizon: int  # T
    seed: int
    step: int  # t
    eta_s: float
    eta: float
    eta_w: float
    meta_gradient: float  # ‖∇_θ L_s(φ_{t+1}(θ_t))‖²
    smallest_meta_gradient: float  # the least of them up to t
    c_reg_gradient: float  # ‖∇_φ H·L‖²
    unweighted_gradient: float  # ‖∇_φ L‖², without F-reg's weights
    mean_weight: float  # mean H
    labelled_loss: float  # L_s(φ_t)
    theta_moved: float  # ‖θ_t − θ_0‖ / ‖θ_0‖


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
    records: list[Record]
    perturbations: list[Perturbation]


class _Lane(NamedTuple):
    schedule: str
    arm: str
    horizon: int
    seed: int
    eta_s: float
    eta: float
    eta_w: float


def horizons(largest: int) -> list[int]:
    """The values of T: powers of two from the least to `largest`."""
    if largest < 2 * SMALLEST or largest & (largest - 1):
        raise ConfigError(
            f"--largest {largest}: expected a power of two of {2 * SMALLEST} or more, for example 1024 or 4096"
        )
    return [2**power for power in range(int(math.log2(SMALLEST)), int(math.log2(largest)) + 1)]


def measure(
    largest: int = 4096,
    seeds: int = 3,
    e: float = DEFAULT_E,
    progress: Progress = lambda done, total: None,
) -> Study:
    """Run everything; `progress` hears how many of all lane steps are done."""
    ladder = horizons(largest)
    dataset = data.load("fashion-mini")
    with _one_thread():
        starts = [mathematics.make_start(dataset, seed) for seed in range(seeds)]
        constants = pilot(starts, e)
        records, met = _run(_lanes(ladder, seeds, constants), starts, progress)
        return Study(largest, seeds, constants, met, records, perturb(starts, e))


def pilot(starts: list[Start], e: float) -> Constants:
    """Choose c for the least T: with θ and w frozen, meet the curvatures on C-reg's way, and leave headroom."""
    client, theta, w = mathematics.stack(starts)
    phi = theta
    eta_s = torch.full((len(starts), 1), min(1.0, e / SMALLEST), dtype=torch.float64)
    met = []
    for step in range(SMALLEST + 1):
        if step in _PILOT_STOPS:
            met.append(torch.stack(mathematics.curvature(theta, phi, w, client, eta_s)))
        phi = mathematics.take_step(theta, phi, w, client, eta_s, torch.zeros_like(eta_s)).phi
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
            client, still, w = mathematics.stack([start] * DIRECTIONS)
            bits = draws.bits(still.numel(), seed, "theory directions")
            noise = torch.from_numpy(bits / 2.0**64 - 0.5).reshape(still.shape)
            moved = still + radius * noise / noise.norm(dim=1, keepdim=True)
            before, after = (mathematics.pseudo_labels(theta, client, hard=True) for theta in (still, moved))
            flipped = (before != after).any(2).any(1)
            hard, soft = (
                mathematics.meta_loss(moved, still, w, client, eta_s, kind)
                - mathematics.meta_loss(still, still, w, client, eta_s, kind)
                for kind in (True, False)
            )
            flips += int(flipped.sum())
            changes = torch.stack([hard.masked_fill(flipped, 0), soft]).detach().abs().amax(1)
            largest = torch.maximum(largest, changes)
        found.append(Perturbation(radius, flips, *largest.tolist()))
    return found


def _lanes(ladder: list[int], seeds: int, constants: Constants) -> list[_Lane]:
    """All runs, those with the largest T first, so that the ones still running are always a prefix."""
    largest = ladder[-1]
    wanted = [(PAPER, arm, horizon) for horizon in ladder for arm in (MOVING, FROZEN_THETA, FROZEN_BOTH)]
    wanted += [(FIXED, arm, horizon) for horizon in ladder for arm in (MOVING, FROZEN_THETA)]
    # With nothing but C-reg moving at a fixed η_s, the longest run contains the shorter ones.
    wanted += [(FIXED, arm, largest) for arm in (FROZEN_BOTH, EAGER)]
    lanes = []
    for schedule, arm, horizon in wanted:
        root = math.sqrt(horizon)
        eta = min(1 / constants.L_theta, constants.c_theta / root)
        eta_w = min(1 / constants.L_losses, constants.c_w / root)
        if arm == EAGER:
            eta_w = min(1 / constants.L_w, constants.c_eager / root)
        lanes += [
            _Lane(
                schedule,
                arm,
                horizon,
                seed,
                min(1.0, constants.e / (horizon if schedule == PAPER else SMALLEST)),
                eta if arm in (MOVING, EAGER) else 0.0,
                0.0 if arm == FROZEN_BOTH else eta_w,
            )
            for seed in range(seeds)
        ]
    return sorted(lanes, key=lambda lane: -lane.horizon)


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


def _run(lanes: list[_Lane], starts: list[Start], progress: Progress) -> tuple[list[Record], float]:
    """Take every lane to its T; give the records, and the largest product of η and the curvature it met."""
    client, theta, w = mathematics.stack([starts[lane.seed] for lane in lanes])
    rates = torch.tensor([(lane.eta_s, lane.eta, lane.eta_w) for lane in lanes], dtype=torch.float64)
    eta_s, eta, eta_w = (rates[:, column, None] for column in range(3))
    smallest = torch.full((len(lanes),), math.inf, dtype=torch.float64)
    state = _State(client, theta, theta, theta, w, eta_s, eta, eta_w, smallest)
    largest, total, done = lanes[0].horizon, sum(lane.horizon + 1 for lane in lanes), 0
    records: list[Record] = []
    met = 0.0
    for step in range(largest + 1):
        running = sum(lane.horizon >= step for lane in lanes)
        if running < len(state.theta):
            state.keep(running)
        taken = mathematics.take_step(state.theta, state.phi, state.w, state.client, state.eta_s, state.eta_w)
        state.smallest = torch.minimum(state.smallest, mathematics.squared_norm(taken.meta_gradient))
        if step == 0 or step & (step - 1) == 0:
            watched = [
                number for number, lane in enumerate(lanes[:running]) if lane.horizon in (step, largest) or step == 0
            ]
            records += _records(lanes, state, taken, watched, step)
            met = max(met, _step_times_curvature(state, taken.w))
        state.theta = state.theta - state.eta * taken.meta_gradient
        state.phi, state.w = taken.phi, taken.w
        done += running
        progress(done, total)
    return records, met


def _records(lanes: list[_Lane], state: _State, taken: mathematics.Step, watched: list[int], step: int) -> list[Record]:
    index = torch.tensor(watched)
    client, phi = state.client.lanes(index), state.phi[index].detach().requires_grad_()
    logits = mathematics.network(phi, client.strong)
    unweighted = mathematics.unsupervised(logits, mathematics.pseudo_labels(state.theta[index], client), None)
    moved = (state.theta - state.first_theta).norm(dim=1) / state.first_theta.norm(dim=1)
    columns = (
        mathematics.squared_norm(taken.meta_gradient)[index],
        state.smallest[index],
        mathematics.squared_norm(taken.c_reg_gradient)[index],
        mathematics.squared_norm(torch.autograd.grad(unweighted.sum(), phi)[0]),
        mathematics.weigh(taken.w[index], logits.softmax(2)).mean(1),
        mathematics.supervised(phi, client),
        moved[index],
    )
    values = torch.stack([column.detach() for column in columns], dim=1).tolist()
    return [
        Record(*lanes[number][:4], step, *lanes[number][4:], *row) for number, row in zip(watched, values, strict=True)
    ]


def _step_times_curvature(state: _State, w: Tensor) -> float:
    """The largest product of η and the curvature of θ ↦ L_s(φ_{t+1}(θ)), to check that L was large enough."""
    index = (state.eta[:, 0] > 0).nonzero()[:, 0]
    client, phi, w, eta_s = state.client.lanes(index), state.phi[index], w[index], state.eta_s[index]
    met = mathematics.largest_eigenvalue(
        lambda theta: mathematics.meta_loss(theta, phi, w, client, eta_s), state.theta[index]
    )
    return (state.eta[index, 0] * met).max().item()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain little from threads, and threads that wait for each other lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
