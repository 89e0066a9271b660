"""The server's note of its runs: Flower knows runs by number, people by folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from feddure.deployment.layout import ServerFolder
from feddure.errors import RunError
from feddure.files import write_whole


@dataclass(frozen=True)
class Entry:
    """One start of a run."""

    run: str
    folder: str
    options: dict[str, Any]


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
    """What the run in a folder was asked for when it was last started."""
    entry = last(folder, run_folder)
    if entry is None:
        raise RunError(f"{run_folder}: not a run of this federation; give the options it was started with")
    return entry.options
