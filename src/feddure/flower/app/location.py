"""Where images of a federation lie: a folder, or `folder:PATH?depth=12` where its 16-bit files use fewer bits.

Size and channels are the federation's, and the same everywhere; how many bits its files use each place knows itself.
"""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from feddure.data.sources.images import FULL_DEPTH, LEAST_DEPTH
from feddure.errors import ConfigError

_PREFIX = "folder:"


@dataclass(frozen=True)
class Place:
    """A folder of images, and the bits that grey values in its 16-bit files use."""

    folder: Path
    depth: int = FULL_DEPTH

    def __str__(self) -> str:
        return str(self.folder) if self.depth == FULL_DEPTH else f"{_PREFIX}{self.folder}?depth={self.depth}"

    def resolve(self) -> "Place":
        """The same place by its absolute path."""
        return Place(self.folder.resolve(), self.depth)


def read(text: str, option: str) -> Place:
    """The place that an option names."""
    if not text.startswith(_PREFIX):
        return Place(Path(text).expanduser())
    location, _, query = text.removeprefix(_PREFIX).partition("?")
    if not location:
        raise ConfigError(f"{option} {text}: no folder was named; expected {_PREFIX}PATH?depth=12")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise ConfigError(f"{option} {text}: expected ?depth=12 after the path") from None
    depth = given.pop("depth", str(FULL_DEPTH))
    for name in given:
        reason = "is the federation's, see federation.yaml" if name in ("size", "channels") else "is unknown"
        raise ConfigError(f"{option} {text}: '{name}' {reason}; expected no other option than depth")
    if not (depth.isascii() and depth.isdigit() and LEAST_DEPTH <= int(depth) <= FULL_DEPTH):
        raise ConfigError(f"{option} {text}: depth is '{depth}', expected {LEAST_DEPTH} to {FULL_DEPTH} bits")
    return Place(Path(location).expanduser(), int(depth))
