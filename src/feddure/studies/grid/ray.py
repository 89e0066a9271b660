"""Grids over several machines: cells as the tasks of a Ray cluster.

Data sets travel through the cluster's object store, so that its nodes need feddure and nothing else. The driver keeps
every measurement as it comes; a cell whose worker is lost is measured again, from its beginning, on another one.
"""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from feddure import environment
from feddure.config import Engine as Options
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureError, FeddureWarning, RunError
from feddure.simulation.engine import Engine
from feddure.simulation.runs import Stop, stopping
from feddure.studies.grid import failures
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.runner import GridStopped, Load, measure, new_command, program_of
from feddure.studies.grid.store import Cell, Measurement, Store, named, unmeasured
from feddure.version import VERSION

LOCAL = "local"
ATTEMPTS = 4
"""How often the cell of a lost worker is measured before it is given up."""

_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^/:\s]+|\[[^\]\s]+\]):(?P<port>\d+)")
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # at 0, Ray keeps to 127.0.0.1 on every system
_SECONDS_TO_CONNECT, _SECONDS_BETWEEN_LOOKS = 10.0, 0.2


class _Stopped(Exception):
    """A worker was asked to end: to Ray a reason to try again elsewhere."""


class _Task(NamedTuple):
    """What a worker gets besides the data set: plain values, so that another version of feddure can still refuse."""

    version: str
    command: str
    experiment: dict[str, Any]
    threads: int | None  # None leaves them to a GPU's worker
    folder: str  # for temporary files on the driver's machine: there they go with the driver


class _Found(NamedTuple):
    """What a worker answers."""

    measurement: dict[str, Any] | None
    problem: Problem | None  # an error of the cell's own
    notes: list[str]


def measure_on_ray(
    cells: Sequence[Cell],
    store: Store,
    load: Load,
    address: str,
    look: Callable[[], None] = lambda: None,
    cpus: int | None = None,
) -> None:
    """Measure all cells that are not finished on a Ray cluster, or on all cores of this machine (`local`).

    Each GPU of the cluster takes a cell at a time; on a cluster without GPUs each CPU does. `cpus` says how many CPUs a
    local cluster offers. What has failed is in the store.
    """
    if not unmeasured(cells, store):
        return
    ray = _ray(address)
    with (
        tempfile.TemporaryDirectory(prefix="feddure-ray-", ignore_cleanup_errors=True) as folder,
        _connected(ray, address, cpus),
        stopping() as stop,
    ):
        driver = _Driver(ray, store, load, folder)
        try:
            driver.run(_by_program(unmeasured(cells, store)), look, stop)
        finally:
            driver.close()


