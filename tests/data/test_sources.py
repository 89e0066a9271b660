"""Names of data sets, the user's own functions, and what is said when a name is wrong."""

import sys
from pathlib import Path

import numpy as np
import pytest

from feddure.data import sources
from feddure.data.dataset import Dataset
from feddure.data.sources import places
from feddure.data.sources.normalisation import measure
from feddure.errors import DataError

MODULE = """
import numpy as np
from feddure.data.dataset import Dataset

def good():
    images = np.arange(4 * 8 * 8, dtype=np.uint8).reshape(4, 8, 8, 1)
    labels = np.array([0, 1, 0, 1])
    return Dataset("mine", images, labels, images, labels, ("a", "b"), (0.5,), (0.25,))

def wrong_type():
    return [1, 2, 3]

number = 3
"""


def tiny(**changes: object) -> Dataset:
    images = np.zeros((4, 8, 8, 1), dtype=np.uint8)
    labels = np.array([0, 1, 0, 1])
    fields = {
        "name": "tiny",
        "images": images,
        "labels": labels,
        "test_images": images,
        "test_labels": labels,
        "classes": ("a", "b"),
        "mean": (0.5,),
        "std": (0.25,),
    }
    return Dataset(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SOURCES", dict(sources._SOURCES))


@pytest.mark.parametrize(
    ("name", "meant"), [("cifar", "cifar10"), ("Fashion-Mini", "fashion-mini"), ("cinic", "cinic10")]
)
def test_an_unknown_name_lists_what_there_is_and_suggests_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(DataError, match=f"fashion-mnist.*npz:PATH.*did you mean '{meant}'") as caught:
        sources.load(name)
    assert f"'{name}'" in str(caught.value)


def test_a_name_like_nothing_gets_no_suggestion() -> None:
    with pytest.raises(DataError) as caught:
        sources.load("zzzzzz")
    assert "did you mean" not in str(caught.value)


def test_a_registered_function_is_loaded_by_its_name(registry: None) -> None:
    dataset = tiny()
    sources.register("mine", lambda: dataset)
    assert sources.load("mine") is dataset
    assert "mine" in [source.name for source in sources.sources()]


@pytest.mark.parametrize("name", ["cifar10", "a:b", "", "a?b"])
def test_a_name_that_is_taken_or_reads_as_something_else_is_refused(registry: None, name: str) -> None:
    with pytest.raises(DataError, match="data set name"):
        sources.register(name, tiny)


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data_found.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = list(sys.path)
    assert sources.load("own_data_found:good").classes == ("a", "b")
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_data:absent", "own_data has no class or function 'absent'"),
        ("own_data:number", "own_data has no class or function 'number'"),
        ("own_data:wrong_type", "returned a list, expected a Dataset"),
        ("no_such_module_here:f", "cannot import no_such_module_here"),
        ("fodler:/some/where", "folder:PATH"),
        ("own_data:", "package.module:name"),
    ],
)
def test_mistakes_in_a_function_name_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match=message):
        sources.load(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": [1, 2]}, "images is a list, expected a numpy array"),
        ({"images": np.zeros((4, 8, 8, 1))}, "float64, expected uint8"),
        ({"images": np.zeros((4, 1, 8, 8), dtype=np.uint8)}, "1 or 3 channels"),
        ({"images": np.zeros((0, 8, 8, 1), dtype=np.uint8)}, "empty"),
        ({"test_images": np.zeros((4, 9, 8, 1), dtype=np.uint8)}, "must agree"),
        ({"classes": ("a",)}, "2 or more"),
        ({"classes": ("a", "a")}, "repeat"),
        ({"labels": np.array([0, 1])}, r"\[2\], expected \[4\]"),
        ({"labels": np.array([0, 1, 0, 1], dtype=np.int32)}, "int32, expected int64"),
        ({"labels": np.array([0, 1, 5, 1])}, r"labels\[2\] is 5, expected 0 to 1"),
        ({"test_labels": np.array([0, -1, 0, 1])}, r"test_labels\[1\] is -1"),
        ({"labels": np.array([0, -1, 0, 1])}, "`labelled` does not say so"),
        ({"labelled": np.ones(3, dtype=bool)}, r"expected bool \[4\]"),
        ({"labelled": np.zeros(4, dtype=bool)}, "no image at all"),
        ({"labels": np.array([0, -1, 0, 1]), "labelled": np.ones(4, dtype=bool)}, r"labelled\[1\] is true"),
        ({"sites": ("x",)}, "does not say which"),
        ({"sites": ("x",), "site": np.array([0, 0, 1, 0])}, r"site\[2\] is 1, expected 0 to 0"),
        ({"sites": ("x", "y"), "site": np.zeros(4, dtype=np.int64)}, "'y' owns no image"),
        ({"sites": ("x",), "site": np.zeros(3, dtype=np.int64)}, r"expected int64 \[4\]"),
        ({"mean": (0.5, 0.5)}, "expected 1 finite"),
        ({"mean": (float("nan"),)}, "expected 1 finite"),
        ({"std": (0.0,)}, "above 0"),
    ],
)
def test_a_function_that_returns_a_broken_data_set_is_told_what_is_wrong(
    registry: None, changes: dict[str, object], message: str
) -> None:
    sources.register("mine", lambda: tiny(**changes))
    with pytest.raises(DataError, match=message) as caught:
        sources.load("mine")
    assert "'mine'" in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"mean": (0.2, 0.3, 0.4)}, {"std": np.array([0.1, 0.2, 0.3])}])
