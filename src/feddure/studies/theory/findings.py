"""What the measured numbers say about the two theorems: slopes, each beside a control's, and verdicts in words.

Every verdict follows from the fitted slopes and their errors by the rules below; none is written in advance.
"""

import math
from collections.abc import Callable
from statistics import fmean, geometric_mean
from typing import Literal, NamedTuple

import numpy as np

from feddure.studies.theory import measure as theory
from feddure.studies.theory.measure import EAGER, FIXED, FROZEN_BOTH, FROZEN_THETA, MOVING, PAPER, Record, Study

RATE = -0.5
"""The exponent of Theorem 1's bound."""
LEVEL = 0.1
"""Slopes nearer to zero than this, or than two of their errors, count as level."""

Value = Callable[[Record], float]
Pace = Literal["fast", "about", "slow", "level", "grows"]

_SPOKEN: dict[Pace, str] = {
    "fast": "falls at least as fast as 1/√{}",
    "about": "falls about as fast as 1/√{}",
    "slow": "falls, but more slowly than 1/√{}",
    "level": "stays level",
    "grows": "grows",
}
_QUICK: tuple[Pace, Pace] = ("fast", "about")


class Series(NamedTuple):
    """A quantity against T or t: one row of values per seed."""

    x: np.ndarray
    values: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Geometric mean over seeds."""
        return np.exp(np.log(self.values).mean(axis=0))


class Fit(NamedTuple):
    """The exponent of a power law, and its standard error where there are enough points."""

    slope: float
    error: float | None


class Finding(NamedTuple):
    """One measured quantity beside its control."""

    theorem: int
    quantity: str
    against: str  # T or t
    first: float
    last: float
    fit: Fit
    control: str
    control_fit: Fit
    verdict: str


def fit(series: Series) -> Fit:
    """Least squares of log value on log x: one slope for all seeds, an intercept for each."""
    x = np.log(series.x) - np.log(series.x).mean()
    y = np.log(series.values)
    y = y - y.mean(axis=1, keepdims=True)
    weight = len(y) * (x @ x)
    slope = float((y @ x).sum() / weight)
    freedom = y.size - len(y) - 1
    if freedom < 1:
        return Fit(slope, None)
    return Fit(slope, float(math.sqrt(((y - slope * x) ** 2).sum() / freedom / weight)))


def across(study: Study, schedule: str, arm: str, value: Value) -> Series:
    """A quantity at the end of every run, against T."""
    return _series(
        study,
        [r for r in study.records if (r.schedule, r.arm) == (schedule, arm) and r.step == r.horizon],
        value,
        lambda record: record.horizon,
    )


def along(study: Study, arm: str, value: Value, least: int = theory.SMALLEST) -> Series:
    """A quantity along the longest run at a fixed η_s, against t."""
    chosen = [r for r in study.records if (r.schedule, r.arm, r.horizon) == (FIXED, arm, study.largest)]
    return _series(study, [r for r in chosen if r.step >= least], value, lambda record: record.step)


def at_start(study: Study, value: Value) -> float:
    """A quantity at t = 0, where all runs of a seed are equal."""
    return geometric_mean(value(r) for r in study.records if _in_longest(study, r, MOVING) and r.step == 0)


def smallest(record: Record) -> float:
    """Theorem 1's left side: min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖²."""
    return record.smallest_meta_gradient


def smallest_scaled(record: Record) -> float:
    """The same over η_s², the factor the gradient carries whatever θ does."""
    return record.smallest_meta_gradient / record.eta_s**2


def c_reg(record: Record) -> float:
    """Theorem 2's left side: ‖∇_φ H·L‖²."""
    return record.c_reg_gradient


def unweighted(record: Record) -> float:
    """‖∇_φ L‖², C-reg's gradient without F-reg's weights."""
    return record.unweighted_gradient


def moved(record: Record) -> float:
    """How far θ is from its start, relative to it."""
    return record.theta_moved


