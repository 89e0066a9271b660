"""What a person sees while a grid is measured: bars on a terminal, plain lines anywhere else."""

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from feddure.config import Experiment
from feddure.studies.grid.cost import reference_seconds
from feddure.studies.grid.runner import Watched as Federation
from feddure.studies.grid.store import Cell, Measurement, mean_of
from feddure.tracking.records import Record

_PLAIN_SECONDS = 30.0  # between two lines of a log
_MOST_NAMED = 3  # different cells of a group whose changes are said
_COLUMNS = ("gamma", "labels", "clients_per_round", "rounds")  # of results.csv, which a cell's options leave out
_WIDEST = 60  # characters of a group's name beside its bar
_MOST_BARS = 8  # groups of cells that get one


class _Group:
    """Cells that train side by side."""

    def __init__(self, name: str, federations: Sequence[Federation], bar: TaskID | None):
        self.name = name
        self.bar = bar
        self.shares = {id(one): one.round / one.experiment.rounds for one in federations}
        self.accuracies: dict[int, float] = {}

    def text(self, federation: Federation) -> str:
        accuracy = f"  accuracy {statistics.fmean(self.accuracies.values()):.3f}" if self.accuracies else ""
        return f"round {federation.round}/{federation.experiment.rounds}{accuracy}"


class _UnderWay(NamedTuple):
    """A federation in training; holding it keeps its id from going to another."""

    federation: Federation
    cost: float
    group: _Group

    @property
    def worked(self) -> float:
        return self.cost * self.group.shares[id(self.federation)]


