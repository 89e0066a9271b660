"""The store: kept whole, found again, claimed by one process, merged from several folders."""

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path

import pytest

import synthetic
import tiny
from feddure.errors import RunError
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import Cell, Store, pack, unpack

RESULTS = Path(__file__).parents[3] / "results"


def cell(study="table1", **changes):
    return Cell(study, "aaai24", tiny.experiment(dataset="fashion-mini", **changes))


def kept(store, *cells):
    for one in cells:
        store.keep(synthetic.measured(one, 50.0))


def lines(store):
    return [json.loads(line) for line in (store.folder / "cells.jsonl").read_text().splitlines()]


# --- finished cells ---------------------------------------------------------------------------------------
def test_what_is_kept_is_found_again(tmp_path):
    store, one = Store(tmp_path), cell()
    assert store.find(one) is None
    made = dataclasses.replace(
        synthetic.measured(one, 100 / 3),
        diagnostics={"loss": 0.1 + 0.2},
        environment={"commit": "abc-dirty", "started": "today", "own_code": "mine:Mine 12"},
    )
    store.keep(made)
    assert store.has(cell("gamma"))  # studies share cells
    assert store.find(one) == Store(tmp_path).find(one) == made


def test_the_file_is_sorted_and_says_each_environment_once(tmp_path):
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    cells = [cell(seed=seed) for seed in range(4)]
    kept(one, *cells)
    kept(other, *reversed(cells))
    assert (one.folder / "cells.jsonl").read_bytes() == (other.folder / "cells.jsonl").read_bytes()
    first, *rest = lines(one)
    assert first == {"environment": rest[0]["environment"], **synthetic.ENVIRONMENT}
    assert [line["cell"] for line in rest] == sorted(cell.hash for cell in cells)


