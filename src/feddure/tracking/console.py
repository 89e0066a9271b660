"""What a person sees while rounds go by: a progress bar on a terminal, plain lines anywhere else.

Both watch the round loop and write to standard error; standard output is for results: `summary_table`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from feddure.tracking.observer import Observer
from feddure.tracking.records import Record, Run
from feddure.tracking.summary import NOTHING, points, summarise
from feddure.tracking.summary import duration as spoken_duration

_CAPTION = "test accuracy in %: last, mean of last 10; local steps: total, per client and round"
_WINDOW = 50  # rounds over which speed is measured
Clock = Callable[[], float]


def console_observer(console: Console | None = None) -> "Progress | PlainLog":
    """A progress bar where standard error is a terminal, else one line for each evaluation."""
    console = console or Console(stderr=True)
    interactive = console.is_terminal and not console.is_dumb_terminal
    return Progress(console) if interactive else PlainLog(console)


class _Speed(Observer):
    """How fast rounds go by, of one run or of several one after the other."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._began = clock()
        self.begin("")

    def begin(self, name: str, rounds_after: int = 0) -> None:
        """The next run is called so, and this many rounds of further runs come after it."""
        self.name = name
        self._rounds_after = rounds_after
        self._clients = 0
        self._warm = False
        self._marks = deque([(self._clock(), 0)], maxlen=_WINDOW)

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        self._clients += len(record.get("clients", ()))
        self._marks.append((self._clock(), self._clients))
        if not self._warm and len(self._marks) == 3:
            self._marks.popleft()  # the first round also pays for warming up, and would make the rest look long
            self._warm = True
        self._rounds_left = self._rounds_after + federation.experiment.rounds - record["round"]

    @property
    def elapsed(self) -> float:
        return self._marks[-1][0] - self._began

    def speed_and_time_left(self) -> str:
        (then, before), (now, after), rounds = self._marks[0], self._marks[-1], len(self._marks) - 1
        clients = f"{(after - before) / (now - then):.1f}" if now > then else NOTHING
        return f"{clients} clients/s  left {_clock((now - then) / rounds * self._rounds_left)}"


class Progress(_Speed):
    """A bar for the rounds of the run under way."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        columns = (
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[result]}"),
            TextColumn("{task.fields[speed]}", style="dim"),
        )
        # Standard output is left alone, so that results can be piped away while the bar is shown.
        self.bars = Bars(*columns, console=console or Console(stderr=True), expand=True, redirect_stdout=False)
        self._bar: TaskID | None = None
        super().__init__(clock)

    def begin(self, name: str, rounds_after: int = 0) -> None:
        super().begin(name, rounds_after)
        if self._bar is not None:  # that of an earlier run is on the screen already
            self.bars.remove_task(self._bar)
        self._bar = None

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        """Move the bar on; accuracy and loss stay those of the last evaluation."""
        super().round_done(federation, record, seconds)
        if self._bar is None:
            name = f"{self.name}  round" if self.name else "round"
            self._bar = self.bars.add_task(name, total=federation.experiment.rounds, result="", speed="")
            self.bars.start()
        speed = f"{_clock(self.elapsed)}  {self.speed_and_time_left()}"
        self.bars.update(self._bar, completed=record["round"], speed=speed)
        if "test" in record:
            self.bars.update(self._bar, result=_result(record["test"]))

    def close(self) -> None:
        """Leave the bars as they are and give the terminal back."""
        self.bars.stop()


class PlainLog(_Speed):
    """One line for the first round and for each evaluation, for logs and pipes."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        self._console = console or Console(stderr=True)
        super().__init__(clock)

    def begin(self, name: str, rounds_after: int = 0) -> None:
        super().begin(name, rounds_after)
        self._silent = True

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        """Write a line where there is something new to say."""
        super().round_done(federation, record, seconds)
        if not self._silent and "test" not in record:
            return
        self._silent = False
        parts = [self.name] if self.name else []
        parts.append(f"round {record['round']}/{federation.experiment.rounds}")
        if "test" in record:
            parts.append(_result(record["test"]))
        if record.get("test_ema"):
            parts.append(f"averaged {_number(record['test_ema'].get('accuracy'), 3)}")
        if "loss" in record.get("train", {}):
            parts.append(f"train loss {_number(record['train']['loss'], 2)}")
        line = "  ".join([*parts, self.speed_and_time_left()])
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_table(runs: Sequence[Run]) -> Table:
    """The numbers of one run below each other, or of several with a row each, for standard output."""
    summaries = [summarise(run.metrics, run.timing) for run in runs]
    if len(runs) == 1:
        table = Table("", escape(runs[0].name), box=SIMPLE_HEAD)
        for name, value in summaries[0].rows():
            table.add_row(name, value)
        return table
    averaged = any(found.accuracy_ema_last10 is not None for found in summaries)
    ahead = ["rounds", "last", "last 10", *(["averaged"] if averaged else [])]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_CAPTION, caption_justify="left")
    table.add_column("run", min_width=min(20, max(len(run.name) for run in runs)), overflow="fold")
    for name in (*ahead, "steps", "each", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for run, found in zip(runs, summaries, strict=True):
        table.add_row(
            escape(run.name),
            f"{found.rounds}" if run.finished else f"{found.rounds} of {run.experiment.rounds}",
            points(found.accuracy_last),
            points(found.accuracy_last10),
            *([points(found.accuracy_ema_last10)] if averaged else []),
            f"{found.local_steps:,}",
            _number(found.mean_local_steps, 1),
            spoken_duration(found.seconds),
        )
    return table


def _result(test: dict[str, Any]) -> str:
    return f"accuracy {_number(test.get('accuracy'), 3)}  loss {_number(test.get('loss'), 2)}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _clock(seconds: float) -> str:
    """Seconds as 0:01:10."""
    return str(timedelta(seconds=round(seconds)))
