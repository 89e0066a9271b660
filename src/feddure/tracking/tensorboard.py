"""An observer that writes a run's scalars for TensorBoard, beside the run's own records."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from feddure.tracking.observer import Observer
from feddure.tracking.records import Record


class TensorBoard(Observer):
    """Writes rounds to event files in a run folder.

    On resume, TensorBoard is told to forget what an earlier process wrote for the rounds that are run again.
    """

    def __init__(self, folder: Path, classes: Sequence[str] = ()):
        """`classes` name the accuracies of each class."""
        self.folder = folder
        self._classes = classes
        self._writer: Any = None

    def round_done(self, federation: Any, record: Record, seconds: float) -> None:
        """Write a round; on disk at the latest after each evaluation."""
        if self._writer is None:
            self._writer = _open(self.folder, record["round"])
        for name, value in scalars(record, self._classes):
            self._writer.add_scalar(name, value, record["round"])
        self._writer.add_scalar("seconds", seconds, record["round"])
        if "test" in record or "validation" in record:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def scalars(record: Record, classes: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """(tag, value) of every number in a record that makes a curve; null and unknown things are left out."""
    evaluations = ("test", "test_ema", "validation", "validation_ema")
    for group in ("train", *evaluations, "diagnostics"):
        for name, value in (record.get(group) or {}).items():
            if isinstance(value, int | float) and name not in ("round", "images"):
                yield f"{group}/{name}", value
    for model in evaluations:
        for number, value in enumerate((record.get(model) or {}).get("per_class") or ()):
            name = classes[number] if number < len(classes) else str(number)
            yield f"{model}_per_class/{name}", value


def _open(folder: Path, first_round: int) -> Any:
    # Where TensorFlow is installed too, TensorBoard loads it, and it talks a lot.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    from torch.utils.tensorboard import SummaryWriter  # seconds to import: only when it is used

    return SummaryWriter(str(folder), purge_step=first_round if first_round > 1 else None)
