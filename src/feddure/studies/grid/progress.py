"""What a person sees while a grid is measured, read from its store: bars on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.progress import BarColumn, TaskID, TextColumn

from feddure.reports.names import labels
from feddure.studies.grid.cost import reference_seconds
from feddure.studies.grid.store import Cell, Measurement, Store, named
from feddure.terminal import Console
from feddure.tracking import console as terminal
from feddure.tracking.metrics import TITLES
from feddure.tracking.summary import mean_of, percent

_REFRESH_SECONDS = 0.2
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
        self._clock = clock
        self._began = clock()
        self._refreshed = self._spoke = self._began - _PLAIN_SECONDS
        self._waiting = {cell.hash: cell for cell in cells}
        self._names = dict(zip(self._waiting, labels([cell.experiment for cell in cells]), strict=True))
        self._names |= {cell.hash: f"{cell.name}, seed {cell.experiment.seed}" for cell in cells if cell.name}
        self._costs = {cell.hash: reference_seconds(cell.experiment) for cell in cells}
        self._work = max(sum(self._costs.values()), 1e-9)
        self._told: set[str] = set()  # failed cells and their mistakes
        self._bar_of: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
        )
        self._bars = terminal.bars(console, *columns)
        self._whole = self._bars.add_task("cells", total=self._work, text=f"0/{len(cells)}")
        self._bars.start()

    def refresh(self, at_once: bool = False) -> None:
        """Show what is new; at most a few times a second, unless `at_once`."""
        if not at_once and self._clock() < self._refreshed + _REFRESH_SECONDS:
            return
        self._refreshed = self._clock()
        for cell in list(self._waiting.values()):
            found = self._store.find(cell)
            if found is not None:
                del self._waiting[cell.hash]
                self.say(self._finished_line(cell, found))
        self._tell_failures()
        shares, texts = {}, {}
        for name, noted in self._store.under_way().items():
            if name in self._waiting:
                rounds = self._waiting[name].experiment.rounds
                shares[name] = noted.round / rounds
                metric = TITLES[self._waiting[name].experiment.metric]
                score = "" if noted.score is None else f"  {metric} {percent(noted.score)}"
                texts[name] = f"round {noted.round}/{rounds}{score}"
        done = sum(cost * shares.get(name, name not in self._waiting) for name, cost in self._costs.items())
        passed = self._clock() - self._began
        left = "–" if done <= 0 else str(timedelta(seconds=round(passed * (self._work - done) / done)))
        cells = f"{len(self._costs) - len(self._waiting)}/{len(self._costs)} cells"
        whole = f"{cells}  {timedelta(seconds=round(passed))}  left {left}"
        self._bars.update(self._whole, completed=done, text=whole)
        self._draw(shares, texts)
        if self._bars.disable and texts and self._clock() >= self._spoke + _PLAIN_SECONDS:
            self._spoke = self._clock()
            for name in list(texts)[:_MOST_BARS]:
                self.say(f"{self._names[name]}: {texts[name]}  {whole}")

    def say(self, line: str) -> None:
        terminal.say(self._bars, line)

    def close(self) -> None:
        """Give the terminal back."""
        self.refresh(at_once=True)
        terminal.close(self._bars)

    def _finished_line(self, cell: Cell, found: Measurement) -> str:
        metric, score, evaluations = cell.experiment.metric, found.scores(cell.experiment.metric), len(found.curve)
        line = f"{self._names[cell.hash]}: {TITLES[metric]} {percent(score.last10)} ({mean_of(evaluations)}), "
        line += f"{percent(score.last)} (last), " if evaluations != 1 else ""
        line += f"{found.seconds:.0f} s"
        if found.left_out:
            share = f"{100 * found.left_out:.0f} %" if found.left_out >= 0.01 else "less than 1 %"
            line += f"; {share} of the clients' updates were not finite and were left out"
        return line

    def _tell_failures(self) -> None:
        """Of a mistake that many cells share, once."""
        for name, problem in self._store.failures().items():
            new = name if problem.traceback else problem.error
            if name in self._waiting and new not in self._told:
                self._told.add(new)
                cell = self._waiting[name]
                who = named([cell]) if problem.traceback else f"cells of {cell.experiment.method} cannot be measured"
                self.say(f"note: {who}: {problem.error}")

    def _draw(self, shares: dict[str, float], texts: dict[str, str]) -> None:
        for name in self._bar_of.keys() - shares.keys():
            self._bars.remove_task(self._bar_of.pop(name))
        for name, share in shares.items():
            if name not in self._bar_of and len(self._bar_of) < _MOST_BARS:
                full = self._names[name]
                short = full if len(full) <= _WIDEST else f"{full[: _WIDEST - 1]}…"
                self._bar_of[name] = self._bars.add_task(short, total=1.0, text="")
            if name in self._bar_of:
                self._bars.update(self._bar_of[name], completed=share, text=texts[name])
