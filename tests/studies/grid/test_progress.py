"""Progress of a grid, read from its store: what is done, what is left, and what has failed."""

import io
from dataclasses import replace

from rich.console import Console

import synthetic
import tiny
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.progress import GridProgress
from feddure.studies.grid.store import Cell, Store


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def cell(**changes):
    return Cell("table1", "demo", tiny.experiment({"dataset": "fashion-mini", "rounds": 10} | changes))


def watching(folder, cells, terminal=False):
    text, clock, store = io.StringIO(), Clock(), Store(folder)
    console = Console(file=text, force_terminal=terminal, width=200)
    return GridProgress(cells, store, console, clock), store, text, clock


def test_what_is_under_way_and_done_and_the_time_left(tmp_path):
    cells = [cell(seed=seed) for seed in (0, 1)]
    watch, store, text, clock = watching(tmp_path, cells)
    with store.claimed(cells[0]), store.claimed(cells[1]):
        store.note(cells[0], "command", 5, 0.5)
        clock.now = 30.0
        watch.refresh()
        assert "round 5/10  accuracy 50.00\u202f%" in text.getvalue()
        assert "0/2 cells  0:00:30  left 0:01:30" in text.getvalue()  # a quarter of the work took 30 s
        store.keep(synthetic.measured(cells[0], 42.0))
        store.note(cells[1], "command", 5)
        clock.now = 60.0
        watch.refresh()
    assert "1/2 cells  0:01:00  left 0:00:20" in text.getvalue()
    watch.close()
    watch.close()
    assert text.getvalue().count("FedAvg*, seed 0: accuracy 42.00\u202f%") == 1


def test_bars_come_and_go_on_a_terminal(tmp_path):
    cells = [cell(seed=seed) for seed in (0, 1)]
    watch, store, text, _ = watching(tmp_path, cells, terminal=True)
    with store.claimed(cells[0]):
        store.note(cells[0], "command", 5, 0.5)
        watch.refresh(at_once=True)
        store.keep(synthetic.measured(cells[0], 42.0))
    watch.close()
    assert "1/2 cells" in text.getvalue()


def test_a_log_is_not_flooded(tmp_path):
    cells = [cell()]
    watch, store, text, clock = watching(tmp_path, cells)
    with store.claimed(cells[0]):
        for second in range(60):
            clock.now = second
            store.note(cells[0], "command", 1 + second // 10)
            watch.refresh()
    assert len(text.getvalue().splitlines()) == 2


def test_failures_are_told_at_once_and_a_shared_mistake_once(tmp_path):
    cells = [cell(seed=seed) for seed in range(4)]
    watch, store, text, _ = watching(tmp_path, cells)
    for number, one in enumerate(cells):
        store.fail(one, Problem("write it") if number < 2 else Problem("ValueError: a mistake", "Traceback"))
    watch.refresh(at_once=True)
    watch.refresh(at_once=True)
    assert text.getvalue().count("cannot be measured: write it") == 1
    assert text.getvalue().count("ValueError: a mistake") == 2
    assert cells[3].hash in text.getvalue()


def test_a_cell_that_lost_updates_says_so(tmp_path):
    cells = [cell(seed=0), replace(cell(seed=1), name="my case")]
    watch, store, text, _ = watching(tmp_path, cells)
    store.keep(replace(synthetic.measured(cells[0], 42.0), left_out=0.001))
    store.keep(synthetic.measured(cells[1], 42.0))
    watch.close()
    assert text.getvalue().count("less than 1 % of the clients' updates were not finite") == 1
    assert "my case, seed 1: accuracy" in text.getvalue()
