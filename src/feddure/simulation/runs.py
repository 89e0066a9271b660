"""A run: one experiment in a folder of its own, from the first round to the report, or from where it stopped.

While a process works on a folder it holds the folder's lock, so that no second one trains there.
"""

import os
import shlex
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.torch import save

from feddure import environment, experiments
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition
from feddure.errors import ConfigError, FeddureError, FeddureWarning, RunError, first_line
from feddure.files import expect_free, is_text, readable, write_json, write_whole
from feddure.pretrained import AVERAGED_FILE, MODEL_FILE
from feddure.reports.run_report import write_report
from feddure.simulation import checkpoint
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run
from feddure.simulation.lanes import Stopped
from feddure.simulation.server import Server
from feddure.tracking import records
from feddure.tracking.console import Progress
from feddure.tracking.observer import Observer
from feddure.tracking.summary import summarise
from feddure.tracking.tensorboard import TensorBoard

PARTITION_FILE, REPORT_FILE = "partition.npz", records.REPORT
LOCK_FILE, FAILURE_FILE = records.LOCK, records.FAILURE
is_finished = records.is_finished


class Interrupted(RunError):
    """A signal ended the work early; it can be resumed."""

    def __init__(self, folder: Path, round_number: int | None, number: int, resume_command: str):
        where = "" if round_number is None else f" after round {round_number}"
        super().__init__(f"stopped{where}; the state is in {folder}\ngo on with: {resume_command}")
        self.exit_code = 128 + number


class Busy(RunError):
    """Another process works on a folder."""


def execute(
    experiment: Experiment,
    dataset: Dataset,
    folder: Path,
    resume: bool = False,
    progress: bool = True,
    observers: Sequence[Observer] = (),
    engine: Engine | None = None,
    resume_command: str = "",
    started: Callable[[], None] = lambda: None,
) -> records.Run:
    """Run an experiment into `folder`; with `resume`, from the folder's last checkpoint.

    Runs one after the other can share an engine, and with it what was compiled. `started` is called once it is known
    that the run can be, before anything is written.
    """
    resume_command = resume_command or how_to_resume(folder, experiment)
    expect_unlocked(folder)
    check_folder(experiment, folder, resume)
    if is_finished(folder):
        return records.read_run(folder)
    # What cannot be run leaves nothing behind: the federation comes before anything is written.
    engine = engine or Engine(experiment.engine)
    resumes = (folder / checkpoint.FILE).exists()
    federation = Federation(experiment, dataset, _partition(experiment, dataset, folder), engine, resumes)
    if note := federation.server.note():
        warnings.warn(note, FeddureWarning, stacklevel=2)
    started()
    with lock(folder), ExitStack() as closing:
        if not resume:
            check_folder(experiment, folder, resume)  # another process may have been here meanwhile
        checkpoint.read(federation.server, folder)
        _write_start(federation, folder)
        watching = [_OnDisk(folder, federation, resume_command), *observers]
        if progress:
            console = Progress()
            console.begin(experiment.rounds, federation.round)
            watching.append(console)
        for observer in watching:
            closing.callback(observer.close)
        with noting_failure(folder):
            _train(federation, folder, watching, resume_command)
            _expect_learned(folder)
            write_models(federation.server, folder)
            write_report([folder], folder / REPORT_FILE)
        finished = records.read_run(folder)
        for observer in watching:
            observer.run_done(summarise(finished.metrics, finished.timing, experiment.metric), folder)
    return finished


def _train(federation: Federation, folder: Path, observers: Sequence[Observer], resume_command: str) -> None:
    with stopping() as stop:
        try:
            run(federation, observers, stop)
        except Stopped:
            checkpoint.write(federation.server, folder)
            raise Interrupted(folder, federation.round, stop.signal, resume_command) from None


@contextmanager
def noting_failure(folder: Path) -> Iterator[None]:
    """While this holds, an error leaves its reason in the folder."""
    path = folder / FAILURE_FILE
    path.unlink(missing_ok=True)
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        said = str(error) if isinstance(error, FeddureError) else first_line(error)
        with suppress(RunError):  # a full disk has room for no words
            write_json(path, {"error": said}, RunError)
        raise


def _expect_learned(folder: Path) -> None:
    """A run whose last rounds used no client did not do what it was asked for; with Poisson sampling one may draw none.

    It is the method's or the configuration's fault, so in a comparison the other methods go on.
    """
    drawn = [record for record in records.read(folder / records.METRICS) if record["clients"]]
    used = [number for number, record in enumerate(drawn, 1) if len(record["clients"]) > len(record["left_out"])]
    if empty := len(drawn) - max(used, default=0):
        raise ConfigError(
            f"{folder}: the last {empty} of {len(drawn)} rounds used no client, as no update was finite, and no model "
            "is written; lower optimizer.learning_rate, or look at the method. `feddure report` shows what there is"
        )


def how_to_resume(folder: Path, experiment: Experiment) -> str:
    """The command that goes on with a run."""
    return f"feddure run --out {shlex.quote(str(folder))} --resume{' --allow-modules' if experiment.modules else ''}"


def read_config(folder: Path) -> Experiment | None:
    """The configuration of a run folder, or None where there is no run yet."""
    path = folder / records.CONFIG
    return experiments.load(file=path) if path.exists() else None


def config_to_resume(folder: Path | None) -> Path:
    """The configuration file of the run to go on with, where nothing but its folder was given."""
    if folder is None:
        raise RunError("--resume was given without --out: name the folder of the run to go on with")
    if not (folder / records.CONFIG).exists():
        raise RunError(f"{folder}: no run is there to resume; give its --preset or --config to start one")
    return folder / records.CONFIG


