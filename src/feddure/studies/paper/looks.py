"""Colours, lines and markers of methods. A method of this project has the same ones in all figures.

Colour says what a method learns from; FedProx instead of FedAvg, and other changes of the same idea, are dashed. What
is changed by options is dotted. Methods of a user's own come in colours that no other method has.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from feddure.reports import style
from feddure.studies.paper.rows import REFERENCE

Line = tuple[str, str]
"""A method and what it changes by options."""

Look = dict[str, Any]
"""As matplotlib's lines take it."""

# Beside the palette, no less apart from it for colour-blind readers than its own colours are from each other.
_INDIGO, _WINE, _BROWN = "#332288", "#882255", "#7A4A2A"

_LOOKS: dict[str, Look] = {
    "feddure": {"color": style.BLUE, "marker": "o", "linewidth": 2.4, "zorder": 5},
    "fedmatch": {"color": style.VERMILION, "marker": "s"},
    "fedavg-fixmatch": {"color": style.GREEN, "marker": "^"},
    "fedprox-fixmatch": {"color": style.GREEN, "marker": "^", "linestyle": "--"},
    "fedavg-uda": {"color": style.PURPLE, "marker": "D"},
    "fedprox-uda": {"color": style.PURPLE, "marker": "D", "linestyle": "--"},
    "fedavg": {"color": style.BLACK, "marker": "v", "linewidth": 1.2},
    REFERENCE: {"color": style.BLACK, "marker": "v", "linestyle": "--", "linewidth": 1.2},
    "fedavg-sl": {"color": style.ORANGE, "marker": "P"},
    "fedprox-sl": {"color": style.ORANGE, "marker": "P", "linestyle": "--"},
    "baseline+maml": {"color": style.GREEN, "marker": ">", "linestyle": "-."},
    "f-reg": {"color": style.SKY, "marker": "X"},
    "avg-f-reg": {"color": style.SKY, "marker": "X", "linestyle": "--"},
    "c-reg": {"color": _INDIGO, "marker": "p"},
    "avg-c-reg": {"color": _INDIGO, "marker": "p", "linestyle": "--"},
}

# Methods of a user's own take the next of each: 56 of them differ in one of the three, 8 in colour or line.
_OWN_COLOURS = (_WINE, _BROWN)
_OWN_LINES = ("-", "--", "-.", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)))
_OWN_MARKERS = ("X", "*", "<", "d", "h", ">", "p")

# Changes by options of methods that share a colour: markers stay the methods' own until the lines are used up.
_CHANGED_LINES = (":", (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)), (0, (2, 2)))
_CHANGED_MARKERS = ("8", "H", "1", "2", "3", "4")

_TEXT = {style.ORANGE: "#9a6a00", style.SKY: "#2a78ac"}  # text needs more contrast than lines


def looks(lines: Iterable[Line]) -> dict[Line, Look]:
    """How each line of a figure looks, unlike all others; methods of a user's own are told apart by their order."""
    found: dict[Line, Look] = {}
    own: dict[str, Look] = {}
    changed: Counter[str] = Counter()
    for method, options in dict.fromkeys(lines):
        known = _LOOKS.get(method) or own.setdefault(method, _own(len(own)))
        look: Look = {"linestyle": "-", "linewidth": 1.6} | known
        if options:
            place = changed[look["color"]]
            changed[look["color"]] += 1
            look |= _changed(place)
        found[method, options] = look
    return found


def text_colour(look: Look) -> str:
    """Of the name beside a line."""
    colour: str = look["color"]
    return _TEXT.get(colour, colour)


def _own(place: int) -> Look:
    """The look of a user's method by its place among them."""
    again, colour = divmod(place, len(_OWN_COLOURS))
    line, marker = _OWN_LINES[again % len(_OWN_LINES)], _OWN_MARKERS[place % len(_OWN_MARKERS)]
    return {"color": _OWN_COLOURS[colour], "marker": marker, "linestyle": line}


def _changed(place: int) -> Look:
    """What a change by options makes of a method's look, by its place among the changes of that colour."""
    again, line = divmod(place, len(_CHANGED_LINES))
    marker = {"marker": _CHANGED_MARKERS[(again - 1) % len(_CHANGED_MARKERS)]} if again else {}
    return {"linestyle": _CHANGED_LINES[line]} | marker
