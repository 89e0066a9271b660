"""Results of a user's own code count as long as that code is what it was."""

import sys

import pytest

import tiny
from feddure import plugins
from feddure.cli import grids
from feddure.errors import FeddureWarning
from feddure.simulation import runs
from feddure.studies.grid import runner as grid
from feddure.studies.grid.store import Cell, Store

METHOD = """
from feddure.methods.fedavg import FedAvg

class Mine(FedAvg):
    step_size = {}
"""


@pytest.fixture
def write_code(tmp_path, monkeypatch):
    """Writes the module, as another process would then find it."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "some_own_module.py").write_text(text)
        forget()

    write(METHOD.format(1))
    yield write
    forget()


def forget():
    sys.modules.pop("some_own_module", None)
    plugins._hash.cache_clear()


def cell(**changes):
    changes = {"method": "some_own_module:Mine", "rounds": 2, "dataset": "fashion-mini"} | changes
    return Cell("study", "", tiny.experiment(changes))


def measure(store, *cells):
    grid.measure(cells, store, lambda name: tiny.dataset())


def test_only_import_paths_are_code(write_code):
    assert plugins.own_code("feddure", "resnet9", "folder:some/images", "folder:images", "no_such_module:x") == ""
    assert plugins.own_code("some_own_module:Mine", "cnn").startswith("some_own_module:Mine ")


def test_a_cell_is_measured_again_when_its_code_has_changed(tmp_path, write_code):
    store, one, builtin = Store(tmp_path / "grid"), cell(), cell(method="fedavg")
    measure(store, one, builtin)
    assert store.has(one)
    assert "own_code" not in store.find(builtin).environment
    before = store.find(one)
    write_code(METHOD.format(2))
    assert store.find(one) is None
    assert grid.unmeasured([one, builtin], store) == store.outdated([one, builtin]) == [one]
    measure(store, one)
    assert store.find(one).environment["own_code"] != before.environment["own_code"]
    assert store.outdated([one]) == []
    assert len(list((tmp_path / "grid" / "outdated").iterdir())) == 1  # nothing is lost
    write_code(METHOD.format(1))
    assert not store.has(one)


def test_the_command_says_why_it_measures_again(tmp_path, write_code, capsys):
    store, one = Store(tmp_path / "grid"), cell()
    measure(store, one)
    write_code(METHOD.format(2))
    grids.measure([one], store, None, None, None, None)
    assert "some_own_module:Mine: the code has changed since 1 of these cells" in capsys.readouterr().err


def test_code_that_is_not_here_does_not_hide_what_it_gave(tmp_path, write_code, monkeypatch):
    store, one = Store(tmp_path / "grid"), cell()
    measure(store, one)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    forget()
    assert one.experiment.own_code() == ""
    assert store.has(one)
    assert store.find(one) is not None


def test_a_cell_under_way_starts_afresh_with_new_code(tmp_path, write_code, monkeypatch):
    store, one = Store(tmp_path / "grid"), cell(rounds=3)
    monkeypatch.setattr(grid, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(grid, "_WRITING", 1e9)
    write, seen = grid.checkpoint.write, []

    def once(federation, folder):
        write(federation, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(grid.checkpoint, "write", once)
    with pytest.raises(KeyboardInterrupt):
        measure(store, one)
    monkeypatch.setattr(grid.checkpoint, "write", write)
    assert (store.unfinished(one.hash) / grid.checkpoint.FILE).exists()

    class Watcher:
        def group_begins(self, federations):
            seen.extend(federation.round for federation in federations)

        def round_done(self, *_):
            pass

        def cell_done(self, *_):
            pass

    write_code(METHOD.format(2))
    grid.measure([one], store, lambda name: tiny.dataset(), watcher=Watcher())
    assert seen == [0]


def test_a_run_that_goes_on_with_other_code_says_so(tmp_path, write_code, recwarn):
    experiment, images = cell().experiment, tiny.dataset()
    runs.execute(experiment, images, tmp_path / "run", progress=False)
    runs.execute(experiment, images, tmp_path / "run", resume=True, progress=False)
    assert not [one for one in recwarn if issubclass(one.category, FeddureWarning)]
    write_code(METHOD.format(2))
    with pytest.warns(FeddureWarning, match="your own code .* has changed since this run was started"):
        runs.execute(experiment, images, tmp_path / "run", resume=True, progress=False)
