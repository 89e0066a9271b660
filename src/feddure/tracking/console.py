"""What a person sees while rounds go by: progress bars on a terminal, plain lines anywhere else.

Both go to standard error; standard output is for results: `summary_table`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from feddure.terminal import Console
from feddure.tracking.metrics import TITLES
from feddure.tracking.observer import Observer
from feddure.tracking.records import TIMING, Record, Run
from feddure.tracking.sites import mean_own_mix
from feddure.tracking.summary import NOTHING, evaluations, model_to_use, number, percent, summarise

_SECONDS_BETWEEN_LINES = 10.0
_WINDOW = 50  # rounds over which speed is measured
Clock = Callable[[], float]


def bars(console: Console | None, *columns: ProgressColumn) -> Bars:
    """Bars on a terminal; anywhere else they are disabled, and who has them writes lines (`say`)."""
    console = console or Console(stderr=True)
    hidden = not console.is_terminal or console.is_dumb_terminal
    # Standard output is left alone, so that results can be piped away while bars are shown.
    return Bars(*columns, console=console, expand=True, redirect_stdout=False, disable=hidden)


def say(bars: Bars, line: str) -> None:
    """A line above the bars."""
    bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


def close(bars: Bars) -> None:
    """Leave the bars as they are and give the terminal back."""
    if not bars.disable:
        bars.stop()


class Progress(Observer):
    """The rounds of a run, or of several one after the other, and how fast they go by.

    A bar on a terminal, else one line for the first round and for each evaluation; those of several runs would fill a
    log: there is a line every ten seconds and at the end of each.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        columns = (
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[result]}"),
            TextColumn("{task.fields[speed]}", style="dim"),
        )
        self.bars = bars(console, *columns)
        self._clock = clock
        self._next_line = -math.inf

    def begin(self, rounds: int, done: int = 0, name: str = "", rounds_after: int = 0) -> None:
        """A run of so many rounds begins, some of them `done`; further runs with `rounds_after` come after it."""
        self.name = name
        self._rounds_left = rounds - done + rounds_after
        self._rounds_after = rounds_after
        self._clients = 0
        self._warm = False
        self._marks = deque([(self._clock(), 0)], maxlen=_WINDOW)
        for before in self.bars.task_ids:  # that of an earlier run is on the screen already
            self.bars.remove_task(before)
        title = f"{name}  round" if name else "round"
        self._bar = self.bars.add_task(title, completed=done, total=rounds, result="", speed="")
        self.bars.start()

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        """Move the bar on, where metric and loss stay those of the last evaluation, or write what is new."""
        first = len(self._marks) == 1
        self._clients += len(record.get("clients", ()))
        self._marks.append((self._clock(), self._clients))
        if not self._warm and len(self._marks) == 3:
            self._marks.popleft()  # the first round also pays for warming up, and would make the rest look long
            self._warm = True
        rounds = federation.experiment.rounds
        self._rounds_left = rounds - record["round"] + self._rounds_after
        result = _result(record, federation.experiment.metric)
        self.bars.update(self._bar, completed=record["round"], speed=self._speed_and_time_left())
        if result:
            self.bars.update(self._bar, result=result)
        early = self.name and self._clock() < self._next_line and record["round"] < rounds
        if self.bars.disable and (first or result) and not early:
            self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
            parts = [self.name, f"round {record['round']}/{rounds}", result]
            if averaged := record.get("test_ema"):
                parts.append(f"averaged {percent(averaged.get(federation.experiment.metric))}")
            if "loss" in record.get("train", {}):
                parts.append(f"train loss {number(record['train']['loss'], 2)}")
            say(self.bars, "  ".join(filter(None, [*parts, self._speed_and_time_left()])))

    def close(self) -> None:
        close(self.bars)

    def _speed_and_time_left(self) -> str:
        (then, before), (now, after), rounds = self._marks[0], self._marks[-1], len(self._marks) - 1
        clients = f"{(after - before) / (now - then):.1f}" if now > then else NOTHING
        left = timedelta(seconds=round((now - then) / rounds * self._rounds_left))
        return f"{clients} clients/s  left {left}"


class SideBySide:
    """The rounds of runs that several processes train, together: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, rounds: Mapping[Path, int], processes: int):
        self._rounds, self._title = rounds, f"{len(rounds)} runs, {processes} at a time"
        self._total = sum(rounds.values())
        self._began, self._before = time.monotonic(), self._done()
        self._next_refresh, self._next_line = self._began, self._began + _SECONDS_BETWEEN_LINES
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"))
        self._bars = bars(None, *columns)
        self._bar = self._bars.add_task(self._title, completed=self._before, total=self._total, text="")
        self._bars.start()

    def refresh(self) -> None:
        """Show how far they are, at most once a second."""
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + 1
        done = self._done()
        seconds = (now - self._began) * (self._total - done) / (done - self._before) if done > self._before else None
        left = NOTHING if seconds is None else timedelta(seconds=round(seconds))
        text = f"round {done}/{self._total}  left {left}"
        self._bars.update(self._bar, completed=done, text=text)
        if self._bars.disable and now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self.say(f"{self._title}  {text}")

    def say(self, line: str) -> None:
        say(self._bars, line)

    def close(self) -> None:
        close(self._bars)

    def _done(self) -> int:
        """Rounds in all folders: each is a line of its times."""
        files = (folder / TIMING for folder in self._rounds)
        return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


def summary_table(run: Run) -> Table:
    """The numbers of a run, for standard output."""
    table = Table("", escape(run.name), box=SIMPLE_HEAD)
    found = summarise(run.metrics, run.timing, run.experiment.metric)
    if exported := model_to_use(run, found):
        table.add_row("the model to use", f"{percent(exported[0], 1)}, {exported[1]}")
    for name, value in found.rows():
        table.add_row(name, value)
    averaged = evaluations(run.metrics, "accuracy", "test_ema")
    own_mix = mean_own_mix(run.metrics, run.partition, "test_ema" if averaged else "test")
    if own_mix is not None:
        model = "averaged model, " if averaged else ""
        table.add_row(f"own class mixes, {model}{found.mean_of}", percent(own_mix))
    return table


def _result(record: Record, metric: str) -> str:
    """A round's evaluation; nothing where it has none."""
    parts = []
    if test := record.get("test"):
        parts.append(f"{TITLES[metric]} {percent(test.get(metric))}  loss {number(test.get('loss'), 2)}")
    if validation := record.get("validation"):
        parts.append(f"validation {percent(validation.get(metric))}")
    return "  ".join(parts)
