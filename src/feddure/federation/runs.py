"""A run: one experiment in a folder of its own, from the first round to the report, or from where it stopped."""

import json
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from feddure import config, environment
from feddure import nn as networks
from feddure.config import Experiment
from feddure.data import partition as partitions
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition
from feddure.errors import RunError
from feddure.federation import checkpoint
from feddure.federation.engine import Engine
from feddure.federation.lanes import Stopped
from feddure.federation.rounds import Federation, Observer, run
from feddure.files import write_whole
from feddure.tracking import records
from feddure.tracking.console import console_observer
from feddure.tracking.report import write_report
from feddure.tracking.tensorboard import TensorBoard

PARTITION_FILE, MODEL_FILE, REPORT_FILE = "partition.npz", "model.safetensors", "report.html"


class Interrupted(RunError):
    """A signal ended the run early; it can be resumed."""

    def __init__(self, folder: Path, round_number: int, number: int):
        super().__init__(
            f"stopped after round {round_number}; the state is in {folder}\ngo on with: {_resume_command(folder)}"
        )
        self.exit_code = 128 + number


def execute(
    experiment: Experiment, dataset: Dataset, folder: Path, resume: bool = False, progress: bool = True
) -> records.Run:
    """Run an experiment into `folder`; with `resume`, from the folder's last checkpoint."""
    _check_folder(experiment, folder, resume)
    engine = Engine(experiment.engine)
    federation = Federation(experiment, dataset, _partition(experiment, dataset, folder), engine)
    checkpoint.read(federation, folder)
    _open_folder(federation, folder)  # the first thing written: what cannot be run leaves nothing behind
    written: list[Observer] = [
        _Recorder(federation, folder),
        TensorBoard(folder, federation, dataset.classes),  # type: ignore[list-item]
        checkpoint.Checkpoints(federation, folder),
    ]
    observers: list[Observer] = [_OnDisk(folder, written)]
    if progress:
        observers.append(console_observer([federation]))  # type: ignore[arg-type]
    with _stopping() as stop, ExitStack() as closing:
        for observer in observers:
            closing.callback(observer.close)
        engine.lanes.stop = stop
        try:
            run([federation], engine, observers)
        except Stopped:
            checkpoint.write(federation, folder)
            raise Interrupted(folder, federation.round, stop.signal) from None
    write_whole(folder / MODEL_FILE, _model(federation), RunError)
    write_report([folder], folder / REPORT_FILE)
    return records.read_run(folder)


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


class _Recorder(Observer):
    """metrics.jsonl and timing.jsonl."""

    def __init__(self, federation: Federation, folder: Path):
        self._metrics = records.Writer(folder / records.METRICS)
        self._timing = records.Writer(folder / records.TIMING)
        for writer in (self._metrics, self._timing):
            writer.keep(federation.round)

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        self._metrics.write(record)
        self._timing.write(
            {
                "round": record["round"],
                "seconds": seconds,
                "clients": len(record["clients"]),
                "steps": sum(record["steps"]),
            }
        )

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()


class _OnDisk(Observer):
    """The observers that write files; a full disk ends the run with a message, and the last checkpoint stays."""

    def __init__(self, folder: Path, observers: Sequence[Observer]):
        self._folder = folder
        self._observers = observers

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
                f"go on from it with: {_resume_command(self._folder)}"
            ) from None


class _Stop:
    """Becomes true when the user asks to stop; a second time ends the process at once."""

    signal = 0

    def __call__(self) -> bool:
        return self.signal != 0

    def ask(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def _stopping() -> Iterator[_Stop]:
    stop = _Stop()
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


def _check_folder(experiment: Experiment, folder: Path, resume: bool) -> None:
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


def _open_folder(federation: Federation, folder: Path) -> None:
    """Write what a run starts with; what an earlier start wrote stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: the run's folder cannot be made ({problem.strerror})") from None
    if not (folder / records.CONFIG).exists():
        write_whole(folder / records.CONFIG, federation.experiment.to_yaml().encode(), RunError)
    if not (folder / PARTITION_FILE).exists():
        federation.partition.save(folder / PARTITION_FILE)
    if not (folder / records.PARTITION).exists():
        _write_json(folder / records.PARTITION, summarise_partition(federation.partition, federation.dataset))
    device = str(federation.engine.device)
    _write_json(folder / records.ENVIRONMENT, environment.describe() | {"device": device})


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


def _resume_command(folder: Path) -> str:
    return f"feddure run --out {shlex.quote(str(folder))} --resume"


def _model(federation: Federation) -> bytes:
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


def load_model(folder: Path) -> nn.Module:
    """The trained global model of a finished run, in evaluation mode."""
    path = folder / MODEL_FILE
    try:
        with safe_open(path, framework="pt") as file:
            header = checkpoint.read_header(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise RunError(f"{path}: no model can be read ({problem}); has the run finished?") from None
    if not header:
        raise RunError(f"{path}: not a model that feddure wrote")
    experiment = Experiment.model_validate(header["experiment"])
    shape, classes = header["shape"], header["classes"]
    module = networks.make(experiment.model, shape[2], len(classes), header["norm"], experiment.seed)
    module.load_state_dict(tensors, strict=False)  # counters of batch norm are not part of a federation
    return module.eval()
