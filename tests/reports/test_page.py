"""Pages as Markdown; as HTML they are tested by what has them."""

from feddure.reports import page


def test_a_table_as_markdown_shows_its_texts_as_they_are():
    text = page.markdown(page.Table(["name", "value"], [["a|b", "1.5"], ["<i>", "2\nlines"]], numbers_from=1))
    assert text.splitlines() == [
        "| name | value |",
        "| --- | ---: |",
        r"| a\|b | 1.5 |",
        r"| \<i> | 2 lines |",
    ]
