"""What a sweep found: its combinations from best to worst, and whether the first is better than by chance."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports import style
from feddure.reports.run_report import Picture, Table, embed
from feddure.studies.compare_tables import Pair, Spread, paired
from feddure.studies.grid.store import Cell, Measurement, Store, mean_of
from feddure.studies.sweep import Point, Sweep
from feddure.studies.sweep_boards import Board, divide
from feddure.studies.sweep_names import axis_name, shown
from feddure.tracking.summary import NOTHING, duration, number, points
from feddure.version import VERSION

TABLE_FILE, PAGE_FILE, FIGURE_FILE, REPORT_FILE = "leaderboard.csv", "leaderboard.md", "leaderboard.png", "report.html"
_MOST_NAMED = 8  # missing cells that are named one by one
_MOST_CARDS = 4  # boards whose best has a card
_MOST_LEFT_OUT = 0.5  # share of updates without which a combination is still ranked


@dataclass(frozen=True)
class Row:
    """A combination over the seeds that are measured; accuracies are shares of 1."""

    point: Point
    measured: dict[int, Measurement]  # by seed

    @property
    def last10(self) -> Spread | None:
        return self._spread([found.accuracy_last10 for found in self.measured.values()])

    @property
    def last(self) -> Spread | None:
        return self._spread([found.accuracy_last for found in self.measured.values()])

    @property
    def steps(self) -> float | None:
        return self._mean([found.local_steps for found in self.measured.values()])

    @property
    def seconds(self) -> float | None:
        return self._mean([found.seconds for found in self.measured.values()])

    @property
    def left_out(self) -> float:
        """The largest share of updates that a seed lost because they were not finite."""
        return max((found.left_out for found in self.measured.values()), default=0.0)

    @property
    def diverged(self) -> bool:
        return self.left_out > _MOST_LEFT_OUT

    @property
    def absent(self) -> list[Cell]:
        """The cells that are not measured."""
        return [cell for cell in self.point.cells if cell.experiment.seed not in self.measured]

    @property
    def ranked(self) -> bool:
        return bool(self.measured) and not self.diverged

    def against(self, other: "Row") -> Pair | None:
        """How much more accurate this one is on the seeds that both have; None where there are none."""
        seeds = [seed for seed in self.measured if seed in other.measured]
        if not seeds:
            return None
        mine, theirs = ([row.measured[seed].accuracy_last10 for seed in seeds] for row in (self, other))
        return Pair(self.point.name, other.point.name, "last10", len(seeds), *paired(mine, theirs))

    @staticmethod
    def _mean(values: Sequence[float]) -> float | None:
        return statistics.fmean(values) if values else None

    @staticmethod
    def _spread(values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


Ranking = tuple[Board, list[Row]]
"""A board with its combinations, best first."""


def rankings(sweep: Sweep, store: Store) -> list[Ranking]:
    """All leaderboards of a sweep: one for each problem, or a single one."""
    return [(board, leaderboard(board.sweep, store)) for board in divide(sweep)]


def leaderboard(sweep: Sweep, store: Store) -> list[Row]:
    """The combinations by their mean accuracy over seeds, best first; then what diverged, then what is not measured."""
    rows = []
    for point in sweep.points:
        found = {cell.experiment.seed: store.find(cell) for cell in point.cells}
        rows.append(Row(point, {seed: one for seed, one in found.items() if one is not None}))
    return sorted(rows, key=lambda row: (not row.measured, row.diverged, -row.last10.mean if row.last10 else 0.0))


def every_row(ranked: Sequence[Ranking]) -> list[Row]:
    """The combinations of all boards, board by board."""
    return [row for _, rows in ranked for row in rows]


def verdict(rows: Sequence[Row]) -> str:
    """Whether the best differs from the second by more than chance, in a sentence."""
    ranked = [row for row in rows if row.ranked]
    if not ranked:
        return "All that is measured diverged." if any(row.measured for row in rows) else "Nothing is measured yet."
    if len(rows) == 1:
        return f"{ranked[0].point.name} is the only combination."
    if len(ranked) == 1:
        return f"Only {ranked[0].point.name} is measured{' and did not diverge' if rows[1].diverged else ''}."
    best, second = ranked[:2]
    pair = best.against(second)
    names = f"{best.point.name} over {second.point.name}"
    if pair is None:
        return f"{names}: no seed is measured for both, so nothing can be said."
    lead = f"{names}: {_points(pair.difference)} points on the same {_seeds(pair.seeds)}"
    if pair.seeds < 2:
        return f"{lead}; one seed cannot tell whether that is chance."
    if pair.low is None or pair.high is None:
        return f"{lead}; {pair.verdict}."
    interval = f"95 % interval {_points(pair.low)} to {_points(pair.high)}"
    if pair.low > 0:
        return f"{lead}, {interval}: more than chance between these two."
    return f"{lead}, {interval}: no difference can be told."


def accuracy_name(rows: Sequence[Row], spelled_out: bool = False) -> str:
    """What the accuracies are that the rows are ordered by."""
    return mean_of((found for row in rows for found in row.measured.values()), spelled_out)


def explanation(sweep: Sweep, rows: Sequence[Row]) -> str:
    """What the columns are, and what not to read into them; said once for all boards."""
    several = len(divide(sweep)) > 1
    apart = ", each board on its own because accuracies on different data cannot be compared" if several else ""
    spread = " ± standard deviation over seeds" if len(sweep.seeds) > 1 else ""
    return (
        f"Ordered by test accuracy in %, {accuracy_name(rows, spelled_out=True)}{spread}{apart}. Steps: local ones "
        "per client and round. Time: of one seed. From the best: points on the same seeds; its 95 % interval is by "
        "Student's t. The best of many is partly the luckiest, and the test set has chosen it: measure it again on "
        f"new seeds before you rely on its lead.{_left_out(rows)}"
    )


def _left_out(rows: Sequence[Row]) -> str:
    """Which combinations lost updates, and what follows from that."""
    named = [f"{row.point.name} {100 * row.left_out:.0f} %" for row in rows if row.left_out]
    if not named:
        return ""
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f" Updates of clients that were not finite were left out, in the worst seed of {'; '.join(named[:_MOST_NAMED])}"
        f"{more}: what lost more than half of them diverged and has no place."
    )


def columns_and_lines(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells, as people read them: the place, what was varied, what was found."""
    cases = any(point.case for point in sweep.points)
    columns = ["", *(["case"] if cases else []), *(axis_name(key) for key in sweep.axes)]
    columns += [accuracy_name(rows), "last", "seeds", "steps", "time", "from the best", "95 % interval"]
    lines = []
    for place, (row, pair) in enumerate(zip(rows, _from_best(rows), strict=True), 1):
        case = [row.point.case] if cases else []
        lines.append(
            [
                f"{place}" if row.ranked else NOTHING,
                *case,
                *(shown(key, row.point.values[key]) for key in sweep.axes),
                _result(row),
                _accuracy(row.last),
                _of(row, sweep),
                number(row.steps, 1),
                duration(row.seconds),
                _points(pair.difference) if pair else "",
                f"{_points(pair.low)} to {_points(pair.high)}" if pair and pair.low is not None else "",
            ]
        )
    return columns, lines