class GridProgress:
    """A bar for the whole grid with the time left, and one for each group of cells that is training now."""

    def __init__(
        self, cells: Sequence[Cell], console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ):
        """`cells` are those still to be measured, each once."""
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._began = clock()
        self._spoke = self._began - _PLAIN_SECONDS
        self._total = len(cells)
        self._done = 0
        self._changes = _changes(cells)
        self._costs = {cell.hash: reference_seconds(cell.experiment) for cell in cells}
        self._work = max(sum(self._costs.values()), 1e-9)
        self._worked = 0.0  # of the work above, in finished cells
        self._under_way: dict[str, _UnderWay] = {}  # by the hash of the cell
        self._hashes: dict[int, str] = {}  # of the cells of federations under way
        self._bars: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
            )
            self._bars = Progress(*columns, console=self._console, expand=True, redirect_stdout=False)
            self._whole = self._bars.add_task("cells", total=self._work, text=f"0/{self._total}")
            self._bars.start()

    def group_begins(self, federations: Sequence[Federation]) -> None:
        """Some cells start to train side by side."""
        name = self._group_name([f.experiment for f in federations])
        bar = None
        if self._bars:
            short = name if len(name) <= _WIDEST else f"{name[: _WIDEST - 1]}…"
            shown = sum(task.visible for task in self._bars.tasks) <= _MOST_BARS
            bar = self._bars.add_task(short, total=1.0, text="", visible=shown)
        else:
            self._say(f"{name}: {_extent(federations)}", at_once=True)
        group = _Group(name, federations, bar)
        for one in federations:
            hash = Cell("", "", one.experiment).hash
            self._hashes[id(one)] = hash
            self._under_way[hash] = _UnderWay(one, reference_seconds(one.experiment), group)

    def round_done(self, federation: Federation, record: Record, seconds: float) -> None:
        """A federation under way has finished a round."""
        group = self._under_way[self._hashes[id(federation)]].group
        group.shares[id(federation)] = federation.round / federation.experiment.rounds
        if "test" in record:
            group.accuracies[id(federation)] = record["test"]["accuracy"]
        text = group.text(federation)
        if self._bars and group.bar is not None:
            self._bars.update(group.bar, completed=statistics.fmean(group.shares.values()), text=text)
            self._bars.update(self._whole, completed=self._finished, text=self._whole_text())
        else:
            self._say(f"{group.name}: {text}  {self._whole_text()}")

    def cell_done(self, cell: Cell, measurement: Measurement) -> None:
        """A cell is finished and kept."""
        self._done += 1
        self._worked += self._costs.get(cell.hash, 0.0)
        self._end(cell)
        name = self._cell_name(cell.experiment)
        line = (
            f"{name}: {100 * measurement.accuracy_last10:.2f} % ({mean_of([measurement])}), "
            f"{100 * measurement.accuracy_last:.2f} % (last), {measurement.seconds:.0f} s"
        )
        if measurement.left_out:
            line += f"; {_share(measurement.left_out)} of the clients' updates were not finite and were left out"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._bars:
            self._bars.update(self._whole, completed=self._finished, text=self._whole_text())

    def cells_lost(self, cells: Sequence[Cell]) -> None:
        """Cells will not be finished: the process that trained them is gone."""
        for cell in cells:
            self._end(cell)

    def _end(self, cell: Cell) -> None:
        """A cell trains no more; with the last of a group its bar goes too."""
        ended = self._under_way.pop(cell.hash, None)
        if ended is None:
            return
        del self._hashes[id(ended.federation)]
        last = all(one.group is not ended.group for one in self._under_way.values())
        if last and self._bars and ended.group.bar is not None:
            self._bars.remove_task(ended.group.bar)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bars:
            self._bars.stop()

    def _group_name(self, experiments: Sequence[Experiment]) -> str:
        if len(experiments) == 1:
            return self._cell_name(experiments[0])
        methods = ", ".join(dict.fromkeys(e.method for e in experiments))
        changes = list(filter(None, dict.fromkeys(map(self._changed, experiments))))
        more = ["…"] if len(changes) > _MOST_NAMED else []
        said = f" ({'; '.join([*changes[:_MOST_NAMED], *more])})" if changes else ""
        return f"{methods} on {experiments[0].dataset}{said} × {len(experiments)}"

    def _cell_name(self, experiment: Experiment) -> str:
        e = experiment
        parts = (e.method, e.dataset, e.partition.setting, self._changed(e), f"seed {e.seed}")
        return ", ".join(filter(None, parts))

    def _changed(self, experiment: Experiment) -> str:
        return self._changes.get(Cell("", "", experiment).hash, "")

    @property
    def _finished(self) -> float:
        return self._worked + sum(one.worked for one in self._under_way.values())

    @property
    def seconds_left(self) -> float | None:
        """By the speed so far; None before there is one."""
        elapsed = self._clock() - self._began
        return elapsed * (self._work - self._finished) / self._finished if self._finished > 0 else None

    def _whole_text(self) -> str:
        left = self.seconds_left
        shown = "–" if left is None else str(timedelta(seconds=round(left)))
        passed = timedelta(seconds=round(self._clock() - self._began))
        return f"{self._done}/{self._total} cells  {passed}  left {shown}"

    def _say(self, line: str, at_once: bool = False) -> None:
        if at_once or self._clock() - self._spoke >= _PLAIN_SECONDS:
            self._spoke = self._clock()
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _changes(cells: Sequence[Cell]) -> dict[str, str]:
    """What tells each cell from the others beyond method, data set, setting and seed, by its hash."""
    found = [cell.coordinates() for cell in cells]
    values: dict[tuple[str, str], set[object]] = {}
    for place in found:
        for name in _COLUMNS:
            values.setdefault((place["dataset"], name), set()).add(place[name])
    changes = {}
    for cell, place in zip(cells, found, strict=True):
        varied = [name for name in _COLUMNS if len(values[place["dataset"], name] - {""}) > 1 and place[name] != ""]
        own = [f"{name}={place[name]}" for name in varied if name not in cell.options]
        changes[cell.hash] = " ".join(filter(None, [*own, cell.options]))
    return changes


def _extent(federations: Sequence[Federation]) -> str:
    """How much there is to train, and how much of it is done."""
    rounds = sorted({federation.experiment.rounds for federation in federations})
    many = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    text = f"{many} round{'' if rounds == [1] else 's'}"
    if len(federations) > 1:
        text += f" of {len(federations)} cells"
    done = min(federation.round for federation in federations)
    return f"training goes on after round {done}: {text}" if done else f"training begins: {text}"


def _share(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else "less than 1 %"
