"""How long cells take: by those already measured on this hardware, by a few steps, else by a model of one H200."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from feddure import environment, experiments, methods
from feddure.config import Experiment
from feddure.data.sources import find_source
from feddure.reports.frame import labels
from feddure.studies.grid.store import Cell, Measurement
from feddure.tracking.summary import duration

REFERENCE_GPU = "NVIDIA H200"

# Milliseconds on the reference: of a round (drawing, aggregating, evaluating), of a client's local step, of each of its
# images; fitted to fedavg-matched, fedavg-sl and fedavg-fixmatch in aaai24.
_ROUND, _STEP, _IMAGE = 23.0, 0.18, 0.009
_LARGEST_TRIAL = 5.0  # seconds of the reference
_TRIED, _MEASURED = "by a few steps here", "at the speed of the cells measured on this hardware"
_REFERENCE = f"on one {REFERENCE_GPU}"
_NETWORKS = {"resnet8": 0.6}  # an image's time relative to resnet9's; fitted to sage in cvpr25


class Estimate(NamedTuple):
    """What some cells will take, and in words by what this is known."""

    seconds: float  # as if this hardware were the reference where it has measured nothing alike
    text: str


def estimate(
    cells: Sequence[Cell], measured: Iterable[Measurement], trial: Callable[[Experiment], float | None] | None = None
) -> Estimate:
    """What these cells will take, by the speed of cells with the same network and data set on this hardware.

    Where there are none and no GPU, `trial` says what an experiment would take, by a few of its steps; those that a GPU
    needs seconds for are too large to try.
    """
    about = environment.describe()
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    own = {cell.experiment.method for cell in cells}  # code that others' cells name is not imported for this
    for one in measured:
        experiment = experiments.build(one.experiment)
        if _hardware(one.environment) == _hardware(about) and (experiment.method in own | methods.METHODS.keys()):
            of_a_kind = rates.setdefault((experiment.model, experiment.dataset), {})
            of_a_kind.setdefault(experiment.method, []).append(one.seconds / reference_seconds(experiment))
    seconds: dict[str, list[float]] = {_TRIED: [], _MEASURED: [], _REFERENCE: []}
    speeds: dict[tuple[str, str, str], float | None] = {}
    for wanted in (cell.experiment for cell in cells):
        reference, kind = reference_seconds(wanted), (wanted.model, wanted.dataset, wanted.method)
        if alike := rates.get(kind[:2]):
            every = [rate for values in alike.values() for rate in values]
            seconds[_MEASURED].append(reference * statistics.median(alike.get(wanted.method, every)))
            continue
        if kind not in speeds:
            small = trial is not None and not about["gpu"] and reference < _LARGEST_TRIAL
            took = trial(wanted) if trial is not None and small else None
            speeds[kind] = None if took is None else took / reference
        speed = speeds[kind]
        seconds[_REFERENCE if speed is None else _TRIED].append(reference * (speed or 1.0))
    parts = []
    for how, found in seconds.items():
        which = f" for {len(found)}" if len(found) < len(cells) else ""
        parts += [f"about {duration(sum(found))}{which} {how}"] if found else []
    if seconds[_REFERENCE] and not about["gpu"]:
        parts.append(
            "there is no GPU here, and a CPU takes much longer "
            "(a FedDure round of the preset aaai24: 6 to 9 minutes on 2 cores)"
        )
    elif seconds[_REFERENCE] and about["gpu"] != REFERENCE_GPU:
        parts.append("nothing like it was measured on this hardware")
    return Estimate(sum(map(sum, seconds.values())), "; ".join(parts))


def reference_seconds(experiment: Experiment) -> float:
    """The model's time for an experiment on the reference."""
    images = (None if ":" in experiment.dataset else find_source(experiment.dataset).train) or 50_000
    clients = max(experiment.partition.clients, 1)
    share = labels(experiment)
    labelled = round(images / clients * (share / 100 if isinstance(share, float) else 0.1))
    unlabelled = round((images / clients - labelled) * experiment.partition.unlabelled_fraction)
    wanted = experiment.unlabelled_batch
    batch = max(1, round(unlabelled / 5)) if wanted == "auto" else wanted
    method = methods.make(experiment)
    views = sum((method.needs.plain, method.needs.weak, method.needs.strong))
    side = 28 if experiment.dataset.startswith("fashion") else 32
    cost = method.passes * (side / 32) ** 2 * _NETWORKS.get(experiment.model, 1.0)
    in_a_step = (experiment.labelled_batch + views * batch) * cost
    steps = method.steps(labelled, unlabelled, batch)
    return experiment.rounds * (_ROUND + experiment.clients_per_round * steps * (_STEP + _IMAGE * in_a_step)) / 1000


def _hardware(about: dict[str, Any]) -> tuple[object, ...]:
    return (about.get("gpu"),) if about.get("gpu") else (about.get("cpu"), about.get("cores"))
