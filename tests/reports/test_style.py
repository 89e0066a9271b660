"""Looks of methods, and files of figures."""

import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from PIL import Image

from feddure import methods
from feddure.errors import ConfigError
from feddure.methods.fedavg import FedAvg
from feddure.reports import inline, style


def told_apart(formats):
    return len({(fmt["color"], fmt["marker"], str(fmt.get("linestyle"))) for fmt in formats}) == len(formats)


def test_a_method_looks_the_same_in_all_figures():
    every = style.line_styles(methods.METHODS)
    assert told_apart(every.values())
    assert style.line_styles(["feddure"])["feddure"] == every["feddure"]
    for several in (["feddure", "feddure", "fedavg"], ["feddure"] * 5):
        assert told_apart(style.run_line_styles(several))


def test_methods_of_a_users_own_are_told_apart(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "mine", FedAvg)
    own = ["mine", *(f"my.code:Method{number}" for number in range(8))]
    assert told_apart(style.line_styles([*methods.METHODS, *own]).values())


def small():
    with style.applied():
        figure = style.new_figure(3, 2)
        figure.add_subplot().scatter([1, 2], [1, 3], s=[40, 90])
    return figure


def test_files_are_what_their_names_say_and_equal_figures_are_equal_files(tmp_path):
    for ending in style.FORMATS:
        for name in ("one", "two"):
            style.save(small(), tmp_path / f"{name}.{ending}")
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.size == (450, 300)
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
    assert ElementTree.fromstring(inline.svg(small())).tag.endswith("svg")


def test_files_that_cannot_be_written_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"to end in \.png, \.svg or \.pdf"):
        style.save(small(), tmp_path / "picture.jpeg")
    for place in (tmp_path / "missing" / "picture.png", tmp_path / "folder.png"):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="cannot be written"):
            style.save(small(), place)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]


def test_drawing_leaves_matplotlib_as_it_was():
    def settings():
        # Asking for the backend would choose one.
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before = settings()
    style.render(small(), "png")
    assert settings() == before
