"""Methods side by side: the same partitions, the same sampled clients, the same seeds, one run after the other.

A comparison is a folder with one ordinary run for each method and seed. Its tables tell what each method reached, and,
seed by seed, whether it differs from a reference method by more than chance.
"""

import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from feddure import experiments, plugins, recommended
from feddure import methods as known_methods
from feddure.config import Experiment
from feddure.data import partition
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.files import expect_free, write_whole
from feddure.simulation import runs
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation
from feddure.studies import compare_report
from feddure.studies.grid import failures as grid_failures
from feddure.studies.grid import jobs
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.runner import GridStopped, new_command
from feddure.studies.grid.store import Cell, Store
from feddure.studies.plan import PLAN_FILE, REFERENCE, Plan, read_plan, run_folder
from feddure.tracking import records, tracker
from feddure.tracking.console import Progress, SideBySide
from feddure.tracking.tracker import trackers

_DECAY = 0.9  # of the averaged models that are set beside each other where nobody says
_MOST_JOBS = 4
_WORTH_A_PROCESS = 50_000  # images in all steps of all runs: a process takes seconds to start


def make_plan(
    methods: Sequence[str], seeds: Sequence[int], against: str | None = None, present: Plan | None = None
) -> Plan:
    """A plan, checked; what a `present` one compares already stays in it."""
    for name, given in (("methods", methods), ("seeds", seeds)):
        if twice := [value for place, value in enumerate(given) if value in given[:place]]:
            raise ConfigError(f"{name}: {twice[0]} was given twice; name each once")
    if present is not None:
        methods = [*present.methods, *(name for name in methods if name not in present.methods)]
        seeds = [*present.seeds, *(seed for seed in seeds if seed not in present.seeds)]
        against = against or present.against
    if not methods:
        names = ", ".join(known_methods.METHODS)
        raise ConfigError(f"no method was given: name the methods to compare (--methods a,b,c); there are: {names}")
    if against is None:
        against = REFERENCE if REFERENCE in methods else methods[0]
    elif against not in methods:
        raise ConfigError(f"against {against}: expected one of the methods compared: {', '.join(methods)}")
    return Plan(tuple(methods), tuple(seeds), against)


def prepare(
    preset: str | None,
    file: Path | None,
    changes: dict[str, Any],
    sets: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    against: str | None,
    folder: Path | None,
    resume: bool,
    read: Callable[[str], Dataset],
    say: Callable[[str], None],
    allow_modules: bool,
) -> tuple[Plan, Experiment, Dataset | None, Path]:
    """What a command or call asks to be compared, the images where they had to be looked at, and the folder.

    What it does not say, the folder or the preset does.
    """
    for key, value in (changes | experiments.parse_sets(sets)).items():
        if key in ("method", "seed"):
            raise ConfigError(f"{key}={value}: a comparison has several; give {key}s (--{key}s) instead")
    there = read_plan(folder) if folder is not None else None
    present = there if resume or jobs.is_job() else None
    if not (methods or resume or present):
        if there is not None:
            raise RunError(
                f"{folder}: a comparison is there already; go on with it by --resume, or name another folder"
            )
        experiments.expect_given(preset, file, changes, sets)
    if resume and preset is None and file is None:
        file = config_to_resume(folder)
    experiment, images = recommended.load(preset, file, changes, sets, read, say, allow_modules)
    if not resume and experiment.server.ema is None:
        # Averaging flatters whoever jumps most: all or none. What is resumed stays as it was begun.
        experiment = experiment.model_copy(update={"server": experiment.server.model_copy(update={"ema": _DECAY})})
    plugins.allow(*methods, *(present.methods if present and allow_modules else ()))
    preset = preset if images is None else recommended.NAME
    usual = experiments.compared(preset) if preset is not None else ([], [])
    chosen = seeds or usual[1] or ([] if present else [experiment.seed])
    plan = make_plan(methods or usual[0], chosen, against, present)
    if folder is None:
        folder = experiments.new_folder(f"compare-{preset or f'{experiment.dataset}-{experiment.partition.setting}'}")
    return plan, experiment, images, folder


def config_to_resume(folder: Path | None) -> Path:
    """The configuration that all runs of a comparison share, where nothing but its folder was given."""
    if folder is None:
        raise RunError("to resume needs the folder of a comparison: name it (--out)")
    plan = read_plan(folder)
    found = plan and next(
        (path for run in plan.runs() if (path := run_folder(folder, *run) / records.CONFIG).exists()), None
    )
    if not found:
        raise RunError(f"{folder}: no comparison is there to resume; give a preset or a configuration to start one")
    return found


