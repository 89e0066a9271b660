"""Where images lie, as an option names it."""

from pathlib import Path

import pytest

from feddure.errors import ConfigError
from feddure.flower.app import location as place
from feddure.flower.app.location import Place


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/images", Place(Path("/images"), 16)),
        ("/what?depth=12", Place(Path("/what?depth=12"), 16)),  # a folder may be called so
        ("folder:/images", Place(Path("/images"), 16)),
        ("folder:/images?depth=12", Place(Path("/images"), 12)),
    ],
)
def test_a_place_is_read(text: str, expected: Place) -> None:
    assert place.read(text, "--data") == expected


def test_a_place_is_read_back_from_its_text() -> None:
    for found in (Place(Path("/images")), Place(Path("/images"), 12)):
        assert place.read(str(found), "--data") == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("folder:", "no folder was named"),
        ("folder:a?depth", "expected .depth=12 after the path"),
        ("folder:a?depth=7", "depth is '7', expected 8 to 16 bits"),
        ("folder:a?depth=x", "depth is 'x', expected 8 to 16 bits"),
        ("folder:a?size=32", "'size' is the federation's, see federation.yaml"),
        ("folder:a?colour=1", "'colour' is unknown"),
    ],
)
def test_a_mistake_is_explained(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"--data folder:.*{problem}"):
        place.read(text, "--data")
