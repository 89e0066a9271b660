"""What a person sees while rounds go by: a progress bar on a terminal, plain lines anywhere else.

Both watch the round loop and write to standard error; standard output is for results: `summary_table`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from feddure.config import Experiment
from feddure.tracking.records import Record, Run
from feddure.tracking.summary import NOTHING, labels, points, summarise
from feddure.tracking.summary import duration as spoken_duration

MOST_LINES = 8
"""Federations that get a line each below the overall bar."""

_CAPTION = "test accuracy in %: last, mean of last 10; local steps: total, per client and round"
_WINDOW = 50  # rounds over which speed is measured
Clock = Callable[[], float]


class Federation(Protocol):
    """What these observers know of a federation."""

    experiment: Experiment
    round: int


def console_observer(federations: Sequence[Federation], console: Console | None = None) -> "Progress | PlainLog":
    """A progress bar where standard error is a terminal, else one line for each evaluation."""
    console = console or Console(stderr=True)
    interactive = console.is_terminal and not console.is_dumb_terminal
    return Progress(federations, console) if interactive else PlainLog(federations, console)


class Progress:
    """A bar for all rounds and, where several federations run at once, a line for each."""

    def __init__(
        self, federations: Sequence[Federation], console: Console | None = None, clock: Clock = time.monotonic
    ):
        self._watch = _Watch(federations, clock)
        columns = (
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[result]}"),
            TextColumn("{task.fields[speed]}", style="dim"),
        )
        # Standard output is left alone, so that results can be piped away while the bar is shown.
        self.bars = Bars(*columns, console=console or Console(stderr=True), expand=True, redirect_stdout=False)
        several = len(federations) > 1
        names = labels([federation.experiment for federation in federations])
        self._overall = self._add("all rounds" if several else "round", self._watch.done, self._watch.total)
        self._lines: dict[int, TaskID] = {}
        if several and len(federations) <= MOST_LINES:
            for federation, name in zip(federations, names, strict=True):
                self._lines[id(federation)] = self._add(name, federation.round, federation.experiment.rounds)
        self.bars.start()

    def round_done(self, federation: Federation, record: Record, seconds: float) -> None:
        """Move the bars on; accuracy and loss stay those of the last evaluation."""
        self._watch.round_done(record)
        speed = f"{_speed(self._watch.clients_per_second)}  {_clock(self._watch.elapsed)}"
        left = f"left {_clock(self._watch.left)}"
        self.bars.update(self._overall, completed=self._watch.done, speed=f"{speed}  {left}")
        line = self._lines.get(id(federation), self._overall if self._watch.alone else None)
        if line is None:
            return
        self.bars.update(line, completed=record["round"])
        if "test" in record:
            self.bars.update(line, result=_result(record["test"]))

    def close(self) -> None:
        """Leave the bars as they are and give the terminal back."""
        self.bars.stop()

    def _add(self, name: str, done: int, total: int) -> TaskID:
        return self.bars.add_task(name, completed=done, total=total, result="", speed="")


class PlainLog:
    """One line for the first round and for each evaluation, for logs and pipes."""

    def __init__(
        self, federations: Sequence[Federation], console: Console | None = None, clock: Clock = time.monotonic
    ):
        self._watch = _Watch(federations, clock)
        self._console = console or Console(stderr=True)
        names = labels([federation.experiment for federation in federations])
        self._names = {
            id(federation): f"{name}  " if len(names) > 1 else ""
            for federation, name in zip(federations, names, strict=True)
        }
        self._unseen = set(self._names)

    def round_done(self, federation: Federation, record: Record, seconds: float) -> None:
        """Write a line where there is something new to say."""
        self._watch.round_done(record)
        first = id(federation) in self._unseen
        self._unseen.discard(id(federation))
        if not first and "test" not in record:
            return
        parts = [f"{self._names.get(id(federation), '')}round {record['round']}/{federation.experiment.rounds}"]
        if "test" in record:
            parts.append(_result(record["test"]))
        if record.get("test_ema"):
            parts.append(f"averaged {_number(record['test_ema'].get('accuracy'), 3)}")
        if "loss" in record.get("train", {}):
            parts.append(f"train loss {_number(record['train']['loss'], 2)}")
        parts += [_speed(self._watch.clients_per_second), f"left {_clock(self._watch.left)}"]
        self._console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is held open."""


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


class _Watch:
    """Rounds done of all federations together, and how fast they go by."""

    def __init__(self, federations: Sequence[Federation], clock: Clock):
        self.alone = len(federations) == 1
        self._federations = max(len(federations), 1)
        self.done = sum(federation.round for federation in federations)
        self.total = sum(federation.experiment.rounds for federation in federations)
        self._clock = clock
        self._clients = 0
        self._began = clock()
        # One mark a round of all federations; the speed is measured between the oldest and the newest.
        self._marks = deque([(self._began, self.done, 0)], maxlen=_WINDOW * self._federations)
        self._warm = False

    def round_done(self, record: Record) -> None:
        self.done += 1
        self._clients += len(record.get("clients", ()))
        self._marks.append((self._clock(), self.done, self._clients))
        if not self._warm and len(self._marks) > 2 * self._federations + 1:
            # The first round also pays for warming up, which would make the rest look longer than it is.
            for _ in range(self._federations):
                self._marks.popleft()
            self._warm = True

    @property
    def elapsed(self) -> float:
        return self._marks[-1][0] - self._began

    @property
    def clients_per_second(self) -> float:
        (then, _, before), (now, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / (now - then) if now > then else math.nan

    @property
    def left(self) -> float:
        """Seconds until the last round at the present speed; not a number before there is one."""
        (then, before, _), (now, after, _) = self._marks[0], self._marks[-1]
        return (self.total - self.done) * (now - then) / (after - before) if after > before else math.nan


def _result(test: dict[str, Any]) -> str:
    return f"accuracy {_number(test.get('accuracy'), 3)}  loss {_number(test.get('loss'), 2)}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _speed(clients_per_second: float) -> str:
    return f"{NOTHING if math.isnan(clients_per_second) else f'{clients_per_second:.1f}'} clients/s"


def _clock(seconds: float) -> str:
    """Seconds as 0:01:10."""
    return NOTHING if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
