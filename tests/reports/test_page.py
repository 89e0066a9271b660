"""Pages as Markdown; as HTML they are tested by what has them."""

import pytest
from markdown_it import MarkdownIt

from feddure.reports import page


def test_a_table_as_markdown_shows_its_texts_as_they_are():
    text = page.markdown(page.Table(["name", "value"], [["a|b", "1.5"], ["<i>", "2\nlines"]], numbers_from=1))
    assert text.splitlines() == [
        "| name | value |",
        "| --- | ---: |",
        r"| a\|b | 1.5 |",
        r"| \<i> | 2 lines |",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖² falls, and ‖θ_T − θ_0‖ / ‖θ_0‖ with η_s²",
        "FedAvg-UDA − FedAvg* (DIR-DIR): +0.4; FedAvg*: 2*3*4, *a*, **b** and FedAvg*.",
        "_one_, __two__, a_b_c, a__b__c, local_steps",
    ],
)
def test_signs_of_formulas_and_names_are_not_lost(text):
    shown = MarkdownIt("gfm-like", {"linkify": False}).parseInline(page.markdown(page.Text(text)))[0].children
    assert [(each.type, each.content) for each in shown] == [("text", text)]


@pytest.mark.parametrize(
    "text",
    ["\\<img src=http://evil/x>", "![x](http://evil/x)", "[a](http://evil)", "\\![x](y)", "\\[x](y)", "[x\\](y)"],
)
def test_no_text_of_a_table_becomes_an_image_or_a_link(text):
    """Who opens a table of a stranger's sweep asks no server for a picture."""
    table = page.markdown(page.Table(["name"], [[text]]))
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(table)
    assert "<img" not in shown
    assert "<a " not in shown
