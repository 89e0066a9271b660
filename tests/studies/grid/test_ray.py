"""Grids on Ray: the same numbers as here, lost workers, an early end, and what is said where there is no cluster."""

import os
import signal
import socket
import sys
import tempfile

import psutil
import pytest

import tiny
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.studies.grid import ray as on_ray
from feddure.studies.grid.ray import measure_on_ray
from feddure.studies.grid.runner import GridStopped
from feddure.studies.grid.store import Cell, Store
from measured import found, here
from waiting import until

pytest.importorskip("ray")

METHODS = '''
import os, pathlib, time
from feddure.methods.fedavg import FedAvg

class Fragile(FedAvg):
    """Takes its process with it until it has done so often enough."""

    def step(self, client, batch):
        for life in sorted(pathlib.Path(self.experiment.options["lives"]).iterdir())[:1]:
            life.unlink()
            os._exit(1)
        return super().step(client, batch)

class Raises(FedAvg):
    def step(self, client, batch):
        raise ValueError("a mistake")

class Slow(FedAvg):
    def step(self, client, batch):
        pathlib.Path(self.experiment.options["began"]).touch()
        time.sleep(60)
'''


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """One cluster with two CPUs for all tests; all that it has started goes with it."""
    import ray

    folder = tmp_path_factory.mktemp("methods")
    (folder / "of_ray.py").write_text(METHODS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # names of sockets must be short
        patch.setenv("TMPDIR", str(folder))  # a killed worker cannot tidy up
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        with on_ray.connected("local", 2):
            yield ray
            started = psutil.Process().children(recursive=True)
    assert not ray.is_initialized()
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in started))


def cells(*seeds, **changes):
    return [Cell("test", "", tiny.experiment({"seed": seed, **changes})) for seed in seeds]


def lives(folder, number):
    folder.mkdir()
    for life in range(number):
        (folder / str(life)).touch()
    return {"method": "of_ray:Fragile", "options": {"lives": str(folder)}}


def test_results_equal_those_of_a_local_run_and_one_cell_ends_no_other(tmp_path, images, monkeypatch):
    monkeypatch.setattr(on_ray, "ATTEMPTS", 2)

    def load(name):
        loaded.append(name)
        return images if name == "tiny" else {}["images"]

    good = [*cells(0, 1), *cells(0, method="feddure"), *cells(0, **lives(tmp_path / "once", 1))]
    killed, raised = cells(0, **lives(tmp_path / "often", 50)), cells(0, method="of_ray:Raises")
    without_data = cells(0, dataset="fashion-mnist")
    (theirs,) = cells(7)
    store, loaded = Store(tmp_path / "ray"), []
    with store.claimed(theirs):
        measure_on_ray([*killed, *good, *raised, theirs, *without_data], store, load, "local")
    assert found(store, good) == here(tmp_path / "here", good, images)
    assert sorted(loaded) == ["fashion-mnist", "tiny"]  # each once
    assert not store.has(theirs)
    said = {name: problem.error for name, problem in store.failures().items()}
    assert "lost 2 times" in said.pop(killed[0].hash)
    assert said == {raised[0].hash: "ValueError: a mistake", without_data[0].hash: "KeyError: 'images'"}
    assert "default_worker" not in store.find(good[0]).environment["command"]
    before = store.find(good[0])
    measure_on_ray(good, store, load, "local")
    assert store.find(good[0]) == before


def test_notes_of_workers_and_mistakes_are_told_as_if_made_here(tmp_path, images):
    wanted = cells(0, **{"optimizer.learning_rate": 1e300})
    with pytest.warns(FeddureWarning, match="left out were updates"):
        measure_on_ray(wanted, Store(tmp_path), lambda name: images, "local")
    with pytest.raises(ConfigError, match=r"engine\.device: cuda was given but no CUDA device is available"):
        measure_on_ray(cells(0, **{"engine.device": "cuda"}), Store(tmp_path), lambda name: images, "local")


def test_no_port_is_open_to_other_machines(cluster):
    assert [node["NodeManagerAddress"] for node in cluster.nodes()] == ["127.0.0.1"]


def test_another_version_on_a_node_is_refused(images):
    with pytest.raises(RunError, match=r"but 0\.0\.0 where the grid was started; install the same version"):
        on_ray._measure_cell("0.0.0", "", {}, False, images)


def test_ray_that_cannot_be_started(monkeypatch, cluster):
    def fail(**_):
        raise OSError("AF_UNIX path length cannot exceed 107 bytes\nand more")

    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "init", fail)
    match = r"--ray local: Ray cannot be started on this machine \(AF_UNIX .*107 bytes\)"
    with pytest.raises(RunError, match=match), on_ray.connected("local"):
        pass


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "http://a:1"])
def test_what_is_no_address(tmp_path, images, address):
    with pytest.raises(ConfigError, match="expected local, auto, HOST:PORT or ray://HOST:PORT"):
        measure_on_ray(cells(0), Store(tmp_path), lambda name: images, address)


def test_an_address_where_nobody_answers(tmp_path, images):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RunError, match=rf"--ray {address}: no Ray cluster can be reached there .*ray start --head"):
        measure_on_ray(cells(0), Store(tmp_path), lambda name: images, address)


def test_ray_is_not_installed(tmp_path, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; pip install 'feddure\[ray\]'"):
        measure_on_ray(cells(0), Store(tmp_path), lambda name: images, "local")


def test_a_stop_keeps_finished_cells_and_leaves_the_others_to_the_next_command(tmp_path, images, cluster, monkeypatch):
    """The last test here: what it leaves under way must end with the cluster."""
    monkeypatch.setattr(cluster, "cancel", None)  # in Ray 2.55 it can end the driver's process
    began, store, asked = tmp_path / "began", Store(tmp_path / "ray"), []
    (done,), (slow,) = cells(0), cells(0, method="of_ray:Slow", options={"began": str(began)})

    def look():
        if not asked and began.exists() and store.has(done):
            asked.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(GridStopped, match="finished cells are kept, and those under way begin anew") as caught:
        measure_on_ray([slow, done], store, lambda name: images, "local", look)
    assert caught.value.exit_code == 130
    with store.claimed(slow) as mine:
        assert mine
