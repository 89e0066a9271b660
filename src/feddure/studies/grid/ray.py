"""Grids over several machines: cells as the tasks of a Ray cluster.

Data sets travel through the cluster's object store, so that its nodes need feddure and nothing else. The driver keeps
every measurement as it comes; a cell whose worker is lost is measured again, from its beginning, on another one.
"""

import dataclasses
import logging
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from feddure import environment, plugins
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureError, FeddureWarning, RunError
from feddure.simulation.engine import Engine
from feddure.simulation.runs import stopping
from feddure.studies.grid import failures
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.runner import GridStopped, Load, measure, new_command, program_of
from feddure.studies.grid.store import Cell, Measurement, Store, named, unmeasured
from feddure.version import VERSION

LOCAL = "local"
ATTEMPTS = 4
"""How often the cell of a lost worker is measured before it is given up."""

_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^/:\s]+|\[[^\]\s]+\]):(?P<port>\d{1,5})")
_SECONDS_TO_CONNECT, _POLL_SECONDS = 10.0, 0.2

_Found = tuple[dict[str, Any] | None, Problem | None, list[str]]
"""What a worker answers: a measurement or an error of the cell's own, and what the user should know."""


class _Stopped(Exception):
    """A worker was asked to end: to Ray a reason to try again elsewhere."""


def measure_on_ray(
    cells: Sequence[Cell], store: Store, load: Load, address: str, refresh: Callable[[], None] = lambda: None
) -> None:
    """Measure all cells that are not finished on a Ray cluster, or on all cores of this machine (`local`).

    Each GPU of the cluster takes a cell at a time; on a cluster without GPUs each CPU does. What has failed is in the
    store.
    """
    waiting = sorted(unmeasured(cells, store), key=program_of)  # a worker keeps what it has compiled
    if not waiting:
        return
    with connected(address) as ray, stopping() as stop, ExitStack() as claims:
        driver = _Driver(ray, store, load, claims)
        while waiting or driver.pending:
            while waiting and len(driver.pending) < driver.room():
                driver.submit(waiting.pop(0))
            done, _ = ray.wait(list(driver.pending), timeout=_POLL_SECONDS) if driver.pending else ([], [])
            if stop():
                # No task is cancelled, Ray ends them with this connection: in Ray 2.55, to cancel a task that is just
                # done ends this very process, without a word.
                raise GridStopped(stop.signal, under_way="those under way begin anew")
            for task in done:
                driver.receive(task)
            refresh()


class _Driver:
    """Hands claimed cells in, and keeps what comes back in the store."""

    def __init__(self, ray: ModuleType, store: Store, load: Load, claims: ExitStack):
        self._ray, self._store, self._claims = ray, store, claims
        self._dataset = cache(lambda name: ray.put(load(name)))
        self._gpus = ray.cluster_resources().get("GPU", 0) >= 1
        self._name = new_command()
        self.pending: dict[Any, tuple[Cell, ExitStack]] = {}  # tasks under way, and their claims

    def room(self) -> int:
        """Tasks to hand in at a time: as many as the cluster as it is now has places for."""
        return max(1, int(self._ray.cluster_resources().get("GPU" if self._gpus else "CPU", 0)))

    def submit(self, cell: Cell) -> None:
        claim = self._claims.enter_context(ExitStack())
        with failures.writing(self._store.folder):
            if not claim.enter_context(self._store.claimed(cell)):
                return
            self._store.note(cell, self._name)
        try:
            dataset = self._dataset(cell.experiment.dataset)
        except Exception as error:
            if failures.ends_all(error):
                raise
            self._store.fail(cell, failures.describe(error))  # the code of its data set
            claim.close()
            return
        on_gpu = self._gpus and cell.experiment.engine.device != "cpu"
        remote = self._ray.remote(_measure_cell).options(
            name=f"feddure {cell.experiment.method}",
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
            max_retries=ATTEMPTS - 1,
            retry_exceptions=[_Stopped],
        )
        command = str(environment.describe()["command"])
        self.pending[remote.remote(VERSION, command, cell.experiment.model_dump(), on_gpu, dataset)] = cell, claim

    def receive(self, task: Any) -> None:
        cell, claim = self.pending.pop(task)
        with claim, failures.writing(self._store.folder):
            found, problem, notes = self._get(task, cell)
            for note in notes:
                warnings.warn(note, FeddureWarning, stacklevel=2)
            if found is not None:
                self._store.keep(Measurement(**found))
            elif problem is not None:
                self._store.fail(cell, Problem(*problem))

    def _get(self, task: Any, cell: Cell) -> _Found:
        """What a worker found; the user's mistakes as if made here, and an error in our code with its traceback."""
        try:
            return self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, FeddureError):
                raise cause from error
            if "No module named 'feddure" in str(error):
                raise RunError(
                    f"--ray: a node cannot import feddure; install feddure {VERSION} on every node"
                ) from None
            if isinstance(error, self._ray.exceptions.RayTaskError) and not isinstance(cause, _Stopped):
                raise RuntimeError(f"{named([cell])} failed on a worker:\n{error}") from error
        return None, Problem(f"its workers were lost {ATTEMPTS} times: killed, out of memory, or cut off"), []


