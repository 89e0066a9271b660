"""Progress bars on standard error, so that standard output stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(
    description: str, total: int | None, shown: bool, start: int = 0, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar while the block runs; yields the function that moves it on by so many images or bytes."""
    counts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(description, total=total, completed=start)
        yield lambda amount: progress.advance(task, amount)
