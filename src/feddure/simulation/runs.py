"""A run: one experiment in a folder of its own, from the first round to the report, or from where it stopped.

Several runs can share an engine: `prepare` makes their federations, `complete` trains them side by side.
"""

import json
import shlex
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save

from feddure import config, environment
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.files import write_whole
from feddure.reports.run_report import write_report
from feddure.simulation import checkpoint
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Result, Stopped, Task
from feddure.simulation.rounds import Federation, Observer, run
from feddure.simulation.server import Server
from feddure.tracking import records
from feddure.tracking.console import console_observer
from feddure.tracking.tensorboard import TensorBoard

PARTITION_FILE, MODEL_FILE, REPORT_FILE = "partition.npz", "model.safetensors", "report.html"


class Interrupted(RunError):
    """A signal ended the work early; it can be resumed."""

    def __init__(self, folder: Path, round_number: int, number: int, command: str = "run"):
        go_on = _resume_command(folder, command)
        super().__init__(f"stopped after round {round_number}; the state is in {folder}\ngo on with: {go_on}")
        self.exit_code = 128 + number


def execute(
    experiment: Experiment, dataset: Dataset, folder: Path, resume: bool = False, progress: bool = True
) -> records.Run:
    """Run an experiment into `folder`; with `resume`, from the folder's last checkpoint."""
    return complete(prepare([experiment], dataset, [folder], resume), folder, progress=progress)[0]


def prepare(
    experiments: Sequence[Experiment], dataset: Dataset, folders: Sequence[Path], resume: bool = False
) -> "list[Member]":
    """Federations that share an engine, each as its folder's last checkpoint left it; nothing is written yet."""
    for experiment, folder in zip(experiments, folders, strict=True):
        check_folder(experiment, folder, resume)
        if experiment.engine != experiments[0].engine:
            raise ConfigError("runs that share an engine were given with different engine options: give all the same")
    engine = _SharedEngine(experiments[0].engine)
    for experiment, folder in zip(experiments, folders, strict=True):
        member = Member(experiment, dataset, _partition(experiment, dataset, folder), engine, folder)
        checkpoint.read(member, folder)
        engine.members.append(member)
    return engine.members


def complete(members: "Sequence[Member]", home: Path, command: str = "run", progress: bool = True) -> list[records.Run]:
    """Train members to their last rounds, and write models and reports; `feddure COMMAND --out HOME` can resume."""
    for member in members:
        _open_folder(member)  # the first thing written: what cannot be run leaves nothing behind
    observers: list[Observer] = [_OnDisk(member, _resume_command(home, command)) for member in members]
    if progress:
        observers.append(console_observer(members))  # type: ignore[arg-type]
    engine = members[0].engine
    with stopping() as stop, ExitStack() as closing:
        for observer in observers:
            closing.callback(observer.close)
        engine.lanes.stop = stop
        try:
            run(members, engine, observers)
        except Stopped:
            for member in members:
                checkpoint.write(member, member.folder)
            reached = min(member.round for member in members if not member.done)
            raise Interrupted(home, reached, stop.signal, command) from None
    for member in members:
        write_whole(member.folder / MODEL_FILE, pack_model(member), RunError)
        write_report([member.folder], member.folder / REPORT_FILE)
    return [records.read_run(member.folder) for member in members]


def is_finished(folder: Path) -> bool:
    """Whether a run's folder holds all that the run leaves."""
    return all((folder / name).exists() for name in (records.CONFIG, MODEL_FILE, REPORT_FILE))


def read_config(folder: Path) -> Experiment | None:
    """The configuration of a run folder, or None where there is no run yet."""
    path = folder / records.CONFIG
    return config.load(file=path) if path.exists() else None


def config_to_resume(folder: Path | None) -> Path:
    """The configuration file of the run to go on with, where nothing but its folder was given."""
    if folder is None:
        raise RunError("--resume was given without --out: name the folder of the run to go on with")
    if not (folder / records.CONFIG).exists():
        raise RunError(f"{folder}: no run is there to resume; give its --preset or --config to start one")
    return folder / records.CONFIG


def summarise_partition(partition: Partition, dataset: Dataset) -> dict[str, Any]:
    """A partition as counts: what reports draw."""
    classes = len(dataset.classes)
    labelled, unlabelled = partition.counts(dataset.labels, classes)
    return {
        "classes": list(dataset.classes),
        "labelled": labelled.tolist(),
        "unlabelled": unlabelled.tolist(),
        "unknown": [int((dataset.labels[indices] == UNKNOWN).sum()) for indices in partition.unlabelled],
        "sites": list(dataset.sites) if partition.parameters["setting"] == "sites" else [],
        "internal_imbalance": partitions.internal_imbalance(partition, dataset.labels, classes),
        "external_imbalance": partitions.external_imbalance(partition, dataset.labels, classes),
        "sha256": partition.sha256,
        "parameters": partition.parameters,
        "repairs": [repair._asdict() for repair in partition.repairs],
    }


