"""Methods side by side: the same partitions, the same sampled clients, the same seeds, the same lanes.

A comparison is a folder with one ordinary run for each method and seed. Its tables tell what each method reached, and,
seed by seed, whether it differs from a reference method by more than chance.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from feddure import methods as known_methods
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.files import write_whole
from feddure.simulation import runs
from feddure.studies import compare_report
from feddure.studies.compare_plan import PLAN_FILE, Plan, read_plan, run_folder
from feddure.studies.compare_report import View
from feddure.studies.grid import failures as grid_failures
from feddure.studies.grid.failures import Problem
from feddure.tracking import records


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its runs in the plan's order, and the tables of them.

    Methods that have `failed` on any seed are in none of them.
    """

    plan: Plan
    runs: list[records.Run]
    view: View
    report: Path
    failed: Mapping[str, Problem]


def compare(
    plan: Plan, experiment: Experiment, dataset: Dataset, folder: Path, resume: bool = False, progress: bool = True
) -> Comparison:
    """Run all of a plan that is not finished yet, sharing the lanes, and write tables and report.

    `experiment` says everything but the method and the seed. A method that an error of its own ends takes no other
    with it.
    """
    wanted = check(plan, experiment, folder, resume)
    left = {path: found for path, found in wanted.items() if not runs.is_finished(path)}
    failed = _Training(plan, dataset, folder, resume, progress).train(left)
    done = replace(plan, methods=tuple(method for method in plan.methods if method not in failed))
    if not done.methods:
        raise _nothing_compared(failed)
    finished = [records.read_run(path) for path, found in wanted.items() if found.method not in failed]
    _expect_one_partition_a_seed(finished)
    view = View(done, finished, failed)
    view.write_tables(folder)
    report = compare_report.write(folder, view)
    return Comparison(plan, finished, view, report, failed)


def check(plan: Plan, experiment: Experiment, folder: Path, resume: bool) -> dict[Path, Experiment]:
    """The experiment of each run by its folder; refuses what cannot be run or must not be overwritten."""
    wanted = {run_folder(folder, *run): _experiment(experiment, *run) for run in plan.runs()}
    if len(wanted) < len(plan.runs()):
        raise ConfigError("--methods: two names differ only in signs that the name of a folder cannot have")
    _check_folder(folder, resume)
    for path, found in wanted.items():
        runs.check_folder(found, path, resume)
    return wanted


class _Training:
    """Trains the runs of a comparison side by side; where an error ends them, method by method."""

    def __init__(self, plan: Plan, dataset: Dataset, folder: Path, resume: bool, progress: bool):
        self._plan = plan
        self._dataset = dataset
        self._folder = folder
        self._resume = resume
        self._progress = progress
        self._began = False

    def train(self, left: Mapping[Path, Experiment]) -> dict[str, Problem]:
        """Train runs by their folders to their ends; returns the methods that an error of their own has ended."""
        if not left:
            _write_plan(self._plan, self._folder)
            return {}
        methods = list(dict.fromkeys(found.method for found in left.values()))
        problem = self._attempt(left)
        if problem is None:
            return {}
        if len(methods) == 1:
            return {methods[0]: problem}
        if self._began:
            self._say(f"{problem.error}; each method is tried by itself, from its last checkpoint")
        failed = {}
        for method in methods:
            own = self._attempt({path: found for path, found in left.items() if found.method == method})
            if own is not None:
                failed[method] = own
                if self._began:  # what no method can be prepared for is told once, at the end
                    self._say(f"{method}: {own.error}")
        return failed

    def _attempt(self, wanted: Mapping[Path, Experiment]) -> Problem | None:
        """Train some runs, and what has ended them in words; memory is free again when this returns."""
        try:
            members = runs.prepare(list(wanted.values()), self._dataset, list(wanted), self._resume)
            if not self._began:
                _write_plan(self._plan, self._folder)
                self._began = self._resume = True
            runs.complete(members, self._folder, "compare", self._progress)
        except Exception as error:
            if grid_failures.ends_all(error) or not _gpu_is_usable():
                raise
            return grid_failures.describe(error)
        return None

    def _say(self, text: str) -> None:
        warnings.warn(text, FeddureWarning, stacklevel=2)


def _gpu_is_usable() -> bool:
    return not torch.cuda.is_initialized() or grid_failures.is_usable(torch.device("cuda"))


def _nothing_compared(failed: Mapping[str, Problem]) -> ConfigError | RunError:
    """What has ended every method: the same mistake, or the errors of each."""
    errors = {problem.error: problem for problem in failed.values()}
    if len(errors) == 1 and not next(iter(errors.values())).traceback:
        return ConfigError(*errors)
    return RunError("\n".join(grid_failures.told([(f"method {name}", problem) for name, problem in failed.items()])))


def _experiment(experiment: Experiment, method: str, seed: int) -> Experiment:
    found = experiment.model_copy(update={"method": method, "seed": seed})
    known_methods.make(found)  # an unknown method is an error before anything is done
    return found


def _check_folder(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: a file is there; choose another --out")
    if read_plan(folder) is not None:
        if not resume:
            raise RunError(
                f"{folder}: a comparison is there already; choose another --out, or add --resume to go on with it"
            )
    elif folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise RunError(f"{folder}: the folder is not empty and holds no comparison; choose another --out")


def _write_plan(plan: Plan, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: the comparison's folder cannot be made ({problem.strerror})") from None
    write_whole(folder / PLAN_FILE, plan.to_yaml().encode(), RunError)


def _expect_one_partition_a_seed(finished: Sequence[records.Run]) -> None:
    first: dict[int, records.Run] = {}
    for run in finished:
        other = first.setdefault(run.experiment.seed, run)
        if run.partition["sha256"] != other.partition["sha256"]:
            raise RunError(
                f"{run.folder} and {other.folder} have different partitions and cannot be compared; "
                "delete one of them and go on with --resume"
            )
