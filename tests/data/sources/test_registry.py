"""Names of data sets, the user's own functions, and what is said when a name is wrong."""

import sys

import pytest

import tiny
from feddure import plugins
from feddure.data import sources
from feddure.errors import DataError

MODULE = """
import tiny
good = tiny.dataset
def wrong_type():
    return [1, 2, 3]
number = 3
"""


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(sources, "_SOURCES", dict(sources._SOURCES))


@pytest.mark.parametrize(("name", "meant"), [("cifar", "cifar10"), ("Fashion-Mini", "fashion-mini")])
def test_an_unknown_name_lists_what_there_is_and_suggests_the_nearest(name, meant):
    with pytest.raises(DataError, match=f"'{name}'.*fashion-mnist.*npz:PATH.*did you mean '{meant}'"):
        sources.load(name)


def test_a_registered_function_is_loaded_by_its_name_and_checked(registry):
    dataset = tiny.dataset()
    sources.register("mine", lambda: dataset)
    sources.register("broken", lambda: tiny.dataset(classes=1))
    assert sources.load("mine") is dataset
    assert "mine" in [source.name for source in sources.sources()]
    with pytest.raises(DataError, match="'broken': classes"):
        sources.load("broken")


def test_a_function_is_told_where_data_live(registry, tmp_path):
    asked = []

    def reads(data_dir, size=160):
        asked.append(data_dir)
        return tiny.dataset(size)

    sources.register("reads", reads)
    sources.load("reads", tmp_path)
    assert asked == [tmp_path]
    sources.register("odd", lambda where: tiny.dataset())
    with pytest.raises(DataError, match=r"takes \(where\), expected none or data_dir"):
        sources.load("odd")


@pytest.mark.parametrize("name", ["cifar10", "a:b", "", "a?b"])
def test_a_name_that_is_taken_or_reads_as_something_else_is_refused(registry, name):
    with pytest.raises(DataError, match="data set name"):
        sources.register(name, tiny.dataset)


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "own_data_found.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = list(sys.path)
    plugins.allow("own_data_found:good")
    assert sources.load("own_data_found:good").classes == tuple("abcd")
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_data:absent", "no class or function 'absent'"),
        ("own_data:number", "no class or function 'number'"),
        ("own_data:wrong_type", "returned a list, expected a Dataset"),
        ("no_such_module_here:f", "cannot import no_such_module_here"),
        ("fodler:/some/where", "folder:PATH"),
        ("own_data:", "package.module:name"),
    ],
)
def test_mistakes_in_a_function_name_are_explained(tmp_path, monkeypatch, name, message):
    (tmp_path / "own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    plugins.allow(name)
    with pytest.raises(DataError, match=message):
        sources.load(name)


def test_the_data_folder_is_the_variable_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDDURE_DATA", "~/sets")
    assert sources.default_data_dir() == tmp_path / "sets"
    monkeypatch.delenv("FEDDURE_DATA")
    assert sources.default_data_dir().name == "feddure"


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist", "cinic10", "folder:nowhere", "npz:nowhere.npz"])
def test_what_is_not_there_is_refused_before_it_is_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as early:
        sources.expect_present(name, tmp_path)
    with pytest.raises(DataError) as late:
        sources.load(name, tmp_path)
    assert str(early.value) == str(late.value)
    assert ":" in name or f"feddure data fetch {name}" in str(late.value)


def test_what_is_there_is_not_read_to_know_it(tmp_path, monkeypatch, registry):
    sources.register("mine", lambda: pytest.fail("it was read"))
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(sources, "load", lambda *_: pytest.fail("it was read"))
    for name in ("fashion-mini", "mine", f"folder:{tmp_path / 'images'}?test=0.2", "package.module:function"):
        sources.expect_present(name, tmp_path)