def findings(study: Study) -> list[Finding]:
    """The table: both theorems as written, then what is left without the trivial part."""
    gradient, frozen, both = "min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖²", "θ frozen", "θ and w frozen"

    def theorem_1(quantity: str, schedule: str, value: Value) -> Finding:
        measured = across(study, schedule, MOVING, value)
        control = across(study, schedule, FROZEN_THETA, value)
        verdict = f"{bound_verdict(fit(measured), fit(control))} {_effect(study, measured, control)}"
        return _finding(1, quantity, "T", measured, frozen, control, verdict)

    way, way_fixed = (across(study, schedule, MOVING, moved) for schedule in (PAPER, FIXED))
    ends = across(study, PAPER, MOVING, c_reg)
    ends_control = across(study, PAPER, FROZEN_BOTH, c_reg)
    left = float(ends.mean[-1] / at_start(study, c_reg))
    run, run_control = along(study, MOVING, c_reg), along(study, FROZEN_BOTH, c_reg)
    left_fixed = float(run.mean[-1] / at_start(study, c_reg))
    eager, eager_unweighted = along(study, EAGER, c_reg), along(study, EAGER, unweighted)
    return [
        theorem_1(f"{gradient}, η_s = e/T: as written", PAPER, smallest),
        theorem_1(f"{gradient} / η_s², η_s = e/T", PAPER, smallest_scaled),
        theorem_1(f"{gradient}, η_s fixed", FIXED, smallest),
        _finding(
            1,
            "‖θ_T − θ_0‖ / ‖θ_0‖, η_s = e/T",
            "T",
            way,
            "η_s fixed",
            way_fixed,
            way_verdict(fit(way), fit(way_fixed)),
        ),
        _finding(
            2,
            "‖∇_φ H·L‖² at t = T, η_s = k/T: as written",
            "T",
            ends,
            both,
            ends_control,
            f"{limit_verdict(fit(ends), fit(ends_control), left, 'T')} {_beside(study, ends, ends_control)}",
        ),
        _finding(
            2,
            "‖∇_φ H·L‖² along t, η_s fixed",
            "t",
            run,
            both,
            run_control,
            limit_verdict(fit(run), fit(run_control), left_fixed, "t"),
        ),
        _finding(
            2,
            "‖∇_φ H·L‖² along t, η_s fixed, F-reg eager",
            "t",
            eager,
            "‖∇_φ L‖² there",
            eager_unweighted,
            weights_verdict(fit(eager), fit(eager_unweighted)),
        ),
    ]


def notes(study: Study) -> list[str]:
    """What else the numbers show, in sentences that follow from them."""
    calm = [p for p in study.perturbations if p.flips == 0]
    largest_hard = max(p.hard for p in study.perturbations)
    least = study.perturbations[0]
    hard = (
        f"Hard pseudo labels: moving θ in {theory.DIRECTIONS * study.seeds} random directions changes "
        f"L_s(φ_{{t+1}}(θ)) by {'exactly 0' if largest_hard == 0 else f'up to {largest_hard:.1e}'} wherever no label "
        f"flips"
        + (f" (up to a distance of {calm[-1].radius:g} none does)" if calm else "")
        + f"; soft ones change it by up to {least.soft:.1e} at a distance of {least.radius:g}. "
        + (
            "So ∂φ/∂θ is zero almost everywhere under Eq. 1 as written, and Theorem 1 holds there without content."
            if largest_hard == 0
            else "So ∂φ/∂θ is not zero here, against expectation."
        )
    )
    product = study.step_times_curvature
    condition = (
        f"Step sizes: e = k = {study.constants.e:g}; L = {study.constants.L_theta:.3g} for θ and "
        f"{study.constants.L_losses:.3g} for the losses; c = {study.constants.c_theta:.3g} for η and "
        f"{study.constants.c_w:.3g} for η_w. The largest η times curvature met is {product:.2f}: the theorem's "
        f"condition (at most 1) {'held' if product <= 1 else 'was broken'}."
    )

    def mean(value: Value, arm: str, step: int) -> float:
        return fmean(value(r) for r in study.records if _in_longest(study, r, arm) and r.step == step)

    labelled = [mean(lambda record: record.labelled_loss, MOVING, step) for step in (0, study.largest)]
    loss = (
        f"Labelled loss of C-reg along the longest run at a fixed η_s: {labelled[0]:.2f} at t = 0, "
        f"{labelled[1]:.2f} at t = {study.largest}: a vanishing gradient on pseudo labels is "
        f"{'not' if labelled[1] >= labelled[0] else 'here also'} a better model."
    )
    weights = [
        mean(lambda record: record.mean_weight, arm, step) for arm in (MOVING, EAGER) for step in (0, study.largest)
    ]
    closing = (
        f"Mean weight H over the same steps: {weights[0]:.2f} to {weights[1]:.2f}; with the eager F-reg, whose "
        f"steps are as large as the curvature of w ↦ L_s(φ⁻(w)) allows (c = {study.constants.c_eager:.3g}), "
        f"{weights[2]:.2f} to {weights[3]:.2f}."
    )
    return [hard, condition, loss, closing]


