"""What watches rounds: records on disk, checkpoints, a progress bar, trackers, and what a user adds."""

from pathlib import Path
from typing import Any


class Observer:
    """Is told of every round of a run; override what you need.

    `federation` is the simulator's (`feddure.simulation.federation.Federation`): `federation.experiment`,
    `federation.round` and `federation.server`, whose `state` holds the global model. `record` is the round's line of
    metrics.jsonl; the wall clock is in `seconds`, never in the record. Look, do not change: the run's results must not
    depend on who watches.
    """

    def round_done(self, federation: Any, record: dict[str, Any], seconds: float) -> None:
        """A round has been aggregated, and evaluated where due."""

    def run_done(self, summary: Any, folder: Path) -> None:
        """All rounds are done: `summary` has the run's numbers, `folder` its files, with model and report."""

    def close(self) -> None:
        """No further round comes: the run is over, was stopped, or has failed."""
