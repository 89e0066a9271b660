"""Progress of a grid: what is done, what is left, and the time between."""

import io

import pytest
from rich.console import Console

import synthetic
import tiny
from feddure.studies.cells import Cell
from feddure.studies.grid_cost import reference_seconds
from feddure.studies.grid_progress import GridProgress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Training:
    def __init__(self, cell):
        self.experiment, self.round = cell.experiment, 0


def experiment(**changes):
    return tiny.experiment(dataset="fashion-mini", **changes)


def cells():
    return [Cell("table1", "demo", experiment(seed=seed, rounds=10)) for seed in (0, 1)]


def progress(terminal=False):
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, force_terminal=terminal, width=100)
    return GridProgress(cells(), console, clock), text, clock


@pytest.mark.parametrize("terminal", [False, True])
def test_time_left_follows_the_speed_so_far(terminal):
    watch, text, clock = progress(terminal)
    assert watch.seconds_left is None
    federation = Training(cells()[0])
    watch.group_begins([federation])
    clock.now, federation.round = 30.0, 5
    watch.round_done(federation, {"round": 5, "test": {"accuracy": 0.5}}, 1.0)
    assert watch.seconds_left == pytest.approx(90.0)  # a quarter of the work took 30 s
    clock.now, federation.round = 60.0, 10
    watch.round_done(federation, {"round": 10}, 1.0)
    watch.cell_done(cells()[0], synthetic.measured(cells()[0], 42.0))
    assert watch.seconds_left == pytest.approx(60.0)
    watch.close()
    assert "42.00 %" in text.getvalue()
    assert "1/2 cells" in text.getvalue() or not terminal


def test_a_log_is_not_flooded():
    watch, text, clock = progress()
    federation = Training(cells()[0])
    watch.group_begins([federation])
    for second in range(60):
        clock.now, federation.round = second, 1 + second // 10
        watch.round_done(federation, {"round": federation.round}, 1.0)
    assert len(text.getvalue().splitlines()) == 2


def test_the_model_of_time_counts_what_costs():
    base = reference_seconds(experiment(method="fedavg-fixmatch"))
    assert reference_seconds(experiment(method="feddure")) > base
    assert reference_seconds(experiment(method="fedavg-fixmatch", rounds=4)) == pytest.approx(2 * base)
    assert reference_seconds(experiment(method="fedavg-fixmatch", unlabelled_batch=60)) > base
