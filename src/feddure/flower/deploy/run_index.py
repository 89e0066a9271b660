"""The server's note of its runs: Flower knows runs by number, people by folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from feddure.errors import RunError
from feddure.files import write_whole
from feddure.flower.deploy.layout import ServerFolder
from feddure.tracking import records


@dataclass(frozen=True)
class Entry:
    """One start of a run."""

    run: str
    folder: str
    options: dict[str, Any]
    rounds: int = 0  # that were done before it


def read(folder: ServerFolder) -> list[Entry]:
    """All starts, the oldest first."""
    try:
        return [Entry(**entry) for entry in json.loads(folder.ledger.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError):
        raise RunError(
            f"{folder.ledger}: cannot be read; move it away, the runs themselves are in their folders"
        ) from None


def note(folder: ServerFolder, entry: Entry) -> None:
    """Add a start."""
    content = json.dumps([asdict(each) for each in [*read(folder), entry]], indent=1) + "\n"
    write_whole(folder.ledger, content.encode(), RunError, durable=True)


def last(folder: ServerFolder, run_folder: Path) -> Entry | None:
    """The last start of the run in a folder."""
    return next((entry for entry in reversed(read(folder)) if Path(entry.folder) == run_folder), None)


def last_options(folder: ServerFolder, run_folder: Path) -> dict[str, Any]:
    """What the run in a folder was asked for at the last start that did a round, or at the last where none did."""
    starts = [entry for entry in read(folder) if Path(entry.folder) == run_folder]
    if not starts:
        raise RunError(f"{run_folder}: not a run of this federation; give the options it was started with")
    # Who starts from nothing may do so in the folder of an earlier run that was removed.
    starts = starts[max((i for i, entry in enumerate(starts) if not entry.rounds), default=0) :]
    after = [*(entry.rounds for entry in starts[1:]), rounds_done(run_folder)]
    useful = [entry for entry, reached in zip(starts, after, strict=True) if reached > entry.rounds]
    return (useful or starts)[-1].options


def rounds_done(run_folder: Path) -> int:
    """The last round in a run's folder."""
    metrics = run_folder / records.METRICS
    done = records.read(metrics) if metrics.exists() else []
    return done[-1]["round"] if done else 0