def numbers_from(sweep: Sweep) -> int:
    """The first column of a leaderboard that holds what was found."""
    return 1 + any(point.case for point in sweep.points) + len(sweep.axes)


def brief(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The same for a terminal: one column for what was varied, and no intervals."""
    columns = ["", "combination", accuracy_name(rows), "seeds", "steps", "time", "from best"]
    return columns, [
        [
            f"{place}" if row.ranked else NOTHING,
            row.point.name,
            _result(row),
            _of(row, sweep),
            number(row.steps, 1),
            duration(row.seconds),
            _points(pair.difference) if pair else "",
        ]
        for place, (row, pair) in enumerate(zip(rows, _from_best(rows), strict=True), 1)
    ]


def _from_best(rows: Sequence[Row]) -> list[Pair | None]:
    """Each row's difference from the first; None for the first itself and where no seed is shared."""
    return [None if row is rows[0] else row.against(rows[0]) for row in rows]


def _result(row: Row) -> str:
    if not row.measured:
        return "not measured"
    return f"diverged, {_accuracy(row.last10)}" if row.diverged else _accuracy(row.last10)


def _of(row: Row, sweep: Sweep) -> str:
    """How many seeds are measured, and of how many where some are missing."""
    return f"{len(row.measured)}" + (f" of {len(sweep.seeds)}" if len(row.measured) < len(sweep.seeds) else "")


def write(sweep: Sweep, store: Store, failed: Mapping[str, str] | None = None) -> list[Path]:
    """Write results.csv, the leaderboard as a table, text and figure, and the page; returns their paths.

    `failed` says why cells could not be measured, by their hashes.
    """
    from feddure.studies import sweep_figures

    store.tabulate(sweep.cells())
    ranked = rankings(sweep, store)
    notes = _notes(ranked, failed or {})
    contents = {TABLE_FILE: _csv(sweep, ranked).encode(), PAGE_FILE: _markdown(sweep, ranked, notes).encode()}
    pictures = []
    if any(row.measured for row in every_row(ranked)):
        figure = sweep_figures.leaderboard(sweep, [(board.title, rows) for board, rows in ranked])
        contents[FIGURE_FILE] = style.render(figure, "png")
        pictures.append(embed(figure, "Test accuracy of each combination, best first"))
        along = sweep_figures.along_axes(sweep, leaderboard(sweep, store))
        if along is not None:
            pictures.append(embed(along, "Test accuracy against the values that were varied"))
    contents[REPORT_FILE] = _html(sweep, ranked, notes, pictures).encode()
    for name, content in contents.items():
        write_whole(store.folder / name, content, RunError)
    return [store.folder / name for name in contents]


def _html(sweep: Sweep, ranked: Sequence[Ranking], notes: Sequence[str], pictures: Sequence[Picture]) -> str:
    """The page in the look of all reports: it needs nothing beside itself, no network and no script."""
    loaders = [jinja2.PackageLoader("feddure.reports")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    rows = every_row(ranked)
    return environment.get_template("sweep.html.j2").render(
        title=sweep.name,
        text=sweep.text,
        verdicts=[(board.title, verdict(own)) for board, own in ranked],
        notes=notes,
        cards=_cards(sweep, ranked),
        explanation=explanation(sweep, rows),
        boards=[
            (board.title, Table(*columns_and_lines(board.sweep, own), frozenset({"1"})), numbers_from(board.sweep))
            for board, own in ranked
        ],
        pictures=pictures,
        provenance=_provenance(rows),
        version=VERSION,
    )


def _cards(sweep: Sweep, ranked: Sequence[Ranking]) -> list[tuple[str, str, str]]:
    rows = every_row(ranked)
    done = sum(len(row.measured) for row in rows)
    cells = len(sweep.points) * len(sweep.seeds)
    cards = [
        (f"best, {board.title or accuracy_name(own)}", f"{_accuracy(own[0].last10)} %", own[0].point.name)
        for board, own in ranked
        if own[0].measured
    ]
    problems = f" of {len(ranked)} problems" if len(ranked) > 1 else ""
    note = f"{len(sweep.points)} combinations{problems}, {_seeds(len(sweep.seeds))}"
    counted = ("cells measured", f"{done} of {cells}", note)
    return [*cards, counted] if len(ranked) <= _MOST_CARDS else [counted]


def _notes(ranked: Sequence[Ranking], failed: Mapping[str, str]) -> list[str]:
    """What a reader must know before the numbers: cells that failed, and those that nobody has tried."""
    vain: dict[tuple[str, str], list[int]] = {}
    absent = []
    for board, rows in ranked:
        for row in rows:
            name = f"{board.title}: {row.point.name}" if board.title else row.point.name
            for cell in row.absent:
                if cell.hash in failed:
                    vain.setdefault((name, failed[cell.hash]), []).append(cell.experiment.seed)
                else:
                    absent.append(f"{name}, seed {cell.experiment.seed}")
    said = [
        f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} ({reason})"
        for (name, reason), seeds in vain.items()
    ]
    found = [f"Failed: {_listed(said)}."] if said else []
    if absent:
        found.append(f"Not measured: {_listed(absent)}. The order may change when they are.")
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "; ".join(names[:_MOST_NAMED]) + more


def _provenance(rows: Sequence[Row]) -> list[str]:
    found = [one.columns() for row in rows for one in row.measured.values()]
    said = {name: ", ".join(dict.fromkeys(columns[name] for columns in found)) for name in ("hardware", "versions")}
    return [f"Measured on {said['hardware']} with {said['versions']}."] if found else []


def _markdown(sweep: Sweep, ranked: Sequence[Ranking], notes: Sequence[str]) -> str:
    rows, notes = every_row(ranked), [note.replace("<", r"\<") for note in notes]
    text = [f"# {sweep.name}"]
    if len(ranked) == 1:
        text += [verdict(rows), *notes, _markdown_table(sweep, rows)]
    else:
        text += notes
        for board, own in ranked:
            text += [f"## {board.title}", verdict(own), _markdown_table(board.sweep, own)]
    text += [explanation(sweep, rows), *_provenance(rows)]
    return "\n\n".join(text) + "\n"


def _markdown_table(sweep: Sweep, rows: Sequence[Row]) -> str:
    columns, lines = columns_and_lines(sweep, rows)
    aligned = ["---" if place < numbers_from(sweep) else "---:" for place in range(len(columns))]
    table = [columns, aligned, *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in table)


def _csv(sweep: Sweep, ranked: Sequence[Ranking]) -> str:
    """All boards; accuracies and differences in per cent, as in results.csv."""
    cases = any(point.case for point in sweep.points)
    head = ["problem", "place", *(["case"] if cases else []), *sweep.axes, "seeds_measured", "seeds_missing"]
    head += [f"accuracy_{which}_{what}" for which in ("last10", "last") for what in ("mean", "sd")]
    head += ["local_steps", "seconds", "from_best", "interval_low", "interval_high", "config_hashes"]
    whole = {point.cells[0].hash: point for point in sweep.points}  # a board's leave out a case that is in its title
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for board, rows in ranked:
        for place, (row, pair) in enumerate(zip(rows, _from_best(rows), strict=True), 1):
            point = whole[row.point.cells[0].hash]
            measured = [
                place if row.ranked else "",
                *([point.case] if cases else []),
                *(point.values[key] for key in sweep.axes),
                " ".join(map(str, row.measured)),
                " ".join(str(seed) for seed in sweep.seeds if seed not in row.measured),
            ]
            writer.writerow([board.title, *measured, *_numbers(row, pair), " ".join(cell.hash for cell in point.cells)])
    return text.getvalue()


def _numbers(row: Row, pair: Pair | None) -> list[float | str]:
    spreads = [(spread.mean, spread.deviation) if spread else (None, None) for spread in (row.last10, row.last)]
    return [
        *(_hundredfold(value) for spread in spreads for value in spread),
        "" if row.steps is None else round(row.steps, 2),
        "" if row.seconds is None else round(row.seconds, 1),
        *(_hundredfold(value) for value in ((pair.difference, pair.low, pair.high) if pair else [None] * 3)),
    ]


def _hundredfold(share: float | None) -> float | str:
    return "" if share is None else round(100 * share, 4)


def _accuracy(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    if spread.deviation is None:
        return points(spread.mean)
    return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}"  # more digits would be lost in the spread


def _points(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.2f}".replace("-", "−")


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"
