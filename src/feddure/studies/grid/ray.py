"""Grids over several machines: groups of cells as the tasks of a Ray cluster.

Data sets travel through the cluster's object store, so that its nodes need feddure and nothing else. The driver keeps
every measurement as it comes; cells whose worker is lost are measured again, from their beginning, on another one.
"""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from feddure import environment
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureError, FeddureWarning, RunError
from feddure.simulation.runs import Stop, stopping
from feddure.studies.grid import failures as grid_failures
from feddure.studies.grid.failures import CellsFailed, DatasetFailed, Failure, Problem
from feddure.studies.grid.order import portions
from feddure.studies.grid.runner import Distant, GridStopped, Load, Watcher, measure, unmeasured
from feddure.studies.grid.store import Cell, Measurement, Store, named
from feddure.version import VERSION

LOCAL = "local"
ATTEMPTS = 4
"""How often the cells of a lost worker are measured before they are given up."""

CPUS_PER_TASK = 1
"""A cell that trains on a CPU gets one of the cluster's, and as many threads."""

_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^/:\s]+|\[[^\]\s]+\]):(?P<port>\d+)")
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # at 0, Ray keeps to 127.0.0.1 on every system
_SECONDS_TO_CONNECT, _SECONDS_BETWEEN_LOOKS = 10.0, 0.2


class _Stopped(Exception):
    """A worker was asked to end: to Ray a reason to try again elsewhere."""


class _Task(NamedTuple):
    """What a worker gets besides the data set: plain values, so that another version of feddure can still refuse."""

    version: str
    command: str
    cells: list[tuple[str, str, dict[str, Any], str]]
    together: int | None
    threads: int | None  # None leaves them to a GPU's worker
    folder: str  # for temporary files on the driver's machine: there they go with the driver


class _Found(NamedTuple):
    """What a worker answers."""

    measurements: list[dict[str, Any]]
    notes: list[str]
    problems: dict[str, Problem]  # errors of their own, by the hash of the cell that each has ended


def measure_on_ray(
    cells: Sequence[Cell],
    store: Store,
    load: Load,
    address: str,
    together: int | None = None,
    watcher: Watcher | None = None,
    cpus: int | None = None,
) -> None:
    """Measure all cells that are not finished on a Ray cluster, or on all cores of this machine (`local`).

    Each GPU of the cluster takes a group of cells at a time; on a cluster without GPUs each CPU takes a cell, or a
    group where `together` is given. `cpus` says how many CPUs a local cluster offers.
    """
    if not unmeasured(cells, store):
        return
    ray = _ray(address)
    with (
        tempfile.TemporaryDirectory(prefix="feddure-ray-", ignore_cleanup_errors=True) as folder,
        _connected(ray, address, cpus),
        stopping() as stop,
    ):
        driver = _Driver(ray, store, load, together, watcher, folder)
        try:
            driver.run(cells, stop)
        finally:
            driver.close()


