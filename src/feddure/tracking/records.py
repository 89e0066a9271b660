"""What a run leaves on disk, and how it is read back: JSON lines, one a round, and the files beside them.

Floats are written in full, so identical runs leave identical files. A run may be killed at any moment: a line
that was being written then is dropped, a damaged line anywhere else is an error.
"""

import json
import math
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from feddure.config import Experiment
from feddure.errors import ConfigError, RunError
from feddure.files import read_regular, write_whole
from feddure.pretrained import MODEL_FILE
from feddure.tracking import schema
from feddure.tracking.observer import Observer

Record = dict[str, Any]

CONFIG, METRICS, TIMING = "config.yaml", "metrics.jsonl", "timing.jsonl"
ENVIRONMENT, PARTITION = "environment.json", "partition.json"
FEDERATION = "federation.json"
"""Of a real federation: the run's own name, under which sites keep what they remember, and what sites said."""
REPORT, LOCK = "report.html", ".lock"
FAILURE = "failure.json"
"""Why an error ended the run, for who watches it; gone once the run goes on."""


class Recorder(Observer):
    """Writes metrics.jsonl and timing.jsonl of a run: a line a round each, on disk before the next round begins.

    The wall clock goes into timing.jsonl alone.
    """

    def __init__(self, folder: Path, at_round: int = 0):
        """Go on after a round: what was written of later ones is forgotten."""
        self._metrics, self._timing = (Writer(folder / name, at_round) for name in (METRICS, TIMING))

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        self.write(record, seconds)

    def write(self, record: Record, seconds: float, **timing: Any) -> None:
        """A round's record, how long it took, and what else timing.jsonl should say of it."""
        self._metrics.write(record)
        counts = {"clients": len(record["clients"]), "steps": sum(record["steps"])}
        self._timing.write({"round": record["round"], "seconds": seconds, **counts, **timing})

    def close(self) -> None:
        with closing(self._metrics), closing(self._timing):
            pass


class Writer:
    """Appends records to a file, one line each; records after `last_round` and a torn line are dropped first."""

    def __init__(self, path: Path, last_round: float = math.inf):
        if path.exists() or path.is_symlink():  # it is replaced, so that no link is followed
            truncate(path, last_round)
        try:
            self._file = path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror})") from None

    def write(self, record: Record) -> None:
        """Append one record; numbers that are not finite become null, as JSON has no word for them."""
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> list[Record]:
    """All records of a file; a torn last line is left out."""
    return [record for record, _ in _parse(path)]


def truncate(path: Path, last_round: float) -> None:
    """Drop the records after a round and a torn last line; the file is replaced whole or not at all."""
    kept = b"".join(line + b"\n" for record, line in _parse(path) if record["round"] <= last_round)
    write_whole(path, kept, RunError)


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder in memory; what the run has not written yet is empty."""

    folder: Path
    experiment: Experiment
    metrics: list[Record]
    timing: list[Record]
    environment: Record
    partition: Record
    federation: Record = field(default_factory=dict)  # of a run over real sites

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def rounds(self) -> int:
        """The last round that was recorded."""
        return self.metrics[-1]["round"] if self.metrics else 0

    @property
    def finished(self) -> bool:
        return self.rounds >= self.experiment.rounds


def is_finished(folder: Path) -> bool:
    """Whether a run's folder holds all that the run leaves."""
    return all((folder / name).exists() for name in (CONFIG, MODEL_FILE, REPORT))


def read_run(folder: Path) -> Run:
    """A run folder, checked for what makes it one: a configuration and metrics."""
    from feddure import experiments  # methods, and with them PyTorch; who only watches does not wait for it

    _check_folder(folder)
    try:
        experiment = experiments.load(file=folder / CONFIG)
    except ConfigError as error:
        message = str(error) if str(folder) in str(error) else f"{folder / CONFIG}: {error}"
        raise RunError(message) from None
    metrics = _checked(folder / METRICS, schema.Round)
    rounds = [record["round"] for record in metrics]
    if rounds != sorted(set(rounds)):
        raise RunError(f"{folder / METRICS}: its rounds are not in order; restore the file from a copy")
    for groups in (("test", "test_ema"), ("diagnostics",)):
        found = [record.get(group) or {} for record in metrics for group in groups]
        if len({len(one[name]) for one in found for name in schema.OF_CLASSES if one.get(name)}) > 1:
            raise RunError(f"{folder / METRICS}: its rounds differ in their classes; restore the file from a copy")
    return Run(
        folder,
        experiment,
        metrics=metrics,
        timing=_checked(folder / TIMING, schema.Timing) if (folder / TIMING).exists() else [],
        environment=_read_json(folder / ENVIRONMENT, dict),
        partition=_read_json(folder / PARTITION, schema.Partition),
        federation=_read_json(folder / FEDERATION, schema.Federation),
    )


def _checked(path: Path, model: type[BaseModel]) -> list[Record]:
    """The records of a file, as far as they are what reports can read."""
    found = read(path)
    for number, record in enumerate(found, 1):
        if problem := schema.problem(record, model):
            raise RunError(f"{path}: line {number} is not what a run writes ({problem}); restore the file from a copy")
    return found


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise RunError(f"{folder}: there is no such folder; expected a run's, as `feddure run` makes it")
    if not folder.is_dir():
        raise RunError(f"{folder}: a file was given; expected a run's folder, here perhaps {folder.parent}")
    missing = [name for name in (CONFIG, METRICS) if not (folder / name).is_file()]
    if missing:
        message = f"{folder}: not a run folder, {' and '.join(missing)} missing"
        inside = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))
        if inside:
            message += f"; runs are inside it: give them by name, for example {folder / inside[0]}"
        raise RunError(message)


def _parse(path: Path) -> list[tuple[Record, bytes]]:
    """Each record with its line; the last line may be torn, any other must be whole."""
    try:
        lines = read_regular(path).rstrip(b"\n").split(b"\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    parsed = []
    for number, line in enumerate(lines, start=1):
        record = _parse_line(line)
        if record is not None:
            parsed.append((record, line))
        elif number < len(lines):
            raise RunError(
                f"{path}: line {number} of {len(lines)} is damaged: expected a JSON object with a round "
                f"number, found {line[:40].decode(errors='replace')!r}; restore the file from a copy"
            )
    return parsed


def _parse_line(line: bytes) -> Record | None:
    try:
        record = schema.parse(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("round"), int) else None


def _read_json(path: Path, model: type) -> Record:
    """A JSON object, or an empty one where the file does not exist."""
    try:
        tree = schema.parse(read_regular(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise RunError(f"{path}: damaged, expected a JSON object; delete it to report without it")
    if problem := schema.problem(tree, model):
        raise RunError(f"{path}: not what a run writes ({problem}); delete it to report without it")
    return tree


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