def pace(measured: Fit) -> Pace:
    """A slope in one word, allowing for two standard errors."""
    slope, tolerance = measured.slope, 2 * (measured.error or 0.0)
    if abs(slope) <= max(LEVEL, tolerance):
        return "level"
    if slope > 0:
        return "grows"
    if slope + tolerance <= RATE:
        return "fast"
    return "slow" if slope - tolerance > RATE else "about"


def spoken(measured: Fit, against: str = "T") -> str:
    """A slope in a few words."""
    return _SPOKEN[pace(measured)].format(against)


def bound_verdict(measured: Fit, control: Fit) -> str:
    """Theorem 1: is the rate there, and does it need θ to move?"""
    kept, kept_by_control = (pace(each) in _QUICK for each in (measured, control))
    if kept and kept_by_control:
        return "The rate is kept, and with θ frozen it is kept too: trivial."
    if kept:
        return "The rate is kept, and with θ frozen it is not: θ's movement earns it."
    frozen = "keeps the rate" if kept_by_control else spoken(control)
    return f"The rate is not there: it {spoken(measured)}; with θ frozen it {frozen}."


def limit_verdict(measured: Fit, control: Fit, left: float, against: str) -> str:
    """Theorem 2: does the gradient tend to zero, and does that need F-reg? A slow fall settles nothing."""
    remaining = f"{100 * left:.2g} % of the value at t = 0 is left at the largest {against}"
    if pace(measured) not in _QUICK:
        judged = "Whether it tends to zero is open" if pace(measured) == "slow" else "It does not tend to zero"
        return (
            f"{judged}: it {spoken(measured, against)}, and {remaining}; "
            f"with θ and w frozen it {spoken(control, against)}."
        )
    if pace(control) in _QUICK:
        return f"It tends to zero ({remaining}), and with θ and w frozen too: plain gradient descent does it."
    return f"It tends to zero ({remaining}), and with θ and w frozen it does not: F-reg or θ does it."


def weights_verdict(weighted: Fit, without: Fit) -> str:
    """Theorem 2 under a fast F-reg: does C-reg fit its pseudo labels, or do the weights hide that it does not?"""
    if pace(weighted) not in _QUICK:
        return f"It {spoken(weighted, 't')}."
    if pace(without) in ("level", "grows"):
        return "It tends to zero while the unweighted gradient does not: F-reg's weights do it, not a fit."
    return "It tends to zero, and the unweighted gradient falls too: C-reg fits its pseudo labels."


def way_verdict(measured: Fit, fixed: Fit) -> str:
    """How far θ gets under the theorem's step sizes."""
    less = pace(measured) not in ("level", "grows")
    words = "θ moves less the larger T is" if less else "θ does not move less as T grows"
    return f"{words}; with η_s fixed its way {spoken(fixed)}."


def _finding(
    theorem: int, quantity: str, against: str, measured: Series, control: str, beside: Series, verdict: str
) -> Finding:
    first, last = float(measured.mean[0]), float(measured.mean[-1])
    return Finding(theorem, quantity, against, first, last, fit(measured), control, fit(beside), verdict)


def _effect(study: Study, measured: Series, control: Series) -> str:
    first, last = (control.mean / measured.mean)[[0, -1]]
    return f"Moving θ divides it by {first:.3g} at T = {theory.SMALLEST} and by {last:.3g} at T = {study.largest}."


def _beside(study: Study, measured: Series, control: Series) -> str:
    first, last = (measured.mean / control.mean)[[0, -1]]
    return f"It is {first:.2f} times the control at T = {theory.SMALLEST}, {last:.2f} times at T = {study.largest}."


def _series(study: Study, records: list[Record], value: Value, place: Callable[[Record], int]) -> Series:
    x = sorted({place(record) for record in records})
    values = np.full((study.seeds, len(x)), np.nan)
    for record in records:
        values[record.seed, x.index(place(record))] = value(record)
    return Series(np.array(x), values)


def _in_longest(study: Study, record: Record, arm: str) -> bool:
    return (record.schedule, record.arm, record.horizon) == (FIXED, arm, study.largest)
