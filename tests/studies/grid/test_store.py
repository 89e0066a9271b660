"""Cells: kept whole, found again, claimed by one process, merged from several folders."""

import csv
import os
import socket
import subprocess
import sys
import threading

import pytest

import synthetic
import tiny
from feddure.errors import RunError
from feddure.studies.grid.store import COLUMNS, Cell, Store, labels, mean_of


def cell(study="table1", **changes):
    return Cell(study, "aaai24", tiny.experiment(dataset="fashion-mini", **changes))


def kept(store, *cells):
    for one in cells:
        store.keep(synthetic.measured(one, 50.0))


def test_what_is_kept_is_found_again(tmp_path):
    store, one = Store(tmp_path), cell()
    assert store.find(one) is None
    made = synthetic.measured(one, 50.0)
    store.keep(made)
    assert store.has(one)
    assert store.find(one) == made


def test_the_name_of_a_cell_is_what_determines_its_result():
    assert cell().hash == cell("gamma").hash  # studies share cells
    assert cell().hash == cell(**{"engine.lanes": 7}).hash
    for change in ({"seed": 1}, {"method": "feddure"}, {"partition.gamma": 0.3}, {"rounds": 3}):
        assert cell(**change).hash != cell().hash


def test_labels_are_a_share_of_the_training_images():
    assert (
        labels(tiny.experiment(dataset="cifar10", **{"partition.clients": 100, "partition.labels_per_class": 5})) == 10
    )
    asked = {"partition.label_fraction": 0.02, "partition.labels_per_class": None}
    assert labels(tiny.experiment(dataset="cifar10", **asked)) == 2
    assert labels(tiny.experiment(dataset="folder:somewhere")) == ""


def test_a_damaged_cell_is_named(tmp_path):
    store, one = Store(tmp_path), cell()
    kept(store, one)
    path = tmp_path / "cells" / f"{one.hash}.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(RunError, match=rf"{one.hash}.json: damaged"):
        store.find(one)


def test_a_claimed_cell_is_nobody_elses(tmp_path):
    one, other = cell(), cell(seed=1)
    with Store(tmp_path).claimed([one]) as mine:
        assert mine == [one]
        with Store(tmp_path).claimed([one, other]) as theirs:
            assert theirs == [other]
    with Store(tmp_path).claimed([one]) as mine:
        assert mine == [one]
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_claim_that_came_to_nothing_leaves_the_folder_as_it_was(tmp_path, there):
    folder = tmp_path / "grid"
    if there:
        folder.mkdir()
    with pytest.raises(ValueError, match="broken"), Store(folder).claimed([cell()]):
        raise ValueError("broken")
    assert folder.exists() == there


