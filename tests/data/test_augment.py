"""T_w and T_s do, to the last bit, what the Pillow reference does; and they are pure functions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure import rng
from feddure.data import augment, sources
from feddure.data.augment import OPERATIONS, Normalise
from feddure.errors import DataError
from oracle import augment_twin

NORMALISE = {
    1: Normalise((0.2860,), (0.3530,)),
    3: Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


@pytest.fixture(scope="module")
def clothes() -> np.ndarray:
    return sources.load("fashion-mini").images[:120]


def pictures(clothes: np.ndarray, count: int, side: int, channels: int) -> np.ndarray:
    """Real images of any side: neighbouring clothes side by side, other ones in each channel."""
    planes = clothes[: count * channels, :, :, 0].reshape(count, channels, *clothes.shape[1:3])
    tiles = -(-side // planes.shape[2])
    mosaic = np.block([[np.roll(planes, 3 * i + j, axis=0) for j in range(tiles)] for i in range(tiles)])
    return np.ascontiguousarray(mosaic[:, :, :side, :side].transpose(0, 2, 3, 1))


def edge_cases(side: int, channels: int) -> np.ndarray:
    """Noise, faint noise, flat images, a ramp, two levels, and a single bright pixel."""
    shape = (side, side, channels)
    noise = (rng.bits(side * side * channels, "noise") >> np.uint64(56)).astype(np.uint8).reshape(shape)
    ramp = np.broadcast_to(np.arange(side)[:, None, None] * 255 // (side - 1), shape)
    dot = np.zeros(shape)
    dot[side // 2, side // 3] = 255
    flat = [np.full(shape, level) for level in (0, 1, 127, 254, 255)]
    return np.stack([noise, noise // 64 + 100, *flat, ramp, 40 + 90 * (noise % 2), dot]).astype(np.uint8)


def strong_decisions(count: int, side: int, *key: str) -> np.ndarray:
    raw = rng.bits(count * augment.STRONG_BITS, *key).reshape(count, augment.STRONG_BITS)
    return augment.strong_decisions(raw, side)


def weak_decisions(count: int, side: int, *key: str, cutout: bool = False) -> np.ndarray:
    words = augment.WEAK_BITS + augment.CUTOUT_BITS * cutout
    return augment.weak_decisions(rng.bits(count * words, *key).reshape(count, words), side, cutout)


def strong(images: np.ndarray, decisions: np.ndarray) -> np.ndarray:
    return augment.strong(torch.from_numpy(images), decisions).numpy()


def weak(images: np.ndarray, decisions: np.ndarray) -> np.ndarray:
    return augment.weak(torch.from_numpy(images), decisions).numpy()


def by_pillow(transform, images: np.ndarray, decisions: np.ndarray) -> np.ndarray:
    return np.stack([transform(image, decision) for image, decision in zip(images, decisions, strict=True)])


def single_operations(operation: str, side: int) -> np.ndarray:
    """The operation alone at every level and sign, with the cutout in either of two opposite corners."""
    number = OPERATIONS.index(operation)
    return np.array(
        [
            [0, 4, 4, number, level, 1, negative, 0, 1, 0, 0, corner, corner]
            for level in range(1, 10)
            for negative in (0, 1)
            for corner in (0, side - 1)
        ]
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_equals_pillow_at_every_level(clothes, operation, channels):
    for side in (28, 33):
        images = np.concatenate([pictures(clothes, 4, side, channels), edge_cases(side, channels)])
        decisions = single_operations(operation, side)
        every_image = np.repeat(images, len(decisions), axis=0)
        every_decision = np.tile(decisions, (len(images), 1))
        expected = by_pillow(augment_twin.strong, every_image, every_decision)
        np.testing.assert_array_equal(strong(every_image, every_decision), expected)


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"Identity"}))
def test_every_operation_does_something_and_color_only_to_colours(clothes, operation):
    for channels in (1, 3):
        images = pictures(clothes, 1, 32, channels) // 2 + 30
        decision = np.array([[0, 4, 4, OPERATIONS.index(operation), 9, 1, 0, 0, 1, 0, 0, 0, 0]])
        unchanged = decision.copy()
        unchanged[:, 3] = OPERATIONS.index("Identity")
        changes = (strong(images, decision) != strong(images, unchanged)).any()
        assert changes == (channels == 3 or operation != "Color")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [28, 32, 33, 64])
def test_whole_transforms_equal_pillow(clothes, side, channels):
    images = np.concatenate([pictures(clothes, 30, side, channels)] * 5)
    decisions = strong_decisions(len(images), side, "whole")
    np.testing.assert_array_equal(strong(images, decisions), by_pillow(augment_twin.strong, images, decisions))
    for cutout in (False, True):
        decisions = weak_decisions(len(images), side, "whole", cutout=cutout)
        np.testing.assert_array_equal(weak(images, decisions), by_pillow(augment_twin.weak, images, decisions))


@settings(deadline=None, max_examples=40)
@given(
    side=st.integers(5, 24),
    channels=st.sampled_from([1, 3]),
    count=st.integers(1, 12),
    low=st.integers(0, 200),
    seed=st.integers(0, 2**32),
)
def test_any_images_and_any_decisions_equal_pillow(side, channels, count, low, seed):
    values = rng.integers(256 - low, count * side * side * channels, seed, "values")
    images = (low + values).astype(np.uint8).reshape(count, side, side, channels)
    decisions = strong_decisions(count, side, str(seed))
    expected = by_pillow(augment_twin.strong, images, decisions)
    np.testing.assert_array_equal(strong(images, decisions), expected)


def test_an_image_does_not_depend_on_its_batch(clothes, monkeypatch):
    images = pictures(clothes, 40, 32, 3)
    decisions = strong_decisions(40, 32, "batch")
    together = strong(images, decisions)
    alone = [strong(images[i : i + 1], decisions[i : i + 1]) for i in range(40)]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    in_two = [strong(images[:7], decisions[:7]), strong(images[7:], decisions[7:])]
    np.testing.assert_array_equal(together, np.concatenate(in_two))
    normalised = augment.strong(torch.from_numpy(images), decisions, NORMALISE[3])
    monkeypatch.setattr(augment, "_CHUNK_ON_CPU", 3 * 32 * 32)
    np.testing.assert_array_equal(together, strong(images, decisions))
    assert torch.equal(normalised, augment.strong(torch.from_numpy(images), decisions, NORMALISE[3]))


def test_inputs_stay_untouched(clothes):
    images = torch.from_numpy(pictures(clothes, 40, 28, 3))
    before = images.clone()
    for apply, decisions in (
        (augment.strong, strong_decisions(40, 28, "pure")),
        (augment.weak, weak_decisions(40, 28, "pure", cutout=True)),
    ):
        kept = decisions.copy()
        first = apply(images, decisions, NORMALISE[3])
        assert torch.equal(images, before)
        np.testing.assert_array_equal(decisions, kept)
        assert torch.equal(first, apply(images, decisions, NORMALISE[3]))
    augment.plain(images, NORMALISE[3])
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_normalised_results_are_channels_last_numbers_of_the_dtype_asked_for(clothes, channels, dtype, tolerance):
    images = torch.from_numpy(pictures(clothes, 12, 28, channels))
    normalise = Normalise(NORMALISE[channels].mean, NORMALISE[channels].std, dtype)
    decisions, weakly = strong_decisions(12, 28, "dtype"), weak_decisions(12, 28, "dtype")
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (normalise.mean, normalise.std))
    for result, levels in (
        (augment.strong(images, decisions, normalise), augment.strong(images, decisions)),
        (augment.weak(images, weakly, normalise), augment.weak(images, weakly)),
        (augment.plain(images, normalise), images),
    ):
        expected = ((levels.double() / 255 - mean) / std).permute(0, 3, 1, 2)
        assert result.dtype == dtype
        assert result.shape == (12, channels, 28, 28)
        assert result.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=0)


def test_cutout_is_half_the_side_and_clipped_at_the_border():
    images = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    decisions = np.array([[0, 4, 4, 16, 16], [0, 4, 4, 0, 0], [1, 0, 8, 31, 20]])
    grey = weak(images, decisions) == 127
    expected = np.zeros_like(grey)
    expected[0, 8:24, 8:24] = expected[1, :8, :8] = expected[2, 23:, 12:28] = True
    np.testing.assert_array_equal(grey, expected)


def assert_uniform(column: np.ndarray, values: range) -> None:
    counts = np.bincount(column, minlength=values.stop)
    assert counts.sum() == counts[values.start :].sum()
    assert len(counts) == values.stop
    expected = len(column) / len(values)
    # Five standard deviations of a count; the draws are fixed, so this never fails by chance.
    assert np.abs(counts[values.start :] - expected).max() < 5 * np.sqrt(expected)


def test_decisions_are_uniform():
    strongly = strong_decisions(60_000, 33, "uniform")
    ranges = [range(2), range(9), range(9)]
    ranges += [range(14), range(1, 10), range(2), range(2)] * 2
    ranges += [range(33), range(33)]
    assert strongly.shape == (60_000, len(ranges))
    for column, values in zip(strongly.T, ranges, strict=True):
        assert_uniform(column, values)
    weakly = weak_decisions(60_000, 33, "uniform", cutout=True)
    for column, values in zip(weakly.T, [range(2), range(9), range(9), range(33), range(33)], strict=True):
        assert_uniform(column, values)


def test_decisions_are_independent_of_each_other():
    decisions = strong_decisions(60_000, 32, "independent")
    correlations = np.corrcoef(decisions.T) - np.eye(decisions.shape[1])
    assert np.abs(correlations).max() < 5 / np.sqrt(len(decisions))
    assert_uniform(decisions[:, 3] * 14 + decisions[:, 7], range(14 * 14))


def test_the_way_from_random_words_to_decisions_never_changes():
    words = np.array([[0, 1 << 63, 2**64 - 1, 0x0123456789ABCDEF]], dtype=np.uint64)
    assert augment.strong_decisions(words, 32).tolist() == [[0, 0, 0, 0, 1, 0, 1, 13, 9, 1, 1, 2, 0]]
    assert augment.weak_decisions(words[:, 2:3], 32).tolist() == [[1, 8, 8]]
    assert augment.weak_decisions(words[:, 2:], 32, cutout=True).tolist() == [[1, 8, 8, 2, 0]]


def test_mistakes_are_named():
    decisions = weak_decisions(2, 32, "mistakes")
    with pytest.raises(DataError, match=r"make the images square"):
        augment.weak(torch.zeros(2, 32, 30, 3, dtype=torch.uint8), decisions, NORMALISE[3])
    with pytest.raises(DataError, match=r"uint8"):
        augment.weak(torch.zeros(2, 32, 32, 3), decisions, NORMALISE[3])
    with pytest.raises(DataError, match=r"5 × 5"):
        augment.weak(torch.zeros(2, 4, 4, 3, dtype=torch.uint8), decisions, NORMALISE[3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("channels", [1, 3])
def test_cuda_equals_cpu_and_never_waits(clothes, channels):
    images = np.concatenate([pictures(clothes, 40, 28, channels), edge_cases(28, channels)] * 20)
    on_cpu = torch.from_numpy(images)
    on_cuda = on_cpu.cuda()
    strongly = strong_decisions(len(images), 28, "cuda")
    weakly = weak_decisions(len(images), 28, "cuda", cutout=True)
    for apply, decisions in ((augment.strong, strongly), (augment.weak, weakly)):
        expected = apply(on_cpu, decisions, NORMALISE[channels])
        apply(on_cuda, decisions, NORMALISE[channels])  # the constants are sent once, and that may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            levels = apply(on_cuda, decisions)
            result = apply(on_cuda, decisions, NORMALISE[channels])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(levels.cpu(), apply(on_cpu, decisions))
        assert torch.equal(result.cpu(), expected)
