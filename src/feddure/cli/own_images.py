"""What commands say about people's own images: what was found, what is trained on it, and how long that takes."""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddure.data import sources
from feddure.errors import FeddureError

if TYPE_CHECKING:
    from feddure.config import Experiment
    from feddure.data.dataset import Dataset
    from feddure.data.partition import Partition

Say = Callable[[str], None]
_FASTER_SIDE_BY_SIDE = 1.5  # runs in processes of one thread each against one after the other; docs/performance.md


def reader(data_dir: Path | None, say: Say, skip_damaged: bool = False) -> "Callable[[str], Dataset]":
    """What reads a data set and says what was understood of own images."""

    def read(name: str) -> "Dataset":
        dataset, found = sources.read(sources.resolve(name, skip_damaged), data_dir, progress=True)
        if found is not None:
            say(f"found {found.layout}")
            for sentence in found.sentences():
                say(f"  {sentence}")
            stated = "size=" in name.partition("?")[2]
            if found.shorter_side is not None and not stated and found.shorter_side >= 2 * dataset.shape[0]:
                side = dataset.shape[0]
                say(f"  read at {side} × {side} pixels, the files are larger: `feddure data check` suggests a size")
            if dataset.damaged:
                say(f"  damaged files that are left out: {len(dataset.damaged):,}")
                for line in dataset.damaged:
                    say(f"    {line}")
        return dataset

    return read


def recorded(experiment: "Experiment", skip_damaged: bool) -> "Experiment":
    """The experiment whose data set's name says that damaged files are left out, so that its file replays it."""
    return experiment.model_copy(update={"dataset": sources.resolve(experiment.dataset, skip_damaged)})


def say_plan(
    experiments: "Sequence[Experiment]", dataset: "Dataset", say: Say, seeds: int = 1, processes: int = 1
) -> None:
    """A line before own images are trained on: what, on what, and how long; of several experiments, all together."""
    from feddure import recommended
    from feddure.simulation import estimate

    first = experiments[0]
    if not first.dataset.startswith(recommended.OWN_IMAGES):
        return
    try:
        made = _partition(first, dataset)
        times = [estimate.seconds(experiment, dataset, made) for experiment in experiments]
    except Exception:  # the run says it; of a comparison the other methods go on
        return
    names = ", ".join(dict.fromkeys(experiment.method for experiment in experiments))
    each = f", {seeds} seeds each," if seeds > 1 else ""
    runs = seeds / (_FASTER_SIDE_BY_SIDE if min(processes, seeds * len(experiments)) > 1 else 1)
    say(f"trains {names}{each} {_size(first, dataset, made)}: {_duration(times, runs)}")


def as_trained(name: str) -> str:
    """The name under which `run` reads own images: with a size and channels that suit the files and the machine."""
    import torch

    from feddure import recommended

    return recommended.fitted_to_files(name, torch.cuda.is_available())


def suggestion(name: str, dataset: "Dataset", depth: int | None) -> dict[str, Any]:
    """What to train on own images, read as `as_trained` names them, and the two commands for it.

    `depth` is what files look like that are nearly black as they were read.
    """
    from feddure import recommended
    from feddure.simulation import estimate

    if depth is not None:
        name = sources.with_options(name, depth=depth)
    if dataset.damaged:  # or else the command would be refused
        name = sources.with_options(name, skip_damaged=1)
    try:
        experiment, _ = recommended.load(None, None, {"dataset": name}, (), lambda _: dataset, lambda _: None)
        made = _partition(experiment, dataset)
        seconds = estimate.seconds(experiment, dataset, made)
    except FeddureError as problem:
        return {"problem": str(problem)}
    word = Path(name.partition(":")[2].partition("?")[0]).resolve().stem
    folder = f"runs/{re.sub(r'[^A-Za-z0-9._-]+', '-', word).strip('-.') or 'mine'}"
    return {
        "preset": recommended.NAME,
        "method": experiment.method,
        "model": experiment.model,
        "dataset": name,
        "size": dataset.shape[0],
        "channels": dataset.shape[2],
        "rounds": experiment.rounds,
        "seconds": seconds,
        "text": f"{experiment.method} {_size(experiment, dataset, made)}: {_duration([seconds])}",
        "commands": [
            f"feddure run --dataset {shlex.quote(name)} --out {folder}",
            f"feddure export {folder} --out {Path(folder).name}.onnx",
        ],
    }


def _partition(experiment: "Experiment", dataset: "Dataset") -> "Partition":
    from feddure.data.partition import make

    return make(dataset, experiment.partition, experiment.partition_seed, experiment.validation)


def _size(experiment: "Experiment", dataset: "Dataset", partition: "Partition") -> str:
    height, width, channels = dataset.shape
    labelled, unlabelled = (sum(map(len, part)) for part in (partition.labelled, partition.unlabelled))
    if experiment.partition.labelled_as_unlabelled:
        unlabelled -= labelled
    return (
        f"({experiment.model}) on {labelled:,} labelled and {unlabelled:,} unlabelled images of "
        f"{len(dataset.classes)} classes, {width}×{height} {'colour' if channels == 3 else 'grey'}, at "
        f"{partition.clients} {'sites' if experiment.partition.setting == 'sites' else 'clients'}, for "
        f"{experiment.rounds} rounds, and tests on {len(dataset.test_labels):,}"
    )


def _duration(times: Sequence[float | None], runs: float = 1) -> str:
    from feddure.simulation import estimate

    known = [seconds for seconds in times if seconds is not None]
    if len(known) < len(times):
        return "the time that is left is shown after the first rounds"
    return f"{estimate.in_words(runs * sum(known))} on this CPU"
