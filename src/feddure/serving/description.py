"""What has to be known to use a model; it travels inside every file that holds one."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from feddure.data.sources import folder
from feddure.data.sources.images import FULL_DEPTH
from feddure.errors import RunError
from feddure.version import VERSION

KEY = "feddure"
"""The name under which a file keeps its description, as one JSON text."""


class Description(BaseModel):
    """The network's name, its classes in the order of its outputs, and the images it takes."""

    model_config = ConfigDict(frozen=True)

    model: str
    norm: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels / 255
    std: tuple[float, ...]
    size: int  # images are size × size pixels
    channels: int
    depth: int = FULL_DEPTH  # bits of the grey values in 16-bit files

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return self.channels, self.size, self.size

    def to_json(self) -> str:
        """The description as text, with the version that wrote it."""
        return json.dumps({"version": VERSION, **self.model_dump()}, ensure_ascii=False)


def read_description(text: str | None, where: object) -> Description:
    """The description in a file: an exported one, or the longer header of a run's own model."""
    try:
        header: dict[str, Any] = json.loads(text or "{}")
        if "experiment" in header:
            side, _, channels = header["shape"]
            depth = folder.depth_of(header["experiment"]["dataset"])
            header |= {"model": header["experiment"]["model"], "size": side, "channels": channels, "depth": depth}
        return Description.model_validate(header)
    except (ValueError, KeyError, TypeError, ValidationError):
        raise RunError(f"{where}: not a model that feddure wrote; give a run folder or an exported file") from None
