"""Texts that cross the border between a site and the server."""

import pytest

from feddure.errors import DataError
from feddure.flower.app.sanitize import disclosed, one_line, printable, public_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("feddure: round 1/5 · 32.2 %\nÅse", "feddure: round 1/5 · 32.2 %\nÅse"),
        ("\x1b[92mINFO\x1b[0m :", "INFO :"),
        ("\x1b]0;a title\x07rest", "rest"),
        ("\x1b]52;c;aGk=\x1b\\rest", "rest"),
        ("a\x1bcb", "a\N{REPLACEMENT CHARACTER}cb"),
        ("a\tb\rc\u2028d", "a b c d"),
        ("a\x9b2Jb\x00\u202e", "a\N{REPLACEMENT CHARACTER}2Jb" + 2 * "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text, shown):
    assert printable(text) == shown
    assert one_line(text) == shown.replace("\n", " ")


def test_a_text_is_bounded():
    assert printable("a" * 5000, 10) == "a" * 10 + " … (4,990 more)"
    assert len(one_line("x\n" * 5000)) < 330
    assert one_line(12) == "12"


def test_an_error_is_told_as_far_as_it_may_be():
    assert public_text(DataError("/home/jane: no")) == "DataError at the site; its log has the details"
    assert public_text(disclosed(DataError("/home/jane: no"), "a folder")) == "a folder"
    assert public_text(disclosed(DataError("nothing of the site"))) == "nothing of the site"
