"""What a person sees while a grid is measured, read from its store: bars on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from feddure.reports.names import labels
from feddure.studies.grid.cost import reference_seconds
from feddure.studies.grid.store import Cell, Measurement, Store, mean_of, named

_SECONDS_BETWEEN_LOOKS = 0.2
_PLAIN_SECONDS = 30.0  # between two lines of a log
_WIDEST = 60  # characters of a cell's name beside its bar
_MOST_BARS = 8


class GridProgress:
    """A line for each cell that ends; a bar for the whole grid with the time left, and one for each cell under way."""

    def __init__(
        self,
        cells: Sequence[Cell],
        store: Store,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`cells` are those still to be measured, each once."""
        self._store = store
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._began = clock()
        self._looked = self._spoke = self._began - _PLAIN_SECONDS
        self._waiting = {cell.hash: cell for cell in cells}
        self._total = len(cells)
        self._names = dict(zip(self._waiting, labels([cell.experiment for cell in cells]), strict=True))
        self._costs = {cell.hash: reference_seconds(cell.experiment) for cell in cells}
        self._work = max(sum(self._costs.values()), 1e-9)
        self._said: set[str] = set()
        self._failed: set[str] = set()
        self._bars: Progress | None = None
        self._bar_of: dict[str, TaskID] = {}
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
            )
            self._bars = Progress(*columns, console=self._console, expand=True, redirect_stdout=False)
            self._whole = self._bars.add_task("cells", total=self._work, text=f"0/{self._total}")
            self._bars.start()

    def look(self, at_once: bool = False) -> None:
        """Show what is new; at most a few times a second, unless `at_once`."""
        if not at_once and self._clock() < self._looked + _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = self._clock()
        for cell in list(self._waiting.values()):
            found = self._store.find(cell)
            if found is not None:
                del self._waiting[cell.hash]
                self.say(self._finished_line(cell, found))
        self._tell_failures()
        under_way = {
            name: (
                number.round / self._waiting[name].experiment.rounds,
                self._text(name, number.round, number.accuracy),
            )
            for name, number in self._store.under_way().items()
            if name in self._waiting
        }
        done = sum(cost for name, cost in self._costs.items() if name not in self._waiting)
        done += sum(self._costs[name] * share for name, (share, _) in under_way.items())
        whole = self._whole_text(done)
        if self._bars:
            self._draw(under_way)
            self._bars.update(self._whole, completed=done, text=whole)
        elif under_way and self._clock() >= self._spoke + _PLAIN_SECONDS:
            self._spoke = self._clock()
            for name, (_, text) in list(under_way.items())[:_MOST_BARS]:
                self.say(f"{self._names[name]}: {text}  {whole}")

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back."""
        self.look(at_once=True)
        if self._bars:
            self._bars.stop()

    def _finished_line(self, cell: Cell, found: Measurement) -> str:
        line = (
            f"{self._names[cell.hash]}: {100 * found.accuracy_last10:.2f} % ({mean_of([found])}), "
            f"{100 * found.accuracy_last:.2f} % (last), {found.seconds:.0f} s"
        )
        if found.left_out:
            line += f"; {_share(found.left_out)} of the clients' updates were not finite and were left out"
        return line

    def _tell_failures(self) -> None:
        """Of a mistake that many cells share, once."""
        for name, problem in self._store.failures().items():
            if name in self._waiting and name not in self._failed:
                self._failed.add(name)
                cell = self._waiting[name]
                if problem.traceback:
                    self.say(f"note: {named([cell])}: {problem.error}")
                elif problem.error not in self._said:
                    self._said.add(problem.error)
                    self.say(f"note: cells of {cell.experiment.method} cannot be measured: {problem.error}")

    def _draw(self, under_way: dict[str, tuple[float, str]]) -> None:
        assert self._bars is not None
        for name in self._bar_of.keys() - under_way.keys():
            self._bars.remove_task(self._bar_of.pop(name))
        for name, (share, text) in under_way.items():
            if name not in self._bar_of and len(self._bar_of) < _MOST_BARS:
                full = self._names[name]
                short = full if len(full) <= _WIDEST else f"{full[: _WIDEST - 1]}…"
                self._bar_of[name] = self._bars.add_task(short, total=1.0, text="")
            if name in self._bar_of:
                self._bars.update(self._bar_of[name], completed=share, text=text)

    def _text(self, name: str, number: int, accuracy: float | None) -> str:
        shown = "" if accuracy is None else f"  accuracy {accuracy:.3f}"
        return f"round {number}/{self._waiting[name].experiment.rounds}{shown}"

    def _whole_text(self, done: float) -> str:
        passed = self._clock() - self._began
        left = "–" if done <= 0 else str(timedelta(seconds=round(passed * (self._work - done) / done)))
        return (
            f"{self._total - len(self._waiting)}/{self._total} cells  {timedelta(seconds=round(passed))}  left {left}"
        )


def _share(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else "less than 1 %"