class _OnDisk(Observer):
    """What writes a run's files; a full disk ends the run with a message, and the last checkpoint stays."""

    def __init__(self, folder: Path, federation: Federation, resume_command: str):
        self._folder = folder
        self._resume_command = resume_command
        self._observers: list[Observer] = [
            records.Recorder(folder, federation.round),
            TensorBoard(folder, federation.dataset.classes),
            checkpoint.Checkpoints(folder),
        ]

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        with self._explained():
            for observer in self._observers:
                observer.round_done(federation, record, seconds)

    def close(self) -> None:
        with self._explained(), ExitStack() as closing:
            for observer in self._observers:
                closing.callback(observer.close)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise RunError(
                f"{self._folder}: cannot be written ({problem.strerror}); the last checkpoint is whole, "
                f"go on from it with: {self._resume_command}"
            ) from None


class Stop:
    """Becomes true when the user asks to stop; a second time ends the process at once."""

    signal = 0

    def __call__(self) -> bool:
        return self.signal != 0

    def ask(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def stopping() -> Iterator[Stop]:
    """While this holds, Ctrl-C and SIGTERM only ask to stop: lanes end the step under way and raise `Stopped`."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.ask) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """While this holds no other process works on the folder; the lock ends with the process, however that ends."""
    path = folder / LOCK_FILE
    if path.is_symlink():  # whoever takes the lock empties the file
        raise RunError(f"{path}: a link, which no run makes; remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(path)
        held.acquire(blocking=False)
    except Timeout:
        raise Busy(f"{folder}: {_owner(path)} is working on it; wait for its end or use another folder") from None
    except OSError as problem:
        raise RunError(f"{folder}: the run's folder cannot be made ({problem.strerror})") from None
    try:
        with suppress(OSError):  # Windows lets nobody write to a locked file
            path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        held.release()


def _owner(path: Path) -> str:
    with suppress(OSError, ValueError):
        return f"process {int(path.read_text())}"
    return "another process"


def expect_unlocked(folder: Path) -> None:
    """Refuse a folder that another process works on."""
    if (folder / LOCK_FILE).exists():
        with lock(folder):
            pass


def check_folder(experiment: Experiment, folder: Path, resume: bool) -> None:
    """Refuse a folder that this run must not write to."""
    if not is_text(folder.absolute()):
        raise RunError(
            f"{readable(folder)}: the path is not UTF-8, which TensorBoard's files need; choose another folder"
        )
    present = read_config(folder)
    if present is None:
        expect_free(folder, RunError, " and holds no run; choose another folder")
    elif not resume:
        raise RunError(f"{folder}: a run is there already; choose another folder, or resume it (--resume)")
    elif experiments.fingerprint(present) != experiments.fingerprint(experiment):
        different = _differences(present, experiment)
        raise RunError(
            f"{folder}: its run has another configuration ({different}); resume with --out and --resume alone"
        )
    elif checkpoint.is_of_other_code(experiment, folder):
        warnings.warn(
            f"{folder}: your own code ({experiment.own_code()}) has changed since this run was started; what is there "
            "comes from the code of then. Choose another folder to train all of it with the code of now",
            FeddureWarning,
            stacklevel=3,
        )


def _write_start(federation: Federation, folder: Path) -> None:
    """Write what a run starts with; what an earlier start wrote stays."""
    if not (folder / records.CONFIG).exists():
        write_whole(folder / records.CONFIG, experiments.to_yaml(federation.experiment).encode(), RunError)
    if not (folder / PARTITION_FILE).exists():
        federation.partition.save(folder / PARTITION_FILE)
    if not (folder / records.PARTITION).exists():
        write_json(folder / records.PARTITION, partitions.summarise(federation.partition, federation.dataset), RunError)
    own = federation.experiment.own_code()
    about = environment.describe() | {"device": str(federation.engine.device)} | ({"own_code": own} if own else {})
    write_json(folder / records.ENVIRONMENT, about, RunError)


def _differences(present: Experiment, given: Experiment) -> str:
    one, other = experiments.flat(present), experiments.flat(given)
    keys = experiments.differences([present, given])
    told = [f"{key}: {one.get(key)} there, {other.get(key)} given" for key in keys]
    return ", ".join([*told[:3], *([f"and {len(told) - 3} more"] if len(told) > 3 else [])])


def _partition(experiment: Experiment, dataset: Dataset, folder: Path) -> Partition:
    path = folder / PARTITION_FILE
    if path.exists():
        return Partition.load(path, dataset)
    return partitions.make(dataset, experiment.partition, experiment.partition_seed, experiment.validation)


def write_models(server: Server, folder: Path) -> None:
    """The global model, and first its average over rounds where the server keeps one."""
    if server.decay is not None:
        write_whole(folder / AVERAGED_FILE, _pack_model(server, averaged=True), RunError)
    write_whole(folder / MODEL_FILE, _pack_model(server), RunError)


def _pack_model(server: Server, averaged: bool = False) -> bytes:
    """A model as a file: tensors by name, and in the header what they belong to."""
    header = {
        "experiment": server.experiment.model_dump(),
        "classes": server.dataset.classes,
        "mean": server.dataset.mean,
        "std": server.dataset.std,
        "shape": server.dataset.shape,
        "norm": server.method.norm,
    }
    tensors = {name: tensor.cpu() for name, tensor in server.model_state(averaged).items()}
    return save(tensors, checkpoint.pack_header(header))