@pytest.mark.parametrize("damage", ['{"cell"', "[]", '{"cell": "a", "environment": "nowhere"}', "\x00"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    store = Store(tmp_path)
    kept(store, cell(), cell(seed=1))
    path = tmp_path / "cells.jsonl"
    whole = path.read_text()
    path.write_text("".join(f"{line}\n" for line in [*whole.splitlines()[:2], damage]))
    for attempt in (lambda: store.find(cell()), lambda: kept(store, cell(seed=2))):
        with pytest.raises(RunError, match=r"cells\.jsonl: line 3 is damaged .*restore the file"):
            attempt()
    path.write_text(whole)
    assert store.has(cell())


def test_cells_that_several_keep_at_the_same_moment_are_all_there(tmp_path):
    def keep(first):
        kept(Store(tmp_path), *(cell(seed=seed) for seed in range(first, 24, 3)))

    together([lambda first=first: keep(first) for first in range(3)])
    assert len(list(Store(tmp_path).measurements())) == 24


def together(works):
    """Each work in a thread of its own, until all are done."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- folders of 0.1 -----------------------------------------------------------------------------------------
def test_a_folder_of_0_1_is_read_and_packed(tmp_path):
    store, one = Store(tmp_path), cell()
    made = dataclasses.replace(synthetic.measured(one, 50.0), together=9)
    (tmp_path / "cells").mkdir()
    old = dataclasses.asdict(made) | {"experiment": one.experiment.model_dump()}
    (tmp_path / "cells" / f"{one.hash}.json").write_text(json.dumps(old))
    assert store.find(one) == made
    kept(store, cell(seed=1))
    assert unpack(tmp_path / "cells.jsonl")[one.hash] == made
    (tmp_path / "cells" / "damaged.json").write_text("{")
    with pytest.raises(RunError, match=r"damaged\.json: damaged"):
        Store(tmp_path).find(one)


def test_published_measurements_survive_packing(tmp_path):
    found = {one.config_hash: one for one in Store(RESULTS / "reproduction").measurements()}
    assert len(found) > 300
    (tmp_path / "cells.jsonl").write_bytes(pack(found.values()))
    assert unpack(tmp_path / "cells.jsonl") == found


# --- claims -------------------------------------------------------------------------------------------------
def test_a_claimed_cell_is_nobody_elses(tmp_path):
    one, other = cell(), cell(seed=1)
    with Store(tmp_path).claimed(one) as mine, Store(tmp_path).claimed(one) as theirs:
        assert (mine, theirs) == (True, False)
        with Store(tmp_path).claimed(other) as mine:
            assert mine
    with Store(tmp_path).claimed(one) as mine:
        assert mine
    assert list(tmp_path.iterdir()) == []
    kept(Store(tmp_path), one)
    with Store(tmp_path).claimed(one) as mine:
        assert not mine


def test_a_claim_that_came_to_nothing_leaves_no_folder(tmp_path):
    store = Store(tmp_path / "grid")
    with store.claimed(cell()):
        store.note(cell(), "command")
    assert not store.folder.exists()


def test_claims_that_come_and_go_at_the_same_moment_do_not_meet(tmp_path):
    store, held, problems, one = Store(tmp_path), [], [], cell()

    def claim():
        try:
            for _ in range(100):
                with store.claimed(one) as mine:
                    if mine:
                        held.append(threading.get_ident())
                        assert len(held) == 1
                        held.clear()
        except Exception as problem:
            problems.append(problem)

    together([claim, claim])
    assert problems == []
    assert list(tmp_path.iterdir()) == []


def test_the_claim_of_a_killed_process_is_free(tmp_path):
    store, one = Store(tmp_path), cell()
    child = os.fork()
    if child == 0:
        with store.claimed(one):
            store.note(one, "command", 3, 0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert store.notes()[one.hash].round == 3  # who it was can be told
    assert store.under_way() == {}
    with store.claimed(one) as mine:
        assert mine
        store.note(one, "command", 2, 0.5)
        (noted,) = Store(tmp_path).under_way().values()
        assert (noted.pid, noted.command, noted.round, noted.score) == (os.getpid(), "command", 2, 0.5)
    assert store.under_way() == {}


def test_failures_stay_until_they_are_forgotten(tmp_path):
    store, one = Store(tmp_path / "grid"), cell()
    with store.claimed(one):
        store.fail(one, Problem("a mistake", "Traceback"))
    assert store.failures() == {one.hash: Problem("a mistake", "Traceback")}
    store.forget_failures([cell(seed=1)])
    assert store.failures()
    store.forget_failures([one])
    assert store.failures() == {}
    with store.claimed(one):
        store.fail(one, Problem("a mistake"))
        kept(store, one)
    assert store.failures() == {}
    assert not (store.folder / "unfinished").exists()


# --- merging and tables -------------------------------------------------------------------------------------
def test_two_halves_merge_to_the_whole(tmp_path):
    cells = [cell(seed=seed, method=method) for method in ("fedavg", "feddure") for seed in (0, 1)]
    whole, one, other = (Store(tmp_path / name) for name in ("whole", "one", "other"))
    kept(whole, *cells)
    kept(one, *cells[:3])
    kept(other, *cells[2:])
    assert [one.has(cell) for cell in cells] == [True, True, True, False]
    assert Store(one.folder, [other.folder]).has(cells[3])  # without a merge
    assert one.merge(other.folder, cells[:2]) == 0
    assert one.merge(other.folder) == 1
    assert (one.folder / "cells.jsonl").read_bytes() == (whole.folder / "cells.jsonl").read_bytes()
    assert one.merge(other.folder) == 0


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(RunError, match="no measured cells are there"):
        Store(tmp_path / "mine").merge(tmp_path)
    kept(Store(tmp_path / "theirs"), cell())
    (tmp_path / "theirs" / "cells.jsonl").write_text("{")
    with pytest.raises(RunError, match=r"cells.jsonl: line 1 is damaged"):
        Store(tmp_path / "mine").merge(tmp_path / "theirs")
    assert not (tmp_path / "mine").exists()