def test_claims_that_come_and_go_at_the_same_moment_do_not_meet(tmp_path):
    store, held, problems = Store(tmp_path), set(), []

    def claim(wanted):
        try:
            for _ in range(300):
                with store.claimed(wanted) as mine:
                    assert not held & {cell.hash for cell in mine}
                    held.update(cell.hash for cell in mine)
                    held.difference_update(cell.hash for cell in mine)
        except Exception as problem:
            problems.append(problem)

    first, second, third = (cell(seed=seed) for seed in range(3))
    threads = [
        threading.Thread(target=claim, args=([common, own],)) for common, own in ((first, second), (first, third))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list(tmp_path.iterdir()) == []


def test_a_finished_cell_cannot_be_claimed(tmp_path):
    store, one = Store(tmp_path), cell()
    kept(store, one)
    with store.claimed([one]) as mine:
        assert mine == []


def test_the_claim_of_a_killed_process_is_free(tmp_path):
    one = cell()
    script = (
        "import os, signal, sys; from pathlib import Path; import tiny\n"
        "from feddure.studies.grid.store import Cell, Store\n"
        "one = Cell('table1', 'aaai24', tiny.experiment(dataset='fashion-mini'))\n"
        "with Store(Path(sys.argv[1])).claimed([one]) as mine:\n"
        "    assert mine\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=tiny_environment())
    assert done.returncode == -9
    assert (tmp_path / "unfinished" / one.hash / "lock").exists()
    with Store(tmp_path).claimed([one]) as mine:
        assert mine == [one]


def test_cells_are_under_way_while_a_process_of_this_machine_has_claimed_them(tmp_path):
    store, one, other = Store(tmp_path), cell(), cell(seed=1)
    assert store.under_way() == set()
    with Store(tmp_path).claimed([one]):
        (store.unfinished(one.hash) / "metrics.jsonl").touch()  # there is something to go on with afterwards
        assert store.under_way() == {one.hash}
        with Store(tmp_path).claimed([other]) as mine:  # looking has taken nothing away
            assert mine == [other]
    assert store.unfinished(one.hash).exists()
    assert store.under_way() == set()


@pytest.mark.parametrize(
    "text", ["", "elsewhere {own}", "{host} {gone}", "{host} 0", "{host} -1", "{host} x", "\udcff"]
)
def test_locks_that_nobody_here_has_are_not_under_way(tmp_path, text):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store, one = Store(tmp_path), cell()
    store.unfinished(one.hash).mkdir(parents=True)
    said = text.format(host=socket.gethostname(), own=os.getpid(), gone=gone.pid)
    (store.unfinished(one.hash) / "lock").write_bytes(said.encode(errors="surrogateescape"))
    assert store.under_way() == set()


def test_two_halves_merge_to_the_table_of_the_whole(tmp_path):
    cells = [cell(seed=seed, method=method) for method in ("fedavg", "feddure") for seed in (0, 1)]
    whole, one, other = (Store(tmp_path / name) for name in ("whole", "one", "other"))
    kept(whole, *cells)
    whole.tabulate(cells)
    kept(one, *cells[:3])
    one.tabulate(cells)
    kept(other, *cells[2:])
    other.tabulate(cells)
    assert one.merge(other.folder) == 1
    one.tabulate(cells)
    assert sorted((one.folder / "results.csv").read_text().splitlines()) == sorted(
        (whole.folder / "results.csv").read_text().splitlines()
    )
    assert one.merge(other.folder) == 0


def test_a_merge_may_ask_for_some_cells_only(tmp_path):
    mine, theirs = Store(tmp_path / "mine"), Store(tmp_path / "theirs")
    wanted = [cell("sweep", seed=seed) for seed in (0, 1, 2)]
    others = [cell("table1", seed=seed) for seed in (1, 2, 3)]  # two of them are wanted, under another study's name
    kept(theirs, *others)
    theirs.tabulate([*others, wanted[1]])
    assert mine.merge(theirs.folder, wanted) == 2
    assert {path.stem for path in (mine.folder / "cells").iterdir()} == {wanted[1].hash, wanted[2].hash}
    with (mine.folder / "results.csv").open() as file:
        assert [(row["study"], row["config_hash"]) for row in csv.DictReader(file)] == [("sweep", wanted[1].hash)]
    assert mine.merge(theirs.folder, wanted) == 0
    assert mine.merge(theirs.folder) == 1


def test_merging_a_folder_without_cells_is_refused(tmp_path):
    with pytest.raises(RunError, match="no measured cells are there"):
        Store(tmp_path / "mine").merge(tmp_path)


def test_a_damaged_cell_refuses_the_whole_merge(tmp_path):
    theirs = Store(tmp_path / "theirs")
    kept(theirs, *(cell(seed=seed) for seed in range(3)))
    last = sorted((theirs.folder / "cells").iterdir())[-1]
    last.write_text("{")
    with pytest.raises(RunError, match=rf"{last.name}: damaged"):
        Store(tmp_path / "mine").merge(theirs.folder)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        ((), "mean of last 10"),
        ((12, 10), "mean of last 10"),
        ((3, 3), "mean of all 3"),
        ((1,), "its only evaluation"),
        ((3, 12), "mean of last 10 or fewer"),
    ],
)
def test_what_the_accuracy_is_the_mean_of(evaluations, said):
    cells = [synthetic.measurement(50.0, rounds=5 * count) for count in evaluations]
    assert mean_of(cells) == said
    assert mean_of(cells, spelled_out=True) == (said if said.endswith("evaluation") else f"{said} evaluations")


def test_results_have_a_row_for_each_study_and_finished_cell(tmp_path):
    store = Store(tmp_path)
    first, shared, missing = cell(), cell("gamma"), cell(seed=5)
    kept(store, first)
    store.tabulate([first, missing])
    store.tabulate([shared])
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["study"] for row in rows] == ["table1", "gamma"]
    assert {row["config_hash"] for row in rows} == {first.hash}
    assert rows[0]["accuracy_last10"] == "50.0"
    assert rows[0]["gamma"] == "0.5"


def test_results_of_another_format_are_not_overwritten(tmp_path):
    (tmp_path / "results.csv").write_text("study,method\ntable1,feddure\n")
    with pytest.raises(RunError, match=r"results.csv: its columns lack"):
        Store(tmp_path).tabulate([cell()])
    assert (tmp_path / "results.csv").read_text() == "study,method\ntable1,feddure\n"


def tiny_environment():
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(tiny.__file__).parent), "OMP_NUM_THREADS": "1"}