class _Driver:
    """Keeps the cluster busy with claimed groups, and what comes back in the store."""

    def __init__(
        self, ray: ModuleType, store: Store, load: Load, together: int | None, watcher: Watcher | None, folder: str
    ):
        self._ray = ray
        self._store = store
        self._load = load
        self._together = together
        self._watcher = watcher
        self._folder = folder
        self._gpus = ray.cluster_resources().get("GPU", 0) >= 1
        self._datasets: dict[str, Any] = {}
        self._pending: dict[Any, tuple[list[Cell], ExitStack]] = {}  # tasks under way, and their locks
        self._failures: list[Failure] = []
        self._said: set[str] = set()

    def run(self, cells: Sequence[Cell], stop: Stop) -> None:
        waiting = portions(unmeasured(cells, self._store), self._together, self._on_gpu)
        lost: list[Cell] = []
        while waiting or self._pending:
            while waiting and len(self._pending) < self._room():
                self._submit(waiting.pop(0))
            done, _ = self._ray.wait(list(self._pending), timeout=_SECONDS_BETWEEN_LOOKS) if self._pending else ([], [])
            if stop():
                raise GridStopped(stop.signal, under_way="those under way begin anew")
            for task in done:
                gone = self._receive(task)
                if gone and self._watcher:
                    self._watcher.cells_lost(gone)
                lost += gone
        if self._failures or lost:
            why = Problem(f"its workers were lost {ATTEMPTS} times: killed, or out of memory")
            raise CellsFailed(self._failures, _lost(lost) if lost else "", [Failure(cell, why) for cell in lost])

    def close(self) -> None:
        """Leave what is under way to itself: nothing of it is kept, and Ray ends it with this connection.

        Where the process was connected to Ray before, tasks under way run to their end.

        No task is cancelled: in Ray 2.55 that ends this very process, without a word, where a task is just done.
        """
        for _, locks in self._pending.values():
            locks.close()
        self._pending.clear()

    def _on_gpu(self, cell: Cell) -> bool:
        return self._gpus and cell.experiment.engine.device != "cpu"

    def _room(self) -> int:
        """Tasks to hand in at a time: as many as the cluster as it is now has places for."""
        resources = self._ray.cluster_resources()
        return max(1, int(resources.get("GPU", 0) if self._gpus else resources.get("CPU", 0) / CPUS_PER_TASK))

    def _submit(self, group: Sequence[Cell]) -> None:
        locks = ExitStack()
        with grid_failures.writing(self._store.folder):
            mine = locks.enter_context(self._store.claimed(group))
        if not mine:
            locks.close()
            return
        try:
            on_gpu = self._on_gpu(mine[0])
            task = _Task(
                VERSION,
                str(environment.describe()["command"]),
                [(cell.study, cell.preset, cell.experiment.model_dump(), cell.options) for cell in mine],
                self._together,
                None if on_gpu else CPUS_PER_TASK,
                self._folder,
            )
            remote = self._ray.remote(_measure_group).options(
                name=f"feddure {mine[0].experiment.method}",
                num_cpus=CPUS_PER_TASK,
                num_gpus=1 if on_gpu else 0,
                max_retries=ATTEMPTS - 1,
                retry_exceptions=[_Stopped],
            )
            self._pending[remote.remote(task, self._dataset(mine[0].experiment.dataset))] = mine, locks
            if self._watcher:
                self._watcher.group_begins([Distant(cell.experiment) for cell in mine])
        except DatasetFailed as failed:
            with locks:
                grid_failures.note(self._fail({cell.hash: failed.problem for cell in mine}, mine), self._said)
        except BaseException:
            locks.close()
            raise

    def _dataset(self, name: str) -> Any:
        if name not in self._datasets:
            self._datasets[name] = self._ray.put(self._load(name))
        return self._datasets[name]

    def _receive(self, task: Any) -> list[Cell]:
        """Keep what a task found; returns its cells if its workers were lost too often."""
        cells, locks = self._pending.pop(task)
        with locks:
            try:
                found = self._ray.get(task)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, _Stopped):
                    return cells
                raise _explained(error, cells) from error
            except self._ray.exceptions.RayError as error:
                if "No module named 'feddure" in str(error):
                    raise _explained(error, cells) from None
                return cells
            for note in found.notes:
                if note not in self._said:
                    self._said.add(note)
                    warnings.warn(note, FeddureWarning, stacklevel=2)
            measurements = [Measurement(**fields) for fields in found.measurements]
            for measurement in measurements:
                with grid_failures.writing(self._store.folder):
                    self._store.keep(measurement)
        if self._watcher:
            kept = [cell for cell in cells if cell.hash not in found.problems]
            for cell, measurement in zip(kept, measurements, strict=True):
                self._watcher.cell_done(cell, measurement)
        self._fail(found.problems, cells)
        return []

    def _fail(self, problems: dict[str, Problem], cells: Sequence[Cell]) -> list[Failure]:
        """Some of these cells, by their hashes, have been ended by errors of their own."""
        failures = [Failure(cell, problems[cell.hash]) for cell in cells if cell.hash in problems]
        self._failures += failures
        if failures and self._watcher:
            self._watcher.cells_lost([failure.cell for failure in failures])
        return failures


def _measure_group(task: _Task, dataset: Dataset) -> _Found:
    """What runs on a worker: a group in a temporary folder, and away with it."""
    if task.version != VERSION:
        raise RunError(
            f"--ray: feddure {VERSION} is installed on node {socket.gethostname()}, but {task.version} where the grid "
            "was started; install the same version everywhere"
        )
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    cells = [Cell(study, preset, Experiment(**fields), options) for study, preset, fields, options in task.cells]
    place = task.folder if os.access(task.folder, os.W_OK | os.X_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="feddure-ray-", dir=place) as folder,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default", FeddureWarning)
        store = Store(Path(folder))
        failures: list[Failure] = []
        try:
            measure(cells, store, lambda name: dataset, task.together, resumable=False)
        except GridStopped:
            raise _Stopped from None
        except CellsFailed as failed:
            failures = failed.failures
        found = [store.find(cell) for cell in cells]
    measurements = [
        dataclasses.asdict(one) | {"environment": one.environment | {"command": task.command}} for one in found if one
    ]
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, FeddureWarning)]
    problems = {cell.hash: problem for cell, problem in failures}
    return _Found(measurements, list(dict.fromkeys(notes)), problems)


def _lost(cells: Sequence[Cell]) -> str:
    return (
        f"--ray: the workers of {named(cells)} were lost {ATTEMPTS} times (killed, out of memory, or their node went "
        "away); all other cells are kept. Give the nodes more memory or measure these without --ray"
    )


def _explained(error: Exception, cells: Sequence[Cell]) -> Exception:
    """The user's mistake as it was made on the worker; an error in code keeps its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FeddureError):
        return cause
    if "No module named 'feddure" in str(error):
        return RunError(
            f"--ray: feddure cannot be imported on a node of the cluster; install feddure {VERSION} on every node"
        )
    return RuntimeError(f"{named(cells)} failed on a worker:\n{error}")


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
