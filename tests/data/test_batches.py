"""Batches: which images a client sees, how often, and that nobody else's presence changes them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from feddure import rng
from feddure.data import augment
from feddure.data.batches import BatchPlan, DeviceImages, Needs, cycle
from feddure.errors import ConfigError

CPU = torch.device("cpu")
EVERYTHING = Needs(plain=True, weak=True, strong=True)


def order(client=0, labelled=range(12), unlabelled=range(40, 70), **fields):
    about = {"steps": 3, "labelled_batch": 4, "unlabelled_batch": 5, "needs": EVERYTHING}
    pools = [np.array(list(pool), dtype=np.int64) for pool in (labelled, unlabelled)]
    return BatchPlan(client, *pools, **(about | fields))


@pytest.fixture
def feed(images):
    return DeviceImages(images, CPU, torch.float64)


def one(feed, wanted, seed=0, number=1):
    return feed.batches([wanted], seed, number)[0]


def which(feed, pixels):
    """Numbers of the training images that these plain ones are."""
    every = feed.plain(np.arange(len(feed.images))).flatten(1)
    return [(every == image.flatten()).all(1).nonzero().item() for image in pixels.flatten(0, 1)]


# --- the cycle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "length"), [(1, 7), (3, 7), (7, 7), (10, 4), (5, 23)])
def test_a_cycle_takes_everyone_once_before_anyone_twice(size, length):
    pool = np.arange(100, 100 + size)
    found = cycle(pool, length, "key")
    assert len(found) == length
    for start in range(0, length, size):
        turn = found[start : start + size]
        assert len(set(turn.tolist())) == len(turn)
    counts = np.bincount(found - 100, minlength=size)
    assert counts.max() - counts.min() <= 1


def test_each_turn_of_a_cycle_has_an_order_of_its_own():
    found = cycle(np.arange(20), 60, "key").reshape(3, 20)
    assert len({tuple(turn) for turn in found.tolist()}) == 3


def test_a_cycle_over_nothing_is_empty():
    assert cycle(np.empty(0, dtype=np.int64), 10, "key").tolist() == []
    assert cycle(np.arange(4), 0, "key").tolist() == []


# --- batches -------------------------------------------------------------------------------------------


def test_shapes_are_static(feed):
    batches = one(feed, order())
    assert batches.labelled.shape == (3, 4, 1, 12, 12)
    assert batches.labels.shape == (3, 4)
    assert batches.plain.shape == batches.weak.shape == batches.strong.shape == (3, 5, 1, 12, 12)
    assert batches.truth.shape == (3, 5)
    step = batches.step(1)
    assert torch.equal(step.weak, batches.weak[1])
    assert batches.weak.dtype == torch.float64


def test_pixels_lie_channels_last():
    feed = DeviceImages(tiny.dataset(channels=3), CPU, torch.float32)
    step = one(feed, order()).step(0)
    views = one(feed, order(needs=Needs(strong=2))).step(0).strong
    for images in (step.labelled, step.plain, step.weak, step.strong, *views, torch.cat([*views])):
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_images_are_the_clients_own_with_their_classes(feed, images):
    batches = one(feed, order())
    seen = which(feed, batches.plain)
    assert set(seen) <= set(range(40, 70))
    assert batches.truth.flatten().tolist() == images.labels[seen].tolist()
    assert set(batches.labels.flatten().tolist()) <= set(images.labels[:12].tolist())


def test_a_set_smaller_than_a_batch_repeats_within_it(feed, images):
    batches = one(feed, order(labelled=[5], unlabelled=[60, 61]))
    assert (batches.labels == images.labels[5]).all()
    assert sorted(set(which(feed, batches.plain))) == [60, 61]


def test_views_of_one_batch_show_the_same_images(feed):
    """Augmented by hand with the decisions of the same key, the plain images give the views."""
    wanted = order(client=7)
    batches = one(feed, wanted, seed=3, number=9)
    uint8 = feed.images[torch.tensor(which(feed, batches.plain))]
    for kind, words, decide, apply in (
        ("weak", augment.WEAK_BITS, augment.weak_decisions, augment.weak),
        ("strong", augment.STRONG_BITS, augment.strong_decisions, augment.strong),
    ):
        raw = rng.bits(15 * words, 3, f"augment-{kind}", 9, 7).reshape(15, words)
        expected = apply(uint8, decide(raw, 12), feed.normalise)
        assert torch.equal(getattr(batches, kind).flatten(0, 1), expected)


@pytest.mark.parametrize("cutout", [False, True])
def test_images_in_which_left_and_right_differ_are_never_mirrored(images, cutout):
    """Brightness rises from left to right: in no view of such an image does it fall."""
    ramp = np.broadcast_to(np.arange(12, dtype=np.uint8)[:, None] * 20, images.images.shape)
    mirrored = {}
    for flip in (False, True):
        feed = DeviceImages(replace(images, images=np.ascontiguousarray(ramp), flip=flip), CPU, torch.float64)
        batches = one(feed, order(cutout=cutout))
        # In the middle, which no crop's reflected border reaches, by their first and last columns.
        falls = [v.flatten(0, 1)[:, 0, :, 4] > v.flatten(0, 1)[:, 0, :, 7] for v in (batches.labelled, batches.weak)]
        mirrored[flip] = [bool(view.all(1).any()) for view in falls]
        words = rng.bits(15 * augment.STRONG_BITS, 0, "augment-strong", 1, 0).reshape(15, -1)
        decisions = augment.strong_decisions(words, 12)
        decisions[:, 0] *= flip
        uint8 = feed.images[torch.tensor(batches.index.flatten().tolist())]
        assert torch.equal(batches.strong.flatten(0, 1), augment.strong(uint8, decisions, feed.normalise))
    assert mirrored == {False: [False, False], True: [True, True]}


def test_several_strong_views(feed):
    one_view, batches = one(feed, order()), one(feed, order(needs=Needs(strong=3)))
    assert batches.strong.shape == (3, 3, 5, 1, 12, 12)
    assert torch.equal(batches.strong[:, 0], one_view.strong)
    assert torch.equal(batches.truth, one_view.truth)
    uint8 = feed.images[batches.index.flatten()]
    for view in (1, 2):  # the same images, other decisions
        raw = rng.bits(15 * augment.STRONG_BITS, 0, f"augment-strong-{view}", 1, 0).reshape(15, -1)
        expected = augment.strong(uint8, augment.strong_decisions(raw, 12), feed.normalise)
        assert torch.equal(batches.strong[:, view].flatten(0, 1), expected)
    assert one(feed, order(needs=Needs(strong=2), unlabelled=[])).strong.shape == (3, 2, 0, 1, 12, 12)
    assert one(feed, order(needs=Needs(strong=1))).strong.shape == one_view.strong.shape


@pytest.mark.parametrize("cutout", [False, True])
def test_labelled_images_can_be_strong_views(feed, cutout):
    wanted = order(labelled=[5], needs=Needs(labelled="strong"), cutout=cutout)
    raw = rng.bits(12 * augment.STRONG_BITS, 0, "augment-labelled", 1, 0).reshape(12, -1)
    decisions = augment.strong_decisions(raw, 12)
    expected = augment.strong(feed.images[torch.full((12,), 5)], decisions, feed.normalise)
    assert torch.equal(one(feed, wanted).labelled.flatten(0, 1), expected)


@pytest.mark.parametrize("cutout", [False, True])
def test_labelled_images_can_be_left_as_they_are(feed, cutout):
    wanted = order(labelled=[5], needs=Needs(plain=True, labelled="plain"), cutout=cutout)
    batches = one(feed, wanted)
    assert torch.equal(batches.labelled.flatten(0, 1), feed.plain(np.full(12, 5)))
    assert torch.equal(batches.plain.flatten(0, 1), feed.plain(batches.index.flatten().numpy()))


@pytest.mark.parametrize("needs", [{"strong": -1}, {"strong": "two"}, {"labelled": "cut"}], ids=str)
def test_needs_that_mean_nothing(needs):
    with pytest.raises(ConfigError, match="expected a number of strong views"):
        Needs(**needs)


def test_clients_are_independent_of_who_else_is_there(feed):
    orders = [order(client=1), order(client=2, labelled=[3], steps=5), order(client=3, unlabelled=[], cutout=True)]
    together = feed.batches(orders, 0, 4)
    for wanted, batches in zip(orders, together, strict=True):
        alone = one(feed, wanted, number=4)
        for found, expected in zip(batches.tensors(), alone.tensors(), strict=True):
            assert torch.equal(found, expected)


def test_seed_round_and_client_each_change_the_batches(feed):
    base = one(feed, order())
    others = [one(feed, order(), seed=1), one(feed, order(), number=2), one(feed, order(client=1))]
    for other in others:
        assert not torch.equal(other.plain, base.plain)
        assert not torch.equal(other.labelled, base.labelled)
    assert torch.equal(one(feed, order()).strong, base.strong)


def test_only_what_is_needed_is_made(feed):
    batches = one(feed, order(needs=Needs(strong=True)))
    assert batches.strong.shape[1] == 5
    assert batches.plain.shape[1] == batches.weak.shape[1] == 0
    batches = one(feed, order(needs=Needs()))
    assert [tensor.shape[1] for tensor in (batches.plain, batches.weak, batches.strong, batches.truth)] == [0] * 4
    assert batches.labelled.shape[1] == 4


def test_what_one_view_shows_does_not_depend_on_the_others(feed):
    assert torch.equal(one(feed, order(needs=Needs(strong=True))).strong, one(feed, order()).strong)


def test_full_supervision_draws_from_all_images(feed, images):
    batches = one(feed, order(needs=Needs(every_label=True), steps=60))
    assert batches.truth.shape == (60, 0)
    pool = [*range(12), *range(40, 70)]
    expected = np.bincount(images.labels[pool], minlength=4) * 240 / 42
    counts = np.bincount(batches.labels.flatten().numpy(), minlength=4)
    assert abs(counts - expected).max() < 10


@pytest.mark.parametrize("pool", ["labelled", "unlabelled"])
def test_a_client_without_such_images_gets_batches_of_none(feed, pool):
    batches = one(feed, order(**{pool: []}))
    empty = [batches.labelled, batches.labels] if pool == "labelled" else [batches.weak, batches.strong, batches.truth]
    assert all(tensor.shape[:2] == (3, 0) for tensor in empty)
    full = batches.strong if pool == "labelled" else batches.labelled
    assert full.shape[1] > 0


def test_cutout_leaves_a_grey_square_in_labelled_images(feed, images):
    grey = (127 / 255 - images.mean[0]) / images.std[0]
    cut = one(feed, order(cutout=True)).labelled.flatten(0, 1)
    whole = one(feed, order()).labelled.flatten(0, 1)
    assert ((cut - grey).abs() < 1e-12).flatten(1).sum(1).min() >= 9
    assert ((whole - grey).abs() < 1e-12).flatten(1).sum(1).max() < 9


def test_test_batches_hold_every_test_image_once(feed, images):
    pieces = list(feed.test_batches(25))
    assert [len(labels) for _, labels in pieces] == [25, 25, 10]
    assert torch.equal(torch.cat([labels for _, labels in pieces]), torch.from_numpy(images.test_labels))
    expected = (torch.from_numpy(images.test_images).double() / 255 - 0.35) / 0.25
    torch.testing.assert_close(torch.cat([pixels for pixels, _ in pieces]), expected.permute(0, 3, 1, 2))
