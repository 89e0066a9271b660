"""Looks of methods: fixed for those of this project, and never the same twice in a figure."""

import itertools

import pytest

from feddure.methods import METHODS
from feddure.studies.paper.looks import looks, text_colour

BUILT_IN = [(name, "") for name in METHODS]
OWN = [(f"mine:Method{number}", "") for number in range(20)]


def seen(look):
    return look["color"], look["marker"], look["linestyle"]


def line(look):
    return look["color"], look["linestyle"]


def test_every_method_of_this_project_has_a_colour_and_line_of_its_own():
    assert len({line(look) for look in looks(BUILT_IN).values()}) == len(BUILT_IN)


def test_methods_of_this_project_look_the_same_in_any_company():
    alone = {pair: looks([pair])[pair] for pair in BUILT_IN}
    assert looks([*OWN, *reversed(BUILT_IN)]).items() >= alone.items()


def test_methods_of_a_users_own_differ_from_each_other_and_from_all_others():
    found = looks([*BUILT_IN, *OWN])
    assert len({seen(look) for look in found.values()}) == len(found)
    own = [found[pair] for pair in OWN]
    assert len({line(look) for look in own[:8]}) == 8
    assert not {look["color"] for look in own} & {found[pair]["color"] for pair in BUILT_IN}


def test_methods_of_a_users_own_are_told_apart_by_their_order():
    first, second = looks(OWN[:2]).values()
    assert first["color"] != second["color"]
    assert list(looks(OWN[5:7]).values()) == [first, second]


def test_changes_by_options_keep_the_colour_and_differ_in_their_lines():
    pairs = [*itertools.product(("fedavg-fixmatch", "fedprox-fixmatch", "mine:A"), ("", "a=1", "a=2"))]
    found = looks(pairs)
    assert len({line(look) for look in found.values()}) == len(pairs)
    for method, options in pairs:
        assert found[method, options]["color"] == found[method, ""]["color"]
    assert found["fedavg-fixmatch", "a=1"]["linestyle"] == ":"


def test_many_changes_of_one_method_still_differ():
    found = looks([("feddure", f"a={number}") for number in range(30)])
    assert len({seen(look) for look in found.values()}) == 30


@pytest.mark.parametrize("pair", [*BUILT_IN, *OWN[:2]])
def test_names_beside_lines_can_be_read(pair):
    colour = text_colour(looks([pair])[pair])
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    luminance = sum(part * share for part, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert 1.05 / (luminance + 0.05) >= 3.0