class Member(Federation):
    """A run's federation with its folder, and the time of its own work while it shares an engine with others."""

    def __init__(self, experiment: Experiment, dataset: Dataset, partition: Partition, engine: Engine, folder: Path):
        super().__init__(experiment, dataset, partition, engine)
        self.folder = folder
        self.issued: list[Task] = []
        self.seconds = 0.0  # of its round under way
        self.shared_by = 1  # members whose training the seconds include, as lanes work for all of them at once

    @property
    def done(self) -> bool:
        return self.round >= self.experiment.rounds

    def tasks(self) -> list[Task]:
        self.seconds = 0.0
        with self.clocked():
            self.issued = super().tasks()
        return self.issued

    def absorb(self, tasks: Sequence[Task], results: Sequence[Result]) -> dict:
        with self.clocked():
            return super().absorb(tasks, results)

    def test(self) -> dict:
        with self.clocked():
            return super().test()

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Count the time of what is done here as this member's."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class _SharedEngine(Engine):
    """An engine that tells members how long their tasks took.

    A single lane does one thing at a time, so there each member's own time is measured. Several lanes work for all
    members at once: there the time is that of all their tasks.
    """

    def __init__(self, options: config.Engine):
        super().__init__(options)
        self.members: list[Member] = []

    def run(self, tasks: list[Task]) -> list[Result]:
        active = [member for member in self.members if not member.done]
        apart = [[member] for member in active] if self.lanes.limit == 1 else [active]
        results: list[Result] = []
        for group in apart:
            began = time.perf_counter()
            results += super().run([task for member in group for task in member.issued])
            for member in group:
                member.seconds += time.perf_counter() - began
                member.shared_by = len(group)
        return results


class _Recorder(Observer):
    """metrics.jsonl and timing.jsonl."""

    def __init__(self, member: Member):
        self._member = member
        self._metrics = records.Writer(member.folder / records.METRICS)
        self._timing = records.Writer(member.folder / records.TIMING)
        for writer in (self._metrics, self._timing):
            writer.keep(member.round)

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        self._metrics.write(record)
        self._timing.write(
            {
                "round": record["round"],
                "seconds": seconds,
                "clients": len(record["clients"]),
                "steps": sum(record["steps"]),
                "shared_by": self._member.shared_by,
            }
        )

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()


class _OnDisk(Observer):
    """What writes a member's files; a full disk ends the run with a message, and the last checkpoint stays."""

    def __init__(self, member: Member, go_on: str):
        self._member = member
        self._go_on = go_on
        self._observers: list[Observer] = [
            _Recorder(member),
            TensorBoard(member.folder, member, member.dataset.classes),  # type: ignore[list-item]
            checkpoint.Checkpoints(member, member.folder),
        ]

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        if federation is not self._member:
            return
        with self._explained():
            for observer in self._observers:
                observer.round_done(federation, record, self._member.seconds)

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
                f"{self._member.folder}: cannot be written ({problem.strerror}); the last checkpoint is whole, "
                f"go on from it with: {self._go_on}"
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


def check_folder(experiment: Experiment, folder: Path, resume: bool) -> None:
    """Refuse a folder that this run must not write to."""
    present = read_config(folder)
    if present is None:
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: a file is there; choose another --out")
        if folder.exists() and any(_visible(folder)):
            raise RunError(f"{folder}: the folder is not empty and holds no run; choose another --out")
    elif not resume:
        raise RunError(f"{folder}: a run is there already; choose another --out, or add --resume to go on with it")
    elif present.fingerprint() != experiment.fingerprint():
        different = ", ".join(_differences(present.model_dump(), experiment.model_dump()))
        raise RunError(f"{folder}: its run has another configuration ({different}); resume without those options")
    elif _is_of_other_code(experiment, folder):
        warnings.warn(
            f"{folder}: your own code ({experiment.own_code()}) has changed since this run was started; what is there "
            "comes from the code of then. Choose another --out to train all of it with the code of now",
            FeddureWarning,
            stacklevel=3,
        )


def _open_folder(member: Member) -> None:
    """Write what a run starts with; what an earlier start wrote stays."""
    folder = member.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: the run's folder cannot be made ({problem.strerror})") from None
    if not (folder / records.CONFIG).exists():
        write_whole(folder / records.CONFIG, member.experiment.to_yaml().encode(), RunError)
    if not (folder / PARTITION_FILE).exists():
        member.partition.save(folder / PARTITION_FILE)
    if not (folder / records.PARTITION).exists():
        _write_json(folder / records.PARTITION, summarise_partition(member.partition, member.dataset))
    device = str(member.engine.device)
    own = member.experiment.own_code()
    about = environment.describe() | {"device": device} | ({"own_code": own} if own else {})
    _write_json(folder / records.ENVIRONMENT, about)


def _is_of_other_code(experiment: Experiment, folder: Path) -> bool:
    path, now = folder / records.ENVIRONMENT, experiment.own_code()
    if not now or not path.exists():
        return False
    with suppress(ValueError, OSError):
        return json.loads(path.read_text(encoding="utf-8")).get("own_code", now) != now
    return False


def _visible(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a} there, {b} given")
    return found


def _partition(experiment: Experiment, dataset: Dataset, folder: Path) -> Partition:
    path = folder / PARTITION_FILE
    if path.exists():
        return Partition.load(path, dataset)
    return partitions.make(dataset, experiment.partition, experiment.partition_seed)


def _resume_command(folder: Path, command: str) -> str:
    return f"feddure {command} --out {shlex.quote(str(folder))} --resume"


def pack_model(federation: Server) -> bytes:
    """The global model as a file: tensors by name, and in the header what they belong to."""
    header = {
        "experiment": federation.experiment.model_dump(),
        "classes": federation.dataset.classes,
        "mean": federation.dataset.mean,
        "std": federation.dataset.std,
        "shape": federation.dataset.shape,
        "norm": federation.method.norm,
    }
    tensors = {name: tensor.cpu() for name, tensor in federation.model_state().items()}
    return save(tensors, checkpoint.pack_header(header))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode(), RunError)
