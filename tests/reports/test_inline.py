"""Figures as a page holds them: what can be pointed at and hidden, and colours that a dark page replaces."""

import xml.etree.ElementTree as ElementTree

import pytest

from feddure.reports import inline, style

pytestmark = pytest.mark.filterwarnings("ignore:Glyph")

NAME = "mine \\$ <b>\x01\nagain"


def drawn():
    """Two parts below each other; a line with a band and error bars, and one that has no legend."""
    with style.applied():
        figure = style.new_figure(4, 4)
        upper, lower = figure.subfigures(2, 1)
        axes = upper.subplots()
        (line,) = axes.plot([1, 2, 3], [0.5, float("nan"), 0.75], color=style.BLACK, marker="v", label=NAME)
        axes.fill_between([1, 3], [0, 0], [1, 1], gid=inline.part_of(NAME))
        axes.set_xlabel("round")
        lower.subplots().errorbar([1, 10], [2, 3], [1, 1], label="other")
        style.legend(figure, [NAME], [line])
    return figure


def test_lines_tell_their_values_where_they_lie():
    figure = drawn()
    inline.svg(figure)
    upper, lower = inline.values(figure)["panels"]
    (mine,), (other,) = upper["lines"], lower["lines"]
    assert mine["points"] == [[1, 0.5], [3, 0.75]]
    assert mine["name"].startswith("mine $ <b>")
    assert other["points"] == [[1, 2], [10, 3]]
    assert 0 < upper["box"][1] < upper["box"][3] < lower["box"][1] < lower["box"][3] < 1
    assert upper["y"][0] <= 0 < 1 <= upper["y"][1]


def test_all_parts_of_a_line_are_marked_also_in_the_legend_and_nothing_has_an_id_twice():
    figure = drawn()
    root = ElementTree.fromstring(inline.svg(figure))
    marked = [element for element in root.iter() if element.get("data-series")]
    (legend,) = (element for element in root.iter() if element.get("class") == "legend")
    assert sum(element.get("data-series") == "0" for element in legend.iter()) == 2
    assert sum(element.get("data-series") == "0" for element in marked) == 4  # its line and band too
    assert sum(element.get("data-series") == "1" for element in marked) > 1
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(set(ids)) == len(ids)
    used = {element.get("href", "#")[1:] for element in root.iter()} - {""}
    assert used <= set(ids)


@pytest.mark.parametrize("colour", style.DARK)
def test_a_dark_page_can_replace_every_colour_that_it_must(colour):
    with style.applied():
        figure = style.new_figure(2, 2)
        figure.subplots().plot([1, 2], color=colour, marker="o")
    assert f"var(--{colour[1:].lower()},{colour.lower()})" in inline.svg(figure)
