"""Random decisions: pure functions of their key, uniform, and the same on every machine."""

import numpy as np
import pytest

from feddure import rng


def test_golden_values():
    """Whoever changes these changes every result that was ever published with this package."""
    assert rng.bits(3, 0, "purpose", 1, 2).tolist() == GOLDEN_BITS
    assert rng.permutation(8, 0, "purpose").tolist() == GOLDEN_PERMUTATION
    assert rng.integers(100, 5, 7, "purpose").tolist() == GOLDEN_INTEGERS


GOLDEN_BITS = [458869961310811119, 4198808147796505212, 16332315278313000255]
GOLDEN_PERMUTATION = [1, 3, 0, 2, 7, 6, 5, 4]
GOLDEN_INTEGERS = [73, 53, 86, 34, 79]


def test_the_same_key_gives_the_same_draw_and_another_key_another():
    assert np.array_equal(rng.bits(10, 0, "a", 1), rng.bits(10, 0, "a", 1))
    keys = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a"), (0, "a", 1, 0)]
    assert len({rng.bits(4, *key).tobytes() for key in keys}) == len(keys)


def test_a_longer_draw_begins_like_a_shorter_one():
    assert np.array_equal(rng.bits(100, 5, "x")[:10], rng.bits(10, 5, "x"))


def test_the_global_stream_is_neither_used_nor_moved():
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    rng.bits(5, 1), rng.permutation(5, 1), rng.legacy(1).rand()
    assert np.random.rand() == expected


def test_permutations_hold_every_number_once():
    for size in (0, 1, 2, 57):
        assert sorted(rng.permutation(size, size).tolist()) == list(range(size))


def test_samples_are_different_numbers_and_every_order_is_as_likely():
    assert len(set(rng.sample(10, 4, "s").tolist())) == 4
    assert len(rng.sample(3, 10, "s")) == 3
    firsts = np.bincount([rng.sample(5, 1, "first", number)[0] for number in range(5000)])
    assert firsts.min() > 900
    assert firsts.max() < 1100


def test_integers_are_uniform_and_below_their_bound():
    found = rng.integers(7, 70_000, "uniform")
    assert found.dtype == np.int64
    counts = np.bincount(found, minlength=7)
    assert len(counts) == 7
    assert abs(counts - 10_000).max() < 400


def test_a_bound_for_each_integer():
    bounds = np.array([1, 2, 3, 1000])
    found = rng.integers(bounds, 4, "bounds")
    assert (found >= 0).all()
    assert (found < bounds).all()
    assert found[0] == 0


@pytest.mark.parametrize("size", [0, 1])
def test_few_draws(size):
    assert rng.bits(size, "few").shape == (size,)
