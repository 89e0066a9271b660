"""Recipes: shares that add up, cuts where they are promised, and a repair that always ends."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from feddure import rng
from feddure.data import recipes
from feddure.errors import ConfigError

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


def pools_of(numbers: list[int]) -> list[np.ndarray]:
    return np.split(np.arange(100, 100 + sum(numbers)), np.cumsum(numbers)[:-1])


@modest
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.integers(1, 10),
    st.sampled_from([0.05, 0.5, 1e5]),
    st.integers(0, 9),
)
def test_pairs_deal_every_image_to_clients_of_one_size(numbers, halves, gamma, seed):
    assume(sum(numbers) >= 2 * halves)
    images, owners = recipes.pairs(pools_of(numbers), 2 * halves, gamma, "test", seed)
    assert sorted(images.tolist()) == list(range(100, 100 + sum(numbers)))
    assert np.ptp(np.bincount(owners, minlength=2 * halves)) <= 1


@modest
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 6), st.floats(0.1, 2), st.integers(0, 99))
def test_pairs_are_those_of_the_published_procedure(per_client, halves, classes, gamma, seed):
    """Written out as SAGE describes it: all lists in a row, cut again into as many equal parts as there are clients."""
    clients = 2 * halves
    numbers = [len(part) for part in np.array_split(np.arange(per_client * clients), classes)]
    label = np.repeat(np.arange(classes), numbers)
    order = rng.permutation(len(label), "test", seed)
    lists: list[list[int]] = []
    for number in range(halves):
        chunk = order[2 * per_client * number : 2 * per_client * (number + 1)].tolist()
        draws, two = rng.legacy("test", seed, number), [[], []]
        while min(map(len, two)) < per_client / 2:
            two = [[], []]
            for kind in sorted(set(label[chunk])):
                shares = draws.dirichlet([gamma, gamma]) * [len(mine) < per_client for mine in two]
                members = [image for image in chunk if label[image] == kind]
                cut = int(shares[0] / shares.sum() * len(members))
                two = [two[0] + members[:cut], two[1] + members[cut:]]
        lists += two
    expected = np.split(np.concatenate(lists).astype(int) + 100, clients)
    images, owners = recipes.pairs(pools_of(numbers), clients, gamma, "test", seed)
    for client, part in enumerate(expected):
        assert images[owners == client].tolist() == part.tolist()


def dealt(numbers: list[int], shares: list[tuple[float, float]], monkeypatch) -> list[list[int]]:
    """Counts [client, class] of two clients, with these Dirichlet shares one after the other."""
    drawn = iter(shares)
    monkeypatch.setattr(recipes, "_shares", lambda *_: np.array(next(drawn)))
    images, owners = recipes.pairs(pools_of(numbers), 2, 0.5, "test")
    label = np.repeat(np.arange(len(numbers)), numbers)[images - 100]
    return [np.bincount(label[owners == client], minlength=len(numbers)).tolist() for client in (0, 1)]


def test_a_client_with_its_even_share_gets_no_more_and_the_longer_list_is_cut(monkeypatch):
    # Three quarters of a class each: 9 images after three classes, so the last class is the other client's.
    found = dealt([4, 4, 4, 4], [(0.75, 0.25)] * 4, monkeypatch)
    assert found == [[3, 3, 2, 0], [1, 1, 2, 4]]
    # Full, and the other one's share is 0.
    assert dealt([8, 8], [(1.0, 0.0)] * 2, monkeypatch) == [[8, 0], [0, 8]]


def test_a_pair_is_drawn_anew_until_both_have_half_the_even_share(monkeypatch):
    assert dealt([8], [(1.0, 0.0), (0.2, 0.8), (0.5, 0.5)], monkeypatch) == [[4], [4]]
    with pytest.raises(ConfigError, match=r"partition.gamma=0.5 .* less than a quarter of their 8 images; raise it"):
        dealt([8], [(0.2, 0.8)] * recipes.TRIES, monkeypatch)
