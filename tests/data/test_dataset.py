"""What must be true of a data set that somebody else made, and what is measured on it."""

from dataclasses import replace

import numpy as np
import pytest

import tiny
from feddure.data.dataset import UNKNOWN, check, measure
from feddure.errors import DataError

TWO = {"size": 4, "tests": 4, "classes": 2, "side": 8}
FOUR = np.zeros(4, dtype=np.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": [1, 2]}, "images is a list"),
        ({"images": np.zeros((4, 8, 8, 1))}, "float64, expected uint8"),
        ({"images": np.zeros((4, 1, 8, 8), dtype=np.uint8)}, "1 or 3 channels"),
        ({"images": np.zeros((4, 8), dtype=np.uint8)}, r"shape \[4, 8\]"),
        ({"images": np.zeros((0, 8, 8, 1), dtype=np.uint8)}, "empty"),
        ({"test_images": np.zeros((4, 9, 8, 1), dtype=np.uint8)}, "must agree"),
        ({"classes": ("a",)}, "2 or more"),
        ({"classes": ("a", "a")}, "repeat"),
        ({"labels": np.array([0, 1])}, r"\[2\], expected \[4\]"),
        ({"labels": np.zeros((4, 1), dtype=np.int64)}, r"\[4, 1\], expected \[4\]"),
        ({"labels": FOUR.astype(np.int32)}, "int32, expected int64"),
        ({"labels": np.array([0, 1, 5, 1])}, r"labels\[2\] is 5, expected 0 to 1"),
        ({"labels": np.array([0, 1, -2, 1])}, r"labels\[2\] is -2"),
        ({"test_labels": np.array([0, UNKNOWN, 0, 1])}, r"test_labels\[1\] is -1"),
        ({"labels": np.array([0, UNKNOWN, 0, 1])}, "`labelled` does not say so"),
        ({"labelled": np.ones(3, dtype=bool)}, r"expected bool \[4\]"),
        ({"labelled": np.zeros(4, dtype=bool)}, "no image at all"),
        ({"labels": np.array([0, UNKNOWN, 0, 1]), "labelled": np.ones(4, dtype=bool)}, r"labelled\[1\] is true"),
        ({"sites": ("x",)}, "does not say which"),
        ({"sites": ("x",), "site": np.array([0, 0, 1, 0])}, r"site\[2\] is 1, expected 0 to 0"),
        ({"sites": ("x", "y"), "site": FOUR}, "'y' owns no image"),
        ({"sites": ("x",), "site": FOUR[:3]}, r"expected int64 \[4\]"),
        (
            {"sites": ("x",), "site": 0 * FOUR, "test_site": FOUR + 1},
            r"test_site\[0\] is 1, expected 0 to 0 for 1 sites",
        ),
        ({"mean": (0.5, 0.5)}, "expected 1 finite"),
        ({"mean": (float("nan"),)}, "expected 1 finite"),
        ({"std": (0.0,)}, "above 0"),
    ],
)
def test_a_broken_data_set_is_refused_with_what_is_wrong(changes, message):
    with pytest.raises(DataError, match=f"^mine: .*{message}"):
        check(replace(tiny.dataset(**TWO), **changes), "mine")


@pytest.mark.parametrize("given", [{}, {"mean": (0.2, 0.3, 0.4)}, {"std": np.array([0.1, 0.2, 0.3])}])
def test_mean_and_deviation_are_measured_where_they_are_not_given(given):
    found = check(tiny.dataset(channels=3, **({"mean": (), "std": ()} | given)), "mine")
    mean, std = measure(found.images)
    np.testing.assert_array_equal(found.mean, given.get("mean", mean))
    np.testing.assert_array_equal(found.std, given.get("std", std))


def test_mean_and_deviation_are_those_of_the_pixels():
    images = np.random.default_rng(0).integers(0, 256, (1203, 5, 4, 3), dtype=np.uint8)
    mean, std = measure(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 1, 2)), rtol=1e-12)
    assert measure(np.full((3, 4, 4, 1), 51, dtype=np.uint8)) == (pytest.approx((0.2,)), (1.0,))
