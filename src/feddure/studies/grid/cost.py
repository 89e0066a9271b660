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
    for found in measured:
        experiment = experiments.build(found.experiment)
        if _hardware(found.environment) == _hardware(about) and (experiment.method in own | methods.METHODS.keys()):
            of_a_kind = rates.setdefault((experiment.model, experiment.dataset), {})
            of_a_kind.setdefault(experiment.method, []).append(found.seconds / reference_seconds(experiment))
    known: list[float] = []
    tried: list[float] = []
    unknown: list[float] = []
    speeds: dict[tuple[str, str, str], float | None] = {}
    for wanted in (cell.experiment for cell in cells):
        alike = rates.get((wanted.model, wanted.dataset))
        if alike:
            every = [rate for values in alike.values() for rate in values]
            known.append(reference_seconds(wanted) * statistics.median(alike.get(wanted.method, every)))
            continue
        reference, kind = reference_seconds(wanted), (wanted.model, wanted.dataset, wanted.method)
        if kind not in speeds:
            small = trial is not None and not about["gpu"] and reference < _LARGEST_TRIAL
            took = trial(wanted) if trial is not None and small else None
            speeds[kind] = None if took is None else took / reference
        speed = speeds[kind]
        (unknown if speed is None else tried).append(reference * (speed or 1.0))
    parts = []
    if tried:
        parts.append(
            f"about {duration(sum(tried))}{f' for {len(tried)}' if known or unknown else ''} by a few steps here"
        )
    if known or not (unknown or tried):
        which = f" for {len(known)}" if unknown or tried else ""
        parts.append(f"about {duration(sum(known))}{which} at the speed of the cells measured on this hardware")
    if unknown:
        which = f"the other {len(unknown)} " if known or tried else ""
        parts.append(f"{which}about {duration(sum(unknown))} on one {REFERENCE_GPU}")
        if not about["gpu"]:
            parts.append(
                "there is no GPU here, and a CPU takes much longer "
                "(a FedDure round of the preset aaai24: 6 to 9 minutes on 2 cores)"
            )
        elif about["gpu"] != REFERENCE_GPU:
            parts.append("nothing like it was measured on this hardware")
    return Estimate(sum(known) + sum(tried) + sum(unknown), "; ".join(parts))


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
