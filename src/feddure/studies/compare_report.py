"""A comparison's page: its tables and mean curves, ahead of the runs one by one."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from feddure.reports import figures
from feddure.reports.run_report import Opening, Table, write_report
from feddure.studies.compare import REPORT_FILE, Plan
from feddure.studies.compare_tables import Pair, Row, explain_methods, explain_pairs, method_cells, pair_cells
from feddure.studies.grid.failures import Problem
from feddure.tracking.records import Record, Run
from feddure.tracking.summary import evaluations, spoken


def write(
    folder: Path,
    plan: Plan,
    runs: Sequence[Run],
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    failed: Mapping[str, Problem],
) -> Path:
    """Write report.html and return its path; `plan` is that of the methods that have not failed."""
    several = len(plan.seeds) > 1
    opening = Opening(
        methods=_table(*method_cells(rows, failed)),
        methods_note=explain_methods(rows, plan.against, failed),
        pairs=_table(*pair_cells(pairs)),
        pairs_note=explain_pairs(plan, spoken(plan.against)),
        charts=[(mean_curves(plan, runs), "Test accuracy of each method against rounds")] if several else [],
        every_run=several,
    )
    return write_report([run.folder for run in runs], folder / REPORT_FILE, opening)


def mean_curves(plan: Plan, runs: Sequence[Run]) -> Figure:
    """Test accuracy of each method, mean over seeds, in a band from the lowest seed to the highest."""
    curves = {method: _curve([run for run in runs if run.experiment.method == method]) for method in plan.methods}
    means: dict[str, list[Record]] = {
        spoken(method): [{"round": n, "test": {"accuracy": statistics.fmean(values)}} for n, values in curve]
        for method, curve in curves.items()
    }
    canvas = figures.accuracy(means)
    canvas.texts[0].set_text("Test accuracy, mean over seeds; the bands reach from the lowest seed to the highest")
    axes = canvas.axes[0]
    for place, curve in enumerate(curves.values()):
        low, high = ([end(values) for _, values in curve] for end in (min, max))
        colour = figures.look(place)["color"]
        axes.fill_between([n for n, _ in curve], low, high, color=colour, alpha=0.15, linewidth=0)
    every = [value for curve in curves.values() for _, values in curve for value in values]
    axes.set_ylim(max(0.0, min(every) - 0.02), min(1.0, max(every) + 0.02))
    return canvas


def _curve(runs: Sequence[Run]) -> list[tuple[int, list[float]]]:
    """(round, accuracies of the seeds) of each evaluation."""
    each = [evaluations(run.metrics, "accuracy") for run in runs]
    return [(points[0][0], [value for _, value in points]) for points in zip(*each, strict=True)]


def _table(columns: list[str], rows: list[list[str]]) -> Table:
    return Table(columns, [[spoken(name), *cells] for name, *cells in rows])
