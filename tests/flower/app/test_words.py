"""Texts that cross the border between a site and the server."""

import pytest

from feddure.errors import DataError
from feddure.flower.app.sanitize import plain, public_text, sayable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Zürich 1", "Zürich 1"),
        ("a\nb\tc\rd", "a b c d"),
        ("\x1b[2J", " [2J"),
        ("a\u202eb\u2028c\x85d", "a b c d"),
        (b"bytes", "b'bytes'"),
        (12, "12"),
    ],
)
def test_a_text_becomes_one_line_of_printable_characters(text, expected):
    assert plain(text) == expected


def test_a_text_is_bounded():
    assert plain("x" * 300) == "x" * 300
    assert plain("x" * 301) == "x" * 299 + "…"
    assert plain("abc", most=2) == "a…"


def test_an_error_is_told_as_far_as_it_may_be():
    assert public_text(DataError("/home/jane: no")) == "DataError at the site; its log has the details"
    assert public_text(sayable(DataError("/home/jane: no"), "a folder")) == "a folder"
    assert public_text(sayable(DataError("nothing of the site"))) == "nothing of the site"
