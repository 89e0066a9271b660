"""Methods side by side: the same partitions, the same sampled clients, the same seeds, the same lanes.

A comparison is a folder with one ordinary run for each method and seed. Its tables tell what each method reached, and,
seed by seed, whether it differs from a reference method by more than chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from feddure import methods as known_methods
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, RunError
from feddure.federation import runs
from feddure.files import write_whole
from feddure.studies import compare_report, compare_tables
from feddure.studies.compare_plan import PLAN_FILE, Plan, read_plan, run_folder
from feddure.studies.compare_tables import Pair, Row
from feddure.tracking import records


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its runs in the plan's order, a row a method, and the differences from the reference."""

    plan: Plan
    runs: list[records.Run]
    rows: list[Row]
    pairs: list[Pair]
    report: Path


def compare(
    plan: Plan, experiment: Experiment, dataset: Dataset, folder: Path, resume: bool = False, progress: bool = True
) -> Comparison:
    """Run all of a plan that is not finished yet, sharing the lanes, and write tables and report.

    `experiment` says everything but the method and the seed.
    """
    wanted = check(plan, experiment, folder, resume)
    left = [path for path in wanted if not runs.is_finished(path)]
    members = runs.prepare([wanted[path] for path in left], dataset, left, resume) if left else []
    _write_plan(plan, folder)
    if members:
        runs.complete(members, folder, "compare", progress)
    finished = [records.read_run(path) for path in wanted]
    _expect_one_partition_a_seed(finished)
    rows, pairs = compare_tables.rows(plan, finished), compare_tables.pairs(plan, finished)
    compare_tables.write(folder, rows, pairs)
    return Comparison(plan, finished, rows, pairs, compare_report.write(folder, plan, finished, rows, pairs))


def check(plan: Plan, experiment: Experiment, folder: Path, resume: bool) -> dict[Path, Experiment]:
    """The experiment of each run by its folder; refuses what cannot be run or must not be overwritten."""
    wanted = {run_folder(folder, *run): _experiment(experiment, *run) for run in plan.runs()}
    if len(wanted) < len(plan.runs()):
        raise ConfigError("--methods: two names differ only in signs that the name of a folder cannot have")
    _check_folder(folder, resume)
    for path, found in wanted.items():
        runs.check_folder(found, path, resume)
    return wanted


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
