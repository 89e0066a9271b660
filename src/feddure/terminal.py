"""What is printed, without what a terminal would take for commands: names of files and sites may be anybody's."""

import re
from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

# Control signs but for tabs and ends of lines, and those that turn the direction of writing round.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Console(rich.console.Console):
    """A console that says what it is given, and obeys nothing in it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else _COMMANDS.sub("", text), style, control)
