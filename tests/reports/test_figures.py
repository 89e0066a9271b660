"""Figures: what they draw of several seeds."""

import pytest

from feddure.reports import figures

BLUE = {"color": "#0072B2"}


def test_curves_meet_where_all_seeds_were_evaluated():
    seeds = [[(5, 40.0, None), (10, 50.0, None)], [(10, 60.0, None), (15, 61.0, None)]]
    curve = figures.over_seeds("both", BLUE, seeds)
    assert curve.points == [(10, 55.0)]
    assert curve.band == [pytest.approx((55 - 50**0.5, 55 + 50**0.5))]


def test_one_seed_has_no_band_and_a_running_mean_is_cut_off_at_the_ends():
    seed = [(round, float(10 * round)) for round in (1, 2, 3, 6)]
    curve = figures.over_seeds("one", BLUE, [seed], window=3)
    assert curve.points == [(1, 15.0), (2, 20.0), (3, pytest.approx(110 / 3)), (6, 45.0)]
    assert not curve.band
