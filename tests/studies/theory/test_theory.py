"""The measured gradients are the theorems' own, and every verdict follows from the numbers."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure import data
from feddure.studies.theory import measure, report
from feddure.studies.theory.measure import EAGER, FIXED, FROZEN_BOTH, FROZEN_THETA, MOVING, PAPER
from feddure.studies.theory.report import Fit, Series


@pytest.fixture(scope="module")
def starts():
    dataset = data.load("fashion-mini")
    return [measure.make_start(dataset, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def study():
    return measure.measure(largest=128, seeds=2)


def point(starts):
    """Both starts as lanes, with C-reg a little away from theta, as it is after some steps."""
    client, theta, w = measure.stack(starts)
    shift = torch.linspace(-1, 1, theta.shape[1], dtype=torch.float64).sin()
    return client, theta, theta + 0.1 * shift, w


def column(value, lanes=2):
    return torch.full((lanes, 1), value, dtype=torch.float64)


def directional(loss, at, direction, distance=1e-5):
    """Central difference of a loss per lane."""
    difference = loss(at + distance * direction) - loss(at - distance * direction)
    return difference.detach() / (2 * distance)


def directions(like, count=5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        noise = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        yield noise / noise.norm(dim=1, keepdim=True)


def records(study, **wanted):
    found = study.records
    return found[np.logical_and.reduce([found[name] == value for name, value in wanted.items()])]


@pytest.mark.parametrize("what", ["θ's gradient", "C-reg's gradient", "F-reg's step"])
def test_a_steps_gradients_equal_finite_differences_of_the_papers_losses(starts, what):
    client, theta, phi, w = point(starts)
    targets = measure.pseudo_labels(theta, client)
    taken = measure.take_step(theta, phi, w, client, column(0.25), column(2.0))

    def through_theta(moved):
        return measure.meta_loss(moved, phi, taken.w, client, column(0.25))

    def weighted(moved):
        return measure.unsupervised(measure.network(moved, client.strong), targets, taken.w)

    def through_w(moved):
        virtual = measure.next_phi(phi.requires_grad_(), moved, targets, client, column(0.25))
        return measure.supervised(virtual, client)

    loss, at, gradient = {
        "θ's gradient": (through_theta, theta, taken.meta_gradient),
        "C-reg's gradient": (weighted, phi, taken.c_reg_gradient),
        "F-reg's step": (through_w, w, (w - taken.w) / 2.0),
    }[what]
    for direction in directions(at):
        expected = directional(loss, at, direction)
        torch.testing.assert_close((gradient * direction).sum(1), expected, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(taken.phi, phi - 0.25 * taken.c_reg_gradient)


def test_the_gradient_carries_the_factor_eta_s(starts):
    client, theta, phi, w = point(starts)
    small, double, tenfold = (
        measure.take_step(theta, phi, w, client, column(eta_s), column(0.0)).meta_gradient
        for eta_s in (1e-6, 2e-6, 1e-5)
    )
    assert small.norm() > 0
    assert (double - 2 * small).norm() < 1e-4 * small.norm()
    assert (tenfold - 10 * small).norm() < 1e-3 * small.norm()


def test_hard_pseudo_labels_leave_nothing_to_differentiate(starts):
    client, theta, phi, w = point(starts)
    for hard in (True, False):
        variable = theta.clone().requires_grad_()
        loss = measure.meta_loss(variable, phi, w, client, column(0.25), hard).sum()
        (gradient,) = torch.autograd.grad(loss, variable, allow_unused=True)
        assert (gradient is None) == hard


def test_moving_theta_under_hard_labels_changes_not_a_single_bit_until_a_label_flips(starts):
    found = measure.perturb(starts, e=16)
    assert [p.radius for p in found] == list(measure.RADII)
    assert [p.hard for p in found] == [0.0] * len(found)
    assert found[0].flips == 0
    assert found[-1].flips > 0
    assert found[0].soft > 0
    assert found[1].soft / found[0].soft == pytest.approx(found[1].radius / found[0].radius, rel=1e-3)


def test_lanes_do_not_touch_each_other(starts):
    client, theta, phi, w = point(starts)
    together = measure.take_step(theta, phi, w, client, column(0.25), column(0.1))
    for lane in (0, 1):
        only = slice(lane, lane + 1)
        rates = column(0.25, 1), column(0.1, 1)
        alone = measure.take_step(theta[only], phi[only], w[only], client.lanes(only), *rates)
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[only], theirs, rtol=1e-12, atol=1e-15)


def test_the_largest_curvature_of_a_quadratic_is_its_largest_absolute_eigenvalue():
    eigenvalues = torch.tensor([[3.0, -7.0, 0.5], [1.0, 0.1, 0.0]], dtype=torch.float64)
    met = measure.largest_eigenvalue(lambda x: (eigenvalues * x**2).sum(1) / 2, torch.ones_like(eigenvalues))
    torch.testing.assert_close(met, torch.tensor([7.0, 1.0], dtype=torch.float64), rtol=1e-4, atol=0)


def test_the_steps_keep_the_theorems_conditions(starts, study):
    constants = measure.pilot(starts, e=16)
    assert constants.c_theta / measure.SMALLEST**0.5 == pytest.approx(1 / constants.L_theta)
    assert constants.c_w / measure.SMALLEST**0.5 == pytest.approx(1 / constants.L_losses)
    paper = records(study, schedule=PAPER, arm=MOVING)
    assert (paper.eta_s == np.minimum(1, study.constants.e / paper.horizon)).all()
    assert (paper.eta <= 1 / study.constants.L_theta * (1 + 1e-12)).all()
    assert 0 < study.step_times_curvature <= 1


def test_controls_stand_still_where_they_should(study):
    found, moving = study.records, records(study, arm=MOVING)
    assert (found.theta_moved[found.arm.isin([FROZEN_THETA, FROZEN_BOTH])] == 0).all()
    assert (moving.theta_moved[moving.step > 0] > 0).all()
    assert ((found.eta_w == 0) == (found.arm == FROZEN_BOTH)).all()
    assert set(found.arm) == {MOVING, FROZEN_THETA, FROZEN_BOTH, EAGER}


def test_both_schedules_are_the_same_run_at_the_least_t(study):
    for arm in (MOVING, FROZEN_THETA):
        paper, fixed = (
            records(study, schedule=one, arm=arm, horizon=64, step=64).drop(columns=["schedule", "arm"])
            for one in (PAPER, FIXED)
        )
        np.testing.assert_allclose(paper, fixed, rtol=1e-9)


def test_the_smallest_gradient_is_the_least_up_to_then(study):
    for seed in (0, 1):
        trace = records(study, schedule=FIXED, arm=MOVING, horizon=128, seed=seed)
        assert trace.step.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128]
        assert (trace.smallest_meta_gradient <= trace.meta_gradient.cummin()).all()
        assert trace.smallest_meta_gradient.iloc[0] == trace.meta_gradient.iloc[0]


def test_dividing_by_eta_s_squared_takes_two_from_the_slope(study):
    raw, scaled = (
        report.at_end(study, PAPER, FROZEN_THETA, column).fit for column in ("smallest_meta_gradient", "scaled")
    )
    assert scaled.slope - raw.slope == pytest.approx(2)


@given(
    slope=st.floats(-3, 3),
    scales=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4),
    points=st.integers(3, 8),
)
@settings(deadline=None, max_examples=50)
def test_a_power_law_is_fitted_exactly_whatever_each_seeds_scale(slope, scales, points):
    x = 2.0 ** np.arange(6, 6 + points)
    fitted = Series(x, np.array([scale * x**slope for scale in scales])).fit
    assert fitted.slope == pytest.approx(slope, abs=1e-9)
    assert fitted.error == pytest.approx(0, abs=1e-6)


def test_the_error_of_a_slope_is_that_of_ordinary_least_squares():
    x = 2.0 ** np.arange(6, 13)
    noise = np.array([0.1, -0.3, 0.2, 0.05, -0.1, 0.15, -0.1])
    values = np.exp(-0.7 * np.log(x) + noise)
    fitted = Series(x, values[None]).fit
    (slope, _), covariance = np.polyfit(np.log(x), np.log(values), 1, cov=True)
    assert fitted.slope == pytest.approx(slope)
    assert fitted.error == pytest.approx(covariance[0, 0] ** 0.5)


def test_two_points_of_one_seed_have_no_error():
    fitted = Series(np.array([64, 128]), np.array([[1.0, 0.5]])).fit
    assert fitted == (pytest.approx(-1), None)
    assert str(fitted) == "−1.00 ± –"


@pytest.mark.parametrize(
    ("slope", "error", "pace"),
    [
        (-2.0, 0.1, "fast"),
        (-0.5, 0.05, "about"),
        (-0.3, 0.05, "slow"),
        (-0.3, 0.2, "level"),
        (0.05, 0.0, "level"),
        (0.4, 0.1, "grows"),
        (-0.6, None, "fast"),
    ],
)
def test_a_slope_in_a_word(slope, error, pace):
    assert report.pace(Fit(slope, error)) == pace


def test_verdicts_follow_the_slopes():
    falls, creeps, level, grows = (Fit(slope, 0.02) for slope in (-1.5, -0.2, 0.0, 0.4))
    assert "trivial" in report.bound_verdict(falls, falls)
    assert "earns it" in report.bound_verdict(falls, level)
    assert "it falls, but more slowly" in report.bound_verdict(creeps, level)
    assert "it grows; with θ frozen it keeps the rate" in report.bound_verdict(grows, falls)
    assert "plain gradient descent" in report.limit_verdict(falls, falls, 0.001, "t")
    assert "F-reg or θ does it" in report.limit_verdict(falls, level, 0.001, "t")
    assert "is open: it falls, but more slowly than 1/√t" in report.limit_verdict(creeps, level, 0.3, "t")
    assert "does not tend to zero: it stays level, and 4 %" in report.limit_verdict(level, level, 0.04, "T")
    assert "not a fit" in report.weights_verdict(falls, grows)
    assert "C-reg fits" in report.weights_verdict(falls, falls)
    assert "less the larger T" in report.way_verdict(creeps, grows)


def test_notes_follow_the_numbers(study):
    moved = [one._replace(hard=1e-9) for one in study.perturbations]
    bent = dataclasses.replace(study, step_times_curvature=1.5, perturbations=moved)
    for one, exactly, held in ((study, "exactly 0", "held"), (bent, "1.0e-09", "was broken")):
        hard, condition, *_ = report.notes(one)
        assert exactly in hard
        assert held in condition


def test_the_number_of_threads_is_given_back():
    def stop(done, total):
        raise RuntimeError("stop")

    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="stop"):
        measure.measure(128, 1, progress=stop)
    assert torch.get_num_threads() == before
