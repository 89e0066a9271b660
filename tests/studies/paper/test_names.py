"""Names in figures: lines that fit, and options that all rows share."""

import pytest

import synthetic
from feddure.studies.paper import names


def rows(*options):
    return [synthetic.row("table1", "feddure", {0: 50.0}, options=text) for text in options]


def test_options_of_all_rows_are_found_with_the_spaces_in_their_values():
    found = rows("a=1 options={'note': 'x y', 'b': 2} c.d_e=4", "c.d_e=4 options={'note': 'x y', 'b': 2} a=2")
    assert names.shared(found) == ("options={'note': 'x y', 'b': 2}", "c.d_e=4")
    assert [row.options for row in names.without(found, names.shared(found))] == ["a=1", "a=2"]


def test_a_row_without_options_shares_none():
    assert names.shared(rows("a=1", "")) == names.shared([]) == ()
    assert [row.options for row in names.without(rows("a=1", ""), ())] == ["a=1", ""]


def test_short_names_stay_in_one_line():
    assert names.fitted("FedAvg*, matched steps", 3.0) == ["FedAvg*, matched steps"]


@pytest.mark.parametrize("weight", ["normal", "bold"])
def test_lines_are_broken_at_spaces_and_never_wider_than_their_room(weight):
    text = "FedMatch, fedmatch.optimizer=common fedmatch.helpers=4 local_steps=2"
    lines = names.fitted(text, 3.0, 9, weight)
    assert len(lines) > 1
    assert " ".join(lines) == text
    assert names.inches(lines, 9, weight) <= 3.0


def test_words_wider_than_the_room_are_broken_where_a_part_ends():
    assert names.fitted("my_laboratory.methods:MyMethod", 1.8) == ["my_laboratory.methods:", "MyMethod"]
    lines = names.fitted("W" * 40, 1.0)
    assert len(lines) > 1
    assert "".join(lines) == "W" * 40
    assert names.inches(lines) <= 1.0


def test_a_name_without_end_has_one_and_room_for_no_letter_is_no_endless_loop():
    lines = names.fitted("x" * 10_000 + " y" * 10_000, 2.0, most=3)
    assert len(lines) == 3
    assert lines[-1].endswith("x…")
    assert names.inches(lines) <= 2.0
    assert names.fitted("abc", 0.0) == ["a", "b", "c"]


def test_what_fills_its_lines_exactly_is_whole():
    assert names.fitted("a b c", 0.1, most=3) == ["a", "b", "c"]
    assert names.fitted("a b c d", 0.1, most=3)[-1] == "…"