_engine = lru_cache(maxsize=1)(Engine)  # of this worker's process: what it has compiled serves the next task


def _measure_cell(version: str, command: str, fields: dict[str, Any], on_gpu: bool, dataset: Dataset) -> _Found:
    """What runs on a worker: a cell in a temporary folder, and away with it."""
    if version != VERSION:
        raise RunError(
            f"--ray: feddure {VERSION} is installed on node {socket.gethostname()}, but {version} where the grid was "
            "started; install the same version everywhere"
        )
    if not on_gpu:
        torch.set_num_threads(1)
    cell = Cell("", "", Experiment(**fields))
    plugins.allow(*cell.experiment.modules)  # whoever hands cells in has checked them
    with tempfile.TemporaryDirectory(prefix="feddure-ray-") as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", FeddureWarning)
        store, engine = Store(Path(folder)), _engine(cell.experiment.engine)
        try:
            measure([cell], store, lambda name: dataset, engine=engine)
        except GridStopped:
            raise _Stopped from None
        finally:
            engine.release()
        found, problem = store.find(cell), store.failures().get(cell.hash)
    notes = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, FeddureWarning))
    if found is not None:
        found = dataclasses.replace(found, environment=found.environment | {"command": command})
    return None if found is None else vars(found), problem, list(notes)


@contextmanager
def connected(address: str, cpus: int | None = None) -> Iterator[ModuleType]:
    """Ray, with a cluster for as long as this holds; one that this process is connected to already is left alone."""
    _expect_answer(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ConfigError(f"--ray {address}: Ray is not installed; pip install 'feddure[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    try:
        if address == LOCAL:
            _start_here(ray, cpus)
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as problem:
        ray.shutdown()
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        if address == LOCAL:
            raise RunError(f"--ray local: Ray cannot be started on this machine ({reason})") from problem
        raise _unreachable(address, reason) from problem
    try:
        yield ray
    finally:
        ray.shutdown()


def _start_here(ray: ModuleType, cpus: int | None) -> None:
    """Ray on this machine only: no port is open to any other."""
    from ray._private import ray_constants

    # What Ray does on systems without clusters: it keeps to 127.0.0.1.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    ray.init(
        address=LOCAL,
        num_cpus=cpus or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"task_oom_retries": ATTEMPTS - 1},
    )
    if ray.nodes()[0]["NodeManagerAddress"] not in ("127.0.0.1", "::1"):
        raise RuntimeError("this version opens ports to the network; pip install 'feddure[ray]'")


def _expect_answer(address: str) -> None:
    """Refuse what is no address, and one where nobody answers: Ray itself would wait for minutes."""
    if address in (LOCAL, "auto"):
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