def resume_command(folder: Path, plan: Plan, experiment: Experiment) -> str:
    """How to go on with a comparison."""
    own = any(experiment.model_copy(update={"method": method}).modules for method in plan.methods)
    return f"feddure compare --out {shlex.quote(str(folder))} --resume{' --allow-modules' if own else ''}"


def compare(
    plan: Plan,
    experiment: Experiment,
    dataset: Dataset,
    folder: Path,
    resume: bool = False,
    progress: bool = True,
    track: Sequence[str] = (),
    processes: int = 1,
    arguments: Sequence[str] = (),
    started: Callable[[], None] = lambda: None,
) -> compare_report.View:
    """Run all of a plan that is not finished yet, and write tables and report.

    `experiment` says everything but the method and the seed. A method that an error of its own ends takes no other
    with it. `track` names services that every run is reported to. With several `processes`, so many of the
    command with these `arguments` share the runs (each calls `work`); what they leave, as one that is killed, is run
    here. `started` is called once it is known that one of the methods can be run, before anything is written.
    """
    wanted = check(plan, experiment, folder, resume)
    tracker.expect(track)
    if not any(path.exists() for path in wanted):
        _expect_possible(wanted.values(), dataset)
    started()
    with runs.lock(folder):
        _check_folder(folder, resume)  # another process may have been here meanwhile
        write_whole(folder / PLAN_FILE, plan.to_yaml().encode(), RunError)
        command = resume_command(folder, plan, experiment)
        noted = _Failures(folder, wanted.values())
        noted.forget()
        processes = min(processes, sum(not runs.is_finished(path) for path in wanted))
        if processes > 1:
            _train_in_jobs(wanted, processes, arguments, folder, command)
            resume = True
        _train(wanted, dataset, folder, command, resume, progress, track)
        failed = noted.by_method()
        noted.forget()
        done = replace(plan, methods=tuple(method for method in plan.methods if method not in failed))
        if not done.methods:
            raise _nothing_compared(failed)
        finished = [records.read_run(path) for path, found in wanted.items() if found.method not in failed]
        _expect_one_partition_a_seed(finished)
        view = compare_report.View(done, finished, failed, experiment.metric)
        view.write_tables(folder)
        compare_report.write(folder, view)
    return view


def check(plan: Plan, experiment: Experiment, folder: Path, resume: bool) -> dict[Path, Experiment]:
    """The experiment of each run by its folder; refuses what cannot be run or must not be overwritten."""
    wanted = _wanted(plan, experiment, folder)
    if len(wanted) < len(plan.runs()):
        raise ConfigError("methods: two names differ only in signs that the name of a folder cannot have")
    runs.expect_unlocked(folder)
    _check_folder(folder, resume)
    for path, found in wanted.items():
        runs.check_folder(found, path, resume)
    return wanted


def _expect_possible(wanted: Iterable[Experiment], dataset: Dataset) -> None:
    """Refuse what no method can be run on, in the words of its run; of those that can, the first is tried."""
    failed: dict[str, Problem] = {}
    for experiment in {found.method: found for found in wanted}.values():
        engine = Engine(experiment.engine)
        try:
            made = partition.make(dataset, experiment.partition, experiment.partition_seed, experiment.validation)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FeddureWarning)  # the run says it
                Federation(experiment, dataset, made, engine)
            return
        except Exception as error:
            if grid_failures.ends_all(error):
                raise
            failed[experiment.method] = grid_failures.describe(error)
        finally:
            engine.release()
    raise _nothing_compared(failed)


def work(plan: Plan, experiment: Experiment, dataset: Dataset, folder: Path, track: Sequence[str] = ()) -> None:
    """What one of several processes does: the runs that nobody else is at, one after the other."""
    jobs.end_with_parent()
    command = resume_command(folder, plan, experiment)
    _train(_wanted(plan, experiment, folder), dataset, folder, command, resume=True, progress=False, track=track)


def usual_jobs(plan: Plan, experiment: Experiment) -> int:
    """Processes that share a comparison's runs: one fills a GPU; threads do not fill cores with small networks."""
    batch, steps = (10 if isinstance(n, str) else n for n in (experiment.unlabelled_batch, experiment.local_steps))
    images = experiment.rounds * experiment.clients_per_round * steps * (batch + experiment.labelled_batch)
    if Engine(experiment.engine).device.type == "cuda" or images * len(plan.runs()) < _WORTH_A_PROCESS:
        return 1
    return min(_MOST_JOBS, torch.get_num_threads())


