"""Which cells come next: processes keep out of each other's way while they compile."""

import tiny
from feddure.studies.grid.order import busy, choose, program_of, programs_of
from feddure.studies.grid.store import Cell, Store


def test_processes_spread_over_programs_and_stay_with_theirs():
    dear, fair, cheap = (
        [Cell("test", "", tiny.experiment(method=method))] for method in ("feddure", "fedmatch", "fedavg")
    )
    a, b, c = (program_of(group[0]) for group in (dear, fair, cheap))
    waiting = [dear, dear, fair, cheap]
    assert choose(waiting, None, ()) == 0
    assert choose(waiting, None, {a}) == 2  # while another compiles the first, this one compiles something else
    assert choose(waiting, a, {b}) == choose(waiting, a, {a, b}) == 0  # its own program is ready
    assert choose(waiting, c, {a}) == 3
    assert choose([dear, fair], c, {a}) == 1
    assert choose([dear, fair], None, {a, b}) == 0


def test_programs_are_busy_while_somebody_has_claimed_one_of_their_cells(tmp_path):
    dear, other, cheap = (
        Cell("test", "", tiny.experiment(method=method, seed=seed))
        for method, seed in (("feddure", 0), ("feddure", 1), ("fedavg", 0))
    )
    store, programs = Store(tmp_path), programs_of([[dear, other], [cheap]])
    assert busy(programs, store) == set()
    with Store(tmp_path).claimed([other]):
        assert busy(programs, store) == {program_of(dear)}
        assert busy(programs_of([[cheap]]), store) == set()  # cells of a grid that this one does not know
    assert busy(programs, store) == set()
