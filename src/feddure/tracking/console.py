"""What a person sees while rounds go by: a progress bar on a terminal, plain lines anywhere else.

Both are observers and write to standard error; standard output is for results: `summary_table`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from feddure.tracking.metrics import TITLES
from feddure.tracking.observer import Observer
from feddure.tracking.records import TIMING, Record, Run
from feddure.tracking.sites import mean_own_mix
from feddure.tracking.summary import NOTHING, evaluations, number, percent, summarise

_SECONDS_BETWEEN_LINES = 10.0
_WINDOW = 50  # rounds over which speed is measured
Clock = Callable[[], float]


def console_observer(console: Console | None = None) -> "Progress | PlainLog":
    """A progress bar where standard error is a terminal, else one line for each evaluation."""
    console = console or Console(stderr=True)
    return Progress(console) if _shows_bars(console) else PlainLog(console)


def _shows_bars(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


class _Speed(Observer):
    """How fast rounds go by, of one run or of several one after the other."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock

    def begin(self, rounds: int, done: int = 0, name: str = "", rounds_after: int = 0) -> None:
        """A run of so many rounds begins, some of them `done`; further runs with `rounds_after` come after it."""
        self.name = name
        self._rounds_left = rounds - done + rounds_after
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
        self._rounds_left = federation.experiment.rounds - record["round"] + self._rounds_after

    def speed_and_time_left(self) -> str:
        (then, before), (now, after), rounds = self._marks[0], self._marks[-1], len(self._marks) - 1
        clients = f"{(after - before) / (now - then):.1f}" if now > then else NOTHING
        left = timedelta(seconds=round((now - then) / rounds * self._rounds_left))
        return f"{clients} clients/s  left {left}"


class Progress(_Speed):
    """A bar for the rounds of the run under way."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        super().__init__(clock)
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

    def begin(self, rounds: int, done: int = 0, name: str = "", rounds_after: int = 0) -> None:
        super().begin(rounds, done, name, rounds_after)
        if self._bar is not None:  # that of an earlier run is on the screen already
            self.bars.remove_task(self._bar)
        title = f"{name}  round" if name else "round"
        self._bar = self.bars.add_task(title, completed=done, total=rounds, result="", speed="")
        self.bars.start()

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        """Move the bar on; metric and loss stay those of the last evaluation."""
        super().round_done(federation, record, seconds)
        assert self._bar is not None
        self.bars.update(self._bar, completed=record["round"], speed=self.speed_and_time_left())
        if result := _result(record, federation.experiment.metric):
            self.bars.update(self._bar, result=result)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self.bars.stop()


class PlainLog(_Speed):
    """One line for the first round and for each evaluation, for logs and pipes.

    Several runs, one after the other, would fill a log: there is a line every ten seconds and at the end of each.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        super().__init__(clock)
        self._console = console or Console(stderr=True)
        self._next_line = -math.inf

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        """Write a line where there is something new to say."""
        first = len(self._marks) == 1
        super().round_done(federation, record, seconds)
        metric = federation.experiment.metric
        result = _result(record, metric)
        if not first and not result:
            return
        if self.name and self._clock() < self._next_line and record["round"] < federation.experiment.rounds:
            return
        self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
        parts = [self.name, f"round {record['round']}/{federation.experiment.rounds}", result]
        if averaged := record.get("test_ema"):
            parts.append(f"averaged {percent(averaged.get(metric))}")
        if "loss" in record.get("train", {}):
            parts.append(f"train loss {number(record['train']['loss'], 2)}")
        line = "  ".join(filter(None, [*parts, self.speed_and_time_left()]))
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class SideBySide:
    """The rounds of runs that several processes train, together: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, rounds: Mapping[Path, int], processes: int):
        self._rounds, self._console = rounds, Console(stderr=True)
        self._title = f"{len(rounds)} runs, {processes} at a time"
        self._total = sum(rounds.values())
        self._began, self._before = time.monotonic(), self._done()
        self._next_look, self._next_line = self._began, self._began + _SECONDS_BETWEEN_LINES
        self._bars: Bars | None = None
        if _shows_bars(self._console):
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"))
            self._bars = Bars(*columns, console=self._console, expand=True, redirect_stdout=False)
            self._bar = self._bars.add_task(self._title, completed=self._before, total=self._total, text="")
            self._bars.start()

    def look(self) -> None:
        """Show how far they are, at most once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1
        done = self._done()
        seconds = (now - self._began) * (self._total - done) / (done - self._before) if done > self._before else None
        left = NOTHING if seconds is None else timedelta(seconds=round(seconds))
        text = f"round {done}/{self._total}  left {left}"
        if self._bars is not None:
            self._bars.update(self._bar, completed=done, text=text)
        elif now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self.say(f"{self._title}  {text}")

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bars is not None:
            self._bars.stop()

    def _done(self) -> int:
        """Rounds in all folders: each is a line of its times."""
        files = (folder / TIMING for folder in self._rounds)
        return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


def summary_table(run: Run) -> Table:
    """The numbers of a run, for standard output."""
    table = Table("", escape(run.name), box=SIMPLE_HEAD)
    for name, value in summarise(run.metrics, run.timing, run.experiment.metric).rows():
        table.add_row(name, value)
    model = "test_ema" if evaluations(run.metrics, "accuracy", "test_ema") else "test"
    own_mix = mean_own_mix(run.metrics, run.partition, model)
    if own_mix is not None:
        table.add_row("under clients' own class mixes, mean", percent(own_mix))
    return table


def _result(record: Record, metric: str) -> str:
    """A round's evaluation; nothing where it has none."""
    parts = []
    if test := record.get("test"):
        parts.append(f"{TITLES[metric]} {percent(test.get(metric))}  loss {number(test.get('loss'), 2)}")
    if validation := record.get("validation"):
        parts.append(f"validation {percent(validation.get(metric))}")
    return "  ".join(parts)
