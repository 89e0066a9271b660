"""Grids on Ray: the same numbers as here, lost workers, an early end, and what is said where there is no cluster."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tiny
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.studies.grid import ray as spread
from feddure.studies.grid import runner as grid
from feddure.studies.grid.failures import CellsFailed, loading
from feddure.studies.grid.ray import measure_on_ray
from feddure.studies.grid.store import Cell, Store
from measured import found, here
from waiting import until

pytest.importorskip("ray")

FRAGILE = '''
import os, pathlib
from feddure.methods.fedavg import FedAvg

class Fragile(FedAvg):
    """Takes its process with it until it has done so often enough."""

    def step(self, client, batch):
        left = [path for path in pathlib.Path(self.experiment.options["lives"]).iterdir()]
        if left:
            left[0].unlink()
            os._exit(1)
        return super().step(client, batch)

class Choosy(FedAvg):
    def step(self, client, batch):
        if client.key[0] == 1:
            raise ValueError("a mistake")
        return super().step(client, batch)

class Mistaken(FedAvg):
    def step(self, client, batch):
        batch.strong  # not among its needs
'''

SLOW = """
import pathlib, time
from feddure.methods.fedavg import FedAvg

class Slow(FedAvg):
    def step(self, client, batch):
        pathlib.Path(self.experiment.options["began"]).touch()
        time.sleep(60)
"""

DRIVER = """
import sys
from pathlib import Path
import tiny
from feddure.studies.grid import runner as grid
from feddure.studies.grid.store import Cell, Store
from feddure.studies.grid.ray import measure_on_ray

changes = {"method": "slow:Slow", "options": {"began": sys.argv[1]}}
cell = Cell("test", "", tiny.experiment(changes))
try:
    measure_on_ray([cell], Store(Path(sys.argv[2])), lambda name: tiny.dataset(), "local", cpus=1)
except grid.GridStopped as stopped:
    sys.exit(stopped.exit_code)