def test_mean_and_deviation_are_measured_where_they_are_not_given(registry: None, given: dict[str, object]) -> None:
    pixels = np.random.RandomState(1).randint(0, 256, size=(4, 8, 8, 3)).astype(np.uint8)
    sources.register("mine", lambda: tiny(**{"images": pixels, "test_images": pixels, "mean": (), "std": ()} | given))
    found = sources.load("mine")
    mean, std = measure(pixels)
    np.testing.assert_array_equal(found.mean, given.get("mean", mean))
    np.testing.assert_array_equal(found.std, given.get("std", std))


def test_the_data_folder_is_the_variable_or_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDDURE_DATA", "~/sets")
    assert sources.default_data_dir() == tmp_path / "sets"
    monkeypatch.delenv("FEDDURE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.default_data_dir() == tmp_path / "xdg" / "feddure"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert sources.default_data_dir() == tmp_path / ".cache" / "feddure"


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert places.cache_dir() == tmp_path / "Library" / "Caches" / "feddure"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert places.cache_dir() == tmp_path / "Local" / "feddure" / "Cache"


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist", "cinic10", "folder:nowhere", "npz:nowhere.npz"])
def test_what_is_not_there_is_refused_before_it_is_read(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as early:
        sources.expect_present(name, tmp_path)
    with pytest.raises(DataError) as late:
        sources.load(name, tmp_path)
    assert str(early.value) == str(late.value)


def test_what_is_there_is_not_read_to_know_it(tmp_path: Path, monkeypatch, registry: None) -> None:
    sources.register("mine", lambda: pytest.fail("it was read"))
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(sources, "load", lambda *_: pytest.fail("it was read"))
    for name in ("fashion-mini", "mine", f"folder:{tmp_path / 'images'}?test=0.2", "package.module:function"):
        sources.expect_present(name, tmp_path)


def test_mean_and_deviation_are_those_of_the_pixels() -> None:
    images = np.random.default_rng(0).integers(0, 256, (1203, 5, 4, 3), dtype=np.uint8)
    mean, std = measure(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 1, 2)), rtol=1e-12)


def test_a_constant_channel_can_be_divided_by_its_deviation() -> None:
    mean, std = measure(np.full((3, 4, 4, 1), 51, dtype=np.uint8))
    assert mean == pytest.approx((0.2,))
    assert std == (1.0,)