def _train_in_jobs(
    wanted: Mapping[Path, Experiment], processes: int, arguments: Sequence[str], folder: Path, command: str
) -> None:
    with closing(SideBySide({path: found.rounds for path, found in wanted.items()}, processes)) as progress:
        try:
            jobs.run_in_jobs(new_command(), processes, arguments, progress.refresh, progress.say)
        except GridStopped as stopped:
            raise runs.Interrupted(folder, None, stopped.exit_code - 128, command) from None


class _Failures:
    """What has ended methods, noted in the comparison's folder for the other processes of the command."""

    def __init__(self, folder: Path, experiments: Iterable[Experiment]):
        self._store = Store(folder / ".failures")
        self._cells = [Cell("compare", "", experiment) for experiment in experiments]

    def note(self, experiment: Experiment, problem: Problem) -> None:
        self._store.fail(Cell("compare", "", experiment), problem)

    def by_method(self) -> dict[str, Problem]:
        noted = self._store.failures()
        return {cell.experiment.method: noted[cell.hash] for cell in self._cells if cell.hash in noted}

    def forget(self) -> None:
        self._store.forget_failures(self._cells)


def _train(
    wanted: Mapping[Path, Experiment],
    dataset: Dataset,
    folder: Path,
    resume_command: str,
    resume: bool,
    progress: bool,
    track: Sequence[str],
) -> None:
    """Train runs by their folders to their ends; an error of a method's own is noted and ends that method alone."""
    noted = _Failures(folder, wanted.values())
    ended = noted.by_method()
    left = {path: one for path, one in wanted.items() if one.method not in ended and not runs.is_finished(path)}
    if not left:
        return
    engine, method = Engine(next(iter(left.values())).engine), ""
    console = Progress() if progress else None
    with closing(console) if console else nullcontext():
        for number, (path, experiment) in enumerate(left.items(), start=1):
            if experiment.method in noted.by_method() or runs.is_finished(path):  # by another process meanwhile
                continue
            if experiment.method != method:
                engine.release()  # the seeds of a method share its lanes; those of another need the memory
                method = experiment.method
            if console:
                name = f"{known_methods.title(method)}, seed {experiment.seed} ({number} of {len(left)})"
                console.begin(experiment.rounds, 0, name, experiment.rounds * (len(left) - number))
            try:
                observers = [*trackers(track, path, folder.resolve().name), *([console] if console else [])]
                runs.execute(experiment, dataset, path, resume, False, observers, engine, resume_command)
            except Exception as error:
                if isinstance(error, runs.Busy) and jobs.is_job():
                    continue  # another of the processes is at it
                if grid_failures.ends_all(error) or not grid_failures.is_usable(engine.device):
                    raise
                problem = grid_failures.describe(error)
                noted.note(experiment, problem)
                if path.exists():  # what could not even begin is told at the end
                    warnings.warn(f"{method}: {problem.reason}; the others go on", FeddureWarning, stacklevel=2)


def _nothing_compared(failed: Mapping[str, Problem]) -> ConfigError | RunError:
    """What has ended every method: the same mistake, or the errors of each."""
    errors = {problem.error: problem for problem in failed.values()}
    if len(errors) == 1 and not next(iter(errors.values())).traceback:
        return ConfigError(*errors)
    return RunError("\n".join(grid_failures.told([(f"method {name}", problem) for name, problem in failed.items()])))


def _wanted(plan: Plan, experiment: Experiment, folder: Path) -> dict[Path, Experiment]:
    wanted = {}
    for method, seed in plan.runs():
        found = experiment.model_copy(update={"method": method, "seed": seed})
        plugins.expect_allowed(*found.modules)
        known_methods.make(found)  # an unknown method is an error before anything is done
        wanted[run_folder(folder, method, seed)] = found
    return wanted


def _check_folder(folder: Path, resume: bool) -> None:
    if read_plan(folder) is None:
        expect_free(folder, RunError, " and holds no comparison; choose another folder")
    elif not resume:
        raise RunError(f"{folder}: a comparison is there already; choose another folder, or go on (--resume)")


def _expect_one_partition_a_seed(finished: Sequence[records.Run]) -> None:
    first: dict[int, records.Run] = {}
    for run in finished:
        other = first.setdefault(run.experiment.seed, run)
        if run.partition["sha256"] != other.partition["sha256"]:
            raise RunError(
                f"{run.folder} and {other.folder} have different partitions and cannot be compared; "
                "delete one of them and resume the comparison"
            )
