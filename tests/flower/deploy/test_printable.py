"""Text of others on the operator's terminal."""

import pytest

from feddure.flower.deploy.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("feddure: round 1/5 · 32.2 %\nÅse", "feddure: round 1/5 · 32.2 %\nÅse"),
        ("\x1b[92mINFO\x1b[0m :", "INFO :"),
        ("\x1b]0;a title\x07rest", "rest"),
        ("\x1b]52;c;aGk=\x1b\\rest", "rest"),
        ("a\x1bcb", "a\N{REPLACEMENT CHARACTER}cb"),
        ("a\tb\rc", "a b c"),
        ("a\x9b2Jb\x00\u202e", "a\N{REPLACEMENT CHARACTER}2Jb" + 2 * "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_text_is_cut() -> None:
    assert printable("a" * 5000, 10) == "a" * 10 + " … (4,990 more)"
