"""Recipes: shares that add up, cuts where they are promised, and a repair that always ends."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from feddure.data import recipes

modest = settings(deadline=None, max_examples=60)


def totals(counts: np.ndarray) -> list[int]:
    return counts.sum(axis=0).tolist()


@modest
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 20), st.integers(0, 9))
def test_even_shares_differ_by_one_at_most(numbers, clients, seed):
    counts = recipes.even(numbers, clients, "test", seed)
    assert totals(counts) == numbers
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert np.ptp(counts.sum(axis=1)) <= 1


def test_dirichlet_cuts_at_the_floor_of_cumulative_shares(monkeypatch):
    monkeypatch.setattr(recipes, "_shares", lambda *_: np.array([0.15, 0.29, 0.56]))
    assert recipes.dirichlet([10, 7], 3, 0.5, "test").tolist() == [[1, 1], [3, 2], [6, 4]]


@pytest.mark.parametrize("gamma", [1e-300, 1e-6])
def test_a_dirichlet_draw_that_underflows_gives_all_to_one_client(gamma):
    takers = set()
    for seed in range(30):
        counts = recipes.dirichlet([50], 5, gamma, "test", seed)
        assert sorted(counts[:, 0].tolist()) == [0, 0, 0, 0, 50]
        takers.add(int(counts.argmax()))
    assert len(takers) == 5


@modest
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 9))
def test_repair_moves_from_the_largest_just_enough(sizes, seed):
    clients, images = len(sizes), sum(sizes)
    assume(images >= clients)
    owners = np.repeat(np.arange(clients), sizes)
    before = owners.copy()
    moves = recipes.repair(owners, clients, "test", seed)
    after = np.bincount(owners, minlength=clients)
    minimum = recipes.minimum_size(images, clients)
    lacking = sum(max(0, minimum - size) for size in sizes)
    assert after.min() >= minimum
    assert sum(number for *_, number in moves) == lacking == int((owners != before).sum())
    for rich, poor, _ in moves:
        assert sizes[poor] < minimum == after[poor]
        assert after[rich] >= minimum
    givers = {rich for rich, *_ in moves}
    untouched = [size for client, size in enumerate(sizes) if client not in givers]
    if givers and untouched:
        assert min(after[rich] for rich in givers) >= max(untouched) - 1


@modest
@given(st.lists(st.integers(0, 90), min_size=11, max_size=11), st.integers(1, 30))
def test_fedmatch_deals_every_image_near_its_share(numbers, clients):
    counts = recipes.fedmatch(numbers, clients)
    assert totals(counts) == numbers
    mix = np.array([np.roll(recipes.FEDMATCH_MIX, client) for client in range(clients)])
    exact = mix / mix.sum(axis=0) * numbers[:10]
    assert (np.abs(counts[:, :10] - exact) < 1).all()
    assert np.ptp(counts[:, 10]) <= 1