def _by_program(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one program after the other, in the order of their first ones."""
    programs = [program_of(cell) for cell in cells]
    return [cells[place] for place in sorted(range(len(cells)), key=lambda place: programs.index(programs[place]))]


class _Driver:
    """Keeps the cluster busy with claimed cells, and what comes back in the store."""

    def __init__(self, ray: ModuleType, store: Store, load: Load, folder: str):
        self._ray = ray
        self._store = store
        self._load = load
        self._folder = folder
        self._gpus = ray.cluster_resources().get("GPU", 0) >= 1
        self._name = new_command()
        self._datasets: dict[str, Any] = {}
        self._pending: dict[Any, tuple[Cell, ExitStack]] = {}  # tasks under way, and their claims

    def run(self, waiting: list[Cell], look: Callable[[], None], stop: Stop) -> None:
        while waiting or self._pending:
            while waiting and len(self._pending) < self._room():
                self._submit(waiting.pop(0))
            done, _ = self._ray.wait(list(self._pending), timeout=_SECONDS_BETWEEN_LOOKS) if self._pending else ([], [])
            if stop():
                raise GridStopped(stop.signal, under_way="those under way begin anew")
            for task in done:
                self._receive(task)
            look()

    def close(self) -> None:
        """Leave what is under way to itself: nothing of it is kept, and Ray ends it with this connection.

        No task is cancelled: in Ray 2.55 that ends this very process, without a word, where a task is just done.
        """
        for _, claim in self._pending.values():
            claim.close()
        self._pending.clear()

    def _room(self) -> int:
        """Tasks to hand in at a time: as many as the cluster as it is now has places for."""
        return max(1, int(self._ray.cluster_resources().get("GPU" if self._gpus else "CPU", 0)))

    def _submit(self, cell: Cell) -> None:
        on_gpu = self._gpus and cell.experiment.engine.device != "cpu"
        claim = ExitStack()
        try:
            with failures.writing(self._store.folder):
                if not claim.enter_context(self._store.claimed(cell)):
                    return
                self._store.note(cell, self._name)
            command = str(environment.describe()["command"])
            threads = None if on_gpu else 1
            task = _Task(VERSION, command, cell.experiment.model_dump(), threads, self._folder)
            remote = self._ray.remote(_measure_cell).options(
                name=f"feddure {cell.experiment.method}",
                num_cpus=1,
                num_gpus=1 if on_gpu else 0,
                max_retries=ATTEMPTS - 1,
                retry_exceptions=[_Stopped],
            )
            self._pending[remote.remote(task, self._dataset(cell))] = cell, claim.pop_all()
        except Exception as error:
            if failures.ends_all(error):
                raise
            self._store.fail(cell, failures.describe(error))  # the code of its data set
        finally:
            claim.close()

    def _dataset(self, cell: Cell) -> Any:
        name = cell.experiment.dataset
        if name not in self._datasets:
            self._datasets[name] = self._ray.put(self._load(name))
        return self._datasets[name]

    def _receive(self, task: Any) -> None:
        cell, claim = self._pending.pop(task)
        with claim, failures.writing(self._store.folder):
            try:
                found: _Found = self._ray.get(task)
            except self._ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, _Stopped):
                    raise _explained(error, cell) from error
                found = _lost()
            except self._ray.exceptions.RayError as error:
                if "No module named 'feddure" in str(error):
                    raise _explained(error, cell) from None
                found = _lost()
            for note in found.notes:
                warnings.warn(note, FeddureWarning, stacklevel=2)
            if found.measurement is not None:
                self._store.keep(Measurement(**found.measurement))
            elif found.problem is not None:
                self._store.fail(cell, Problem(*found.problem))


_engines: list[Engine] = []  # the last one of this worker's process: what it has compiled serves the next task


def _engine(options: Options) -> Engine:
    if not _engines or _engines[0].options != options:
        _engines[:] = [Engine(options)]
    return _engines[0]


def _measure_cell(task: _Task, dataset: Dataset) -> _Found:
    """What runs on a worker: a cell in a temporary folder, and away with it."""
    if task.version != VERSION:
        raise RunError(
            f"--ray: feddure {VERSION} is installed on node {socket.gethostname()}, but {task.version} where the grid "
            "was started; install the same version everywhere"
        )
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    cell = Cell("", "", Experiment(**task.experiment))
    place = task.folder if os.access(task.folder, os.W_OK | os.X_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="feddure-ray-", dir=place) as folder,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default", FeddureWarning)
        store, engine = Store(Path(folder)), _engine(cell.experiment.engine)
        try:
            measure([cell], store, lambda name: dataset, resumable=False, engine=engine)
        except GridStopped:
            raise _Stopped from None
        finally:
            engine.release()
        found, problem = store.find(cell), store.failures().get(cell.hash)
    notes = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, FeddureWarning))
    if found is not None:
        found = dataclasses.replace(found, environment=found.environment | {"command": task.command})
    return _Found(None if found is None else vars(found), problem, list(notes))


def _lost() -> _Found:
    return _Found(None, Problem(f"its workers were lost {ATTEMPTS} times: killed, out of memory, or cut off"), [])


def _explained(error: Exception, cell: Cell) -> Exception:
    """The user's mistake as it was made on the worker; an error in code keeps its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FeddureError):
        return cause
    if "No module named 'feddure" in str(error):
        return RunError(
            f"--ray: feddure cannot be imported on a node of the cluster; install feddure {VERSION} on every node"
        )
    return RuntimeError(f"{named([cell])} failed on a worker:\n{error}")


def _ray(address: str) -> ModuleType:
    """The package, told to stay on this machine before it reads its settings where that is all that is wanted."""
    if address != LOCAL:
        _expect_address(address)
    try:
        with _set(os.environ, _LOOPBACK, "0") if address == LOCAL else contextlib.nullcontext():
            import ray
            import ray.exceptions
    except ImportError:
        raise ConfigError(f"--ray {address}: Ray is not installed; pip install 'feddure[ray]'") from None
    return ray


def _expect_address(address: str) -> None:
    """Refuse what is no address, and one where nobody answers: Ray itself would wait for minutes."""
    if address == "auto":
        return
    match = _ADDRESS.fullmatch(address)
    if not match or int(match["port"]) > 65535:
        raise ConfigError(f"--ray {address}: expected local, auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), _SECONDS_TO_CONNECT).close()
    except OSError as problem:
        raise _unreachable(address, problem.strerror or str(problem)) from None


def _unreachable(address: str, reason: str) -> RunError:
    return RunError(
        f"--ray {address}: no Ray cluster can be reached there ({reason}); start one with `ray start --head` on that "
        "machine, name ray://HOST:10001 from a machine outside the cluster, or use --ray local"
    )


@contextmanager
def _connected(ray: ModuleType, address: str, cpus: int | None) -> Iterator[None]:
    """A cluster for as long as this holds; one that the process is connected to already is used and left alone."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with warnings.catch_warnings(), _set(os.environ, "RAY_USAGE_STATS_ENABLED", "0"):
        warnings.simplefilter("ignore", FutureWarning)  # about what a later Ray will do
        try:
            if address == LOCAL:
                _start_here(ray, cpus or _cores(), quiet)
            else:
                ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as problem:
            ray.shutdown()
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            if address == LOCAL:
                raise RunError(f"--ray local: Ray cannot be started on this machine ({reason})") from problem
            raise _unreachable(address, reason) from problem
    try:
        yield
    finally:
        ray.shutdown()


def _cores() -> int:
    """Those that this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_here(ray: ModuleType, cpus: int, quiet: dict[str, Any]) -> None:
    """Ray on this machine only: no port is open to any other."""
    from ray._private import ray_constants

    with _set(os.environ, _LOOPBACK, "0"), _set(vars(ray_constants), "ENABLE_RAY_CLUSTER", False):
        ray.init(
            address=LOCAL,
            num_cpus=cpus,
            include_dashboard=False,
            _system_config={"task_oom_retries": ATTEMPTS - 1},
            **quiet,
        )
    if ray.nodes()[0]["NodeManagerAddress"] not in ("127.0.0.1", "::1"):
        ray.shutdown()
        raise RunError("--ray local: this version of Ray opens ports to the network; pip install 'feddure[ray]'")


@contextmanager
def _set(where: Any, name: str, value: Any) -> Iterator[None]:
    before = where.get(name)
    where[name] = value
    try:
        yield
    finally:
        if before is None:
            del where[name]
        else:
            where[name] = before