"""


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """One cluster with two CPUs for all tests; its workers can import a method that kills them."""
    import ray

    folder = tmp_path_factory.mktemp("methods")
    (folder / "fragile.py").write_text(FRAGILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # names of sockets must be short
        patch.setenv("TMPDIR", str(folder))  # a killed worker cannot tidy up
        with spread._connected(spread._ray("local"), "local", 2):
            yield ray
    assert not ray.is_initialized()


class Watcher:
    """Remembers what it was told, and may ask to stop."""

    def __init__(self, stops=False):
        self.began, self.done, self.lost, self._stops = [], [], [], stops

    def group_begins(self, federations):
        self.began += [(federation.experiment.seed, federation.round) for federation in federations]

    def round_done(self, federation, record, seconds):
        raise AssertionError("rounds on workers are not seen")

    def cell_done(self, cell, measurement):
        self.done.append((cell.hash, measurement.config_hash))
        if self._stops:
            os.kill(os.getpid(), signal.SIGINT)

    def cells_lost(self, cells):
        self.lost += [cell.hash for cell in cells]


def cells(*seeds, **changes):
    return [Cell("test", "", tiny.experiment({"seed": seed, **changes})) for seed in seeds]


def lives(folder, number):
    folder.mkdir()
    for life in range(number):
        (folder / str(life)).touch()
    return {"method": "fragile:Fragile", "options": {"lives": str(folder)}}


def running():
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_results_equal_those_of_a_local_run(tmp_path, images):
    wanted = [*cells(0, 1), *cells(0, method="feddure"), *cells(0, **{"server.ema": 0.9})]
    store, watcher, loaded = Store(tmp_path / "spread"), Watcher(), []
    measure_on_ray(wanted, store, lambda name: loaded.append(name) or images, "local", watcher=watcher)
    assert found(store, wanted) == here(tmp_path / "here", wanted, images)
    assert loaded == ["tiny"]
    assert sorted(watcher.done) == sorted((cell.hash, cell.hash) for cell in wanted)
    assert watcher.began == [(0, 0), (1, 0), (0, 0), (0, 0)]
    assert sorted(path.name for path in store.folder.iterdir()) == ["cells"]
    about = store.find(wanted[0]).environment
    assert about["device"] == "cpu"
    assert "default_worker" not in about["command"]


def test_cells_together_share_a_worker(tmp_path, images):
    wanted, store = cells(0, 1, 2), Store(tmp_path / "spread")
    measure_on_ray(wanted, store, lambda name: images, "local", together=3)
    assert [store.find(cell).together for cell in wanted] == [3, 3, 3]
    assert found(store, wanted) == here(tmp_path / "here", wanted, images)


def test_finished_cells_are_not_measured_again(tmp_path, images):
    wanted, store = cells(0, 1), Store(tmp_path)
    grid.measure(wanted[:1], store, lambda name: images)
    before, watcher = store.find(wanted[0]), Watcher()
    measure_on_ray(wanted, store, lambda name: images, "local", watcher=watcher)
    assert watcher.began == [(1, 0)]
    assert store.find(wanted[0]) == before


def test_cells_of_another_process_are_left_to_it(tmp_path, images):
    wanted, store = cells(0, 1), Store(tmp_path)
    with store.claimed(wanted[:1]):
        measure_on_ray(wanted, store, lambda name: images, "local")
    assert [store.has(cell) for cell in wanted] == [False, True]


def test_cells_of_a_killed_worker_are_run_again(tmp_path, images):
    changes = lives(tmp_path / "lives", 1)
    wanted, store = cells(0, 1, 2, **changes), Store(tmp_path / "spread")
    measure_on_ray(wanted, store, lambda name: images, "local")
    assert list((tmp_path / "lives").iterdir()) == []
    assert found(store, wanted) == here(tmp_path / "here", wanted, images)


def test_a_cell_that_always_kills_its_worker_is_named_and_the_others_are_kept(tmp_path, images, monkeypatch):
    monkeypatch.setattr(spread, "ATTEMPTS", 2)
    bad, good = cells(3, **lives(tmp_path / "lives", 50)), cells(0, 1)
    store, watcher = Store(tmp_path / "spread"), Watcher()
    with pytest.raises(RunError, match=f"fragile:Fragile seed 3 \\({bad[0].hash}\\) were lost 2 times"):
        measure_on_ray([*bad, *good], store, lambda name: images, "local", watcher=watcher)
    assert watcher.lost == [bad[0].hash]
    assert [store.has(cell) for cell in (*bad, *good)] == [False, True, True]
    assert len(list((tmp_path / "lives").iterdir())) == 48


def test_a_stop_keeps_finished_cells_and_a_later_call_does_the_rest(tmp_path, images, cluster, monkeypatch):
    monkeypatch.setattr(cluster, "cancel", None)  # in Ray 2.55 it can end the driver's process
    wanted, store = cells(*range(6)), Store(tmp_path / "spread")
    watcher = Watcher(stops=True)
    with pytest.raises(grid.GridStopped, match="finished cells are kept, and those under way begin anew") as caught:
        measure_on_ray(wanted, store, lambda name: images, "local", watcher=watcher)
    assert caught.value.exit_code == 130
    kept = [cell.hash for cell in wanted if store.has(cell)]
    assert kept
    assert len(kept) < len(wanted)
    assert sorted(hash for hash, _ in watcher.done) == sorted(kept)
    later = Watcher()
    measure_on_ray(wanted, store, lambda name: images, "local", watcher=later)
    assert len(later.done) == len(wanted) - len(kept)
    assert found(store, wanted) == here(tmp_path / "here", wanted, images)


def test_a_mistake_is_told_as_if_it_were_made_here(tmp_path, images):
    wanted = cells(0, **{"engine.device": "cuda"})
    with pytest.raises(ConfigError, match=r"engine\.device: cuda was given but no CUDA device is available"):
        measure_on_ray(wanted, Store(tmp_path), lambda name: images, "local")


def test_an_error_in_code_ends_only_its_cells(tmp_path, images):
    bad, good = cells(0, 1, 2, method="fragile:Choosy"), cells(0)
    store, watcher = Store(tmp_path), Watcher()
    with (
        pytest.warns(FeddureWarning, match="^2 cells .* a mistake; each is tried by itself$"),
        pytest.warns(FeddureWarning, match=f"^cell fragile:Choosy seed 1 .{bad[1].hash}.: ValueError: a mistake$"),
        pytest.raises(
            CellsFailed, match=r"(?s)ended cell fragile:Choosy seed 1.*last\):\n  File .*fragile\.py"
        ) as caught,
    ):
        measure_on_ray([*bad, *good], store, lambda name: images, "local", together=2, watcher=watcher)
    assert [failure.cell for failure in caught.value.failures] == [bad[1]]
    assert [store.has(cell) for cell in (*bad, *good)] == [True, False, True, True]
    assert watcher.lost == [bad[1].hash]
    assert sorted(watcher.done) == sorted((cell.hash, cell.hash) for cell in (bad[0], bad[2], *good))
    assert not (tmp_path / "unfinished").exists()


def test_a_mistake_that_a_check_of_the_method_finds_ends_only_its_cells(tmp_path, images):
    bad, good = cells(0, method="fragile:Mistaken"), cells(0)
    store = Store(tmp_path)
    with (
        pytest.warns(
            FeddureWarning, match="^cells of fragile:Mistaken cannot be measured: method 'fragile:Mistaken' us"
        ),
        pytest.raises(
            CellsFailed, match=r"^cell fragile:Mistaken seed 0 .* cannot be measured: .*Needs\(strong=True\)"
        ),
    ):
        measure_on_ray([*bad, *good], store, lambda name: images, "local")
    assert [store.has(cell) for cell in (*bad, *good)] == [False, True]


def test_an_error_in_the_code_of_a_data_set_ends_only_its_cells(tmp_path, images):
    def load(name):
        with loading():
            return images if name == "tiny" else [][0]

    bad, good = cells(0, dataset="fashion-mnist"), cells(0)
    store, watcher = Store(tmp_path), Watcher()
    with (
        pytest.warns(FeddureWarning, match="^cell fedavg seed 0 .*: IndexError: list index out of range$"),
        pytest.raises(CellsFailed, match=f"(?s){bad[0].hash}.*, in load"),
    ):
        measure_on_ray([*bad, *good], store, load, "local", watcher=watcher)
    assert watcher.lost == [bad[0].hash]
    assert store.has(good[0])
    assert not (tmp_path / "unfinished").exists()


def test_notes_of_workers_are_passed_on(tmp_path, images):
    wanted = cells(0, **{"optimizer.learning_rate": 1e300})
    with pytest.warns(FeddureWarning, match="are not finite and were left out"):
        measure_on_ray(wanted, Store(tmp_path), lambda name: images, "local")


def test_ray_that_cannot_be_started(monkeypatch, cluster):
    def fail(**_):
        raise OSError("AF_UNIX path length cannot exceed 107 bytes\nand more")

    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "init", fail)
    match = r"--ray local: Ray cannot be started on this machine \(AF_UNIX .*107 bytes\)"
    with pytest.raises(RunError, match=match), spread._connected(cluster, "local", 1):
        pass


def test_another_version_on_a_node_is_refused(images):
    with pytest.raises(RunError, match=r"but 0\.0\.0 where the grid was started; install the same version"):
        spread._measure_group(spread._Task("0.0.0", "", [], None, 1, ""), images)


def test_no_port_is_open_to_other_machines(cluster):
    assert [node["NodeManagerAddress"] for node in cluster.nodes()] == ["127.0.0.1"]


# --- a cluster of its own ---------------------------------------------------------------------------------


def test_a_stop_ends_what_runs_on_this_machine_and_leaves_no_files(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "driver.py").write_text(DRIVER)
    began, rest = tmp_path / "began", tmp_path / "rest"
    rest.mkdir()
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(tiny.__file__).parent}", "TMPDIR": str(rest)}
    driver = subprocess.Popen(
        [sys.executable, "driver.py", str(began), str(tmp_path / "store")],
        cwd=tmp_path,
        env=os.environ | paths | {"RAY_TMPDIR": tempfile.gettempdir()},
    )
    try:
        until(began.exists, driver)
        workers = [pid for pid in running() if str(rest) in environment_of(pid) and pid != driver.pid]
        assert workers
        assert len(list(rest.glob("feddure-ray-*/feddure-ray-*"))) == 1
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=60) == 130
    finally:
        driver.kill()
        driver.wait()
    assert list(rest.glob("feddure-ray-*")) == []
    until(lambda: not set(workers) & set(running()))


# --- no cluster ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999", "http://a:1"])
def test_what_is_no_address(tmp_path, images, address):
    with pytest.raises(ConfigError, match="expected local, auto, HOST:PORT or ray://HOST:PORT"):
        measure_on_ray(cells(0), Store(tmp_path), lambda name: images, address)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_answers(tmp_path, images, form):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = form.format(free.getsockname()[1])
    with pytest.raises(RunError, match=rf"--ray {address}: no Ray cluster can be reached there .*ray start --head"):
        measure_on_ray(cells(0), Store(tmp_path), lambda name: images, address)


def test_ray_is_not_installed(tmp_path, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; pip install 'feddure\[ray\]'"):
        measure_on_ray(cells(0), Store(tmp_path), lambda name: images, "local")
