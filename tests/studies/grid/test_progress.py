"""Progress of a grid: what is done, what is left, and the time between."""

import dataclasses
import io

import pytest
from rich.console import Console

import synthetic
import tiny
from feddure.studies.grid.cost import reference_seconds
from feddure.studies.grid.progress import GridProgress
from feddure.studies.grid.store import Cell


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


@pytest.mark.parametrize("terminal", [False, True])
def test_groups_that_train_at_the_same_time_all_count(terminal):
    watch, text, clock = progress(terminal)
    first, second = map(Training, cells())
    watch.group_begins([first])
    watch.group_begins([second])
    clock.now, first.round, second.round = 30.0, 5, 5
    for federation in (first, second):
        watch.round_done(federation, {"round": 5, "test": {"accuracy": 0.5}}, 1.0)
    assert watch.seconds_left == pytest.approx(30.0)
    watch.cell_done(cells()[0], synthetic.measured(cells()[0], 42.0))
    clock.now, second.round = 60.0, 10
    watch.round_done(second, {"round": 10}, 1.0)  # the other's end took nothing from this one
    assert watch.seconds_left == pytest.approx(0.0)
    watch.cell_done(cells()[1], synthetic.measured(cells()[1], 43.0))
    watch.close()
    assert text.getvalue().count("% (last)") == 2


@pytest.mark.parametrize(("share", "said"), [(1.0, "100 % of the"), (0.001, "less than 1 % of the")])
def test_a_cell_that_lost_updates_says_so(share, said):
    watch, text, _ = progress()
    watch.cell_done(cells()[0], dataclasses.replace(synthetic.measured(cells()[0], 42.0), left_out=share))
    watch.cell_done(cells()[1], synthetic.measured(cells()[1], 42.0))
    assert text.getvalue().count("not finite") == 1
    assert f"; {said} clients' updates were not finite and were left out" in text.getvalue()


def test_lost_cells_count_no_more():
    watch, _, clock = progress(terminal=True)
    first, second = map(Training, cells())
    watch.group_begins([first])
    watch.group_begins([second])
    clock.now, first.round, second.round = 30.0, 10, 5
    for federation in (first, second):
        watch.round_done(federation, {"round": federation.round}, 1.0)
    watch.cells_lost(cells()[1:])
    watch.cell_done(cells()[0], synthetic.measured(cells()[0], 42.0))
    assert watch.seconds_left == pytest.approx(30.0)  # half of the work took 30 s
    watch.close()


def test_a_log_is_not_flooded():
    watch, text, clock = progress()
    federation = Training(cells()[0])
    watch.group_begins([federation])
    for second in range(60):
        clock.now, federation.round = second, 1 + second // 10
        watch.round_done(federation, {"round": federation.round}, 1.0)
    assert len(text.getvalue().splitlines()) == 2


def said(cells, *groups):
    """The lines of a log while these groups of cells begin, and then finish."""
    text = io.StringIO()
    watch = GridProgress(cells, Console(file=text, width=300), Clock())
    for group in groups:
        watch.group_begins([Training(cell) for cell in group])
    for group in groups:
        for one in group:
            watch.cell_done(one, synthetic.measured(one, 42.0))
    return text.getvalue().splitlines()


def test_lines_tell_the_cells_of_a_sweep_apart():
    rates = [0.1, 0.2]
    cells = [
        Cell(
            "mine",
            "demo",
            experiment(rounds=10, **{"optimizer.learning_rate": rate}),
            f"optimizer.learning_rate={rate}",
        )
        for rate in rates
    ]
    begun, other, done, _ = said(cells, cells[:1], cells[1:])
    name = "fedavg, fashion-mini, dir-dir, optimizer.learning_rate=0.1, seed 0"
    assert begun == f"{name}: training begins: 10 rounds"
    assert "learning_rate=0.2" in other
    assert done == f"{name}: 42.00 % (mean of all 2), 43.00 % (last), 1 s"
    together = said(cells, cells)[0]
    assert together.startswith(
        "fedavg on fashion-mini (optimizer.learning_rate=0.1; optimizer.learning_rate=0.2) × 2: "
    )
    assert together.endswith("training begins: 10 rounds of 2 cells")


def test_columns_in_which_cells_differ_are_said_and_no_others():
    cells = [Cell("mine", "demo", experiment(**{"partition.gamma": g, "rounds": r})) for g, r in ((0.1, 2), (0.3, 4))]
    first, second = said(cells, cells[:1], cells[1:])[:2]
    assert first == "fedavg, fashion-mini, dir-dir, gamma=0.1 rounds=2, seed 0: training begins: 2 rounds"
    assert "gamma=0.3 rounds=4" in second
    settings = [Cell("mine", "demo", experiment(**{"partition.setting": s})) for s in ("iid-iid", "dir-dir")]
    assert "gamma" not in "".join(said(settings, settings[:1], settings[1:]))


def test_a_resumed_cell_says_where_it_goes_on():
    watch, text, _ = progress()
    federation = Training(cells()[0])
    federation.round = 4
    watch.group_begins([federation])
    assert text.getvalue().endswith("training goes on after round 4: 10 rounds\n")


def test_the_model_of_time_counts_what_costs():
    base = reference_seconds(experiment(method="fedavg-fixmatch"))
    assert reference_seconds(experiment(method="feddure")) > base
    assert reference_seconds(experiment(method="fedavg-fixmatch", rounds=4)) == pytest.approx(2 * base)
    assert reference_seconds(experiment(method="fedavg-fixmatch", unlabelled_batch=60)) > base
