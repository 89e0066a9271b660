"""How long cells take: from those already measured on this hardware, else from a model of one H200."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from feddure import environment, methods
from feddure.config import Experiment
from feddure.studies.cells import Cell, Measurement, data_size, labels

REFERENCE = "NVIDIA H200"

# Milliseconds on the reference: of a round (drawing, aggregating, evaluating), of a client's local step, of each of its
# images; fitted to fedavg-matched, fedavg-sl and fedavg-fixmatch in aaai24.
_ROUND, _STEP, _IMAGE = 23.0, 0.18, 0.009
# How often a method's step passes each image through the network, relative to one forward and backward pass.
_PASSES = {"feddure": 2.6, "c-reg": 2.6, "avg-c-reg": 3.5, "f-reg": 2.2, "avg-f-reg": 2.6, "baseline+maml": 2.6}
_PASSES |= {"fedmatch": 1.6}


@dataclass(frozen=True)
class Estimate:
    """Seconds for some cells, and whether any cell measured here stands behind them."""

    seconds: float
    measured_here: bool


def estimate(cells: Sequence[Cell], measured: Iterable[Measurement]) -> Estimate:
    """What these cells will take, by the speed of cells measured before on this hardware."""
    here = _hardware(environment.describe())
    rates: dict[str, list[float]] = {}
    for found in measured:
        if _hardware(found.environment) == here:
            experiment = Experiment.model_validate(found.experiment)
            rates.setdefault(experiment.method, []).append(found.seconds / reference_seconds(experiment))
    every = [rate for values in rates.values() for rate in values]
    typical = statistics.median(every) if every else 1.0
    seconds = 0.0
    for cell in cells:
        own = rates.get(cell.experiment.method)
        seconds += reference_seconds(cell.experiment) * (statistics.median(own) if own else typical)
    return Estimate(seconds, bool(every))


def reference_seconds(experiment: Experiment) -> float:
    """The model's time for an experiment on the reference."""
    images, _ = data_size(experiment.dataset)
    images = images or 50_000
    clients = max(experiment.partition.clients, 1)
    share = labels(experiment)
    labelled = round(images / clients * (share / 100 if isinstance(share, float) else 0.1))
    unlabelled = round(images / clients) - labelled
    wanted = experiment.unlabelled_batch
    batch = max(1, round(unlabelled / 5)) if wanted == "auto" else wanted
    method = _method(experiment.model_dump_json())
    steps = method.steps(labelled, unlabelled, batch)
    views = sum((method.needs.plain, method.needs.weak, method.needs.strong))
    in_a_step = (experiment.labelled_batch + views * batch) * _PASSES.get(experiment.method, 1.0)
    side = 28 if experiment.dataset.startswith("fashion") else 32
    step = _STEP + _IMAGE * in_a_step * (side / 32) ** 2
    return experiment.rounds * (_ROUND + experiment.clients_per_round * steps * step) / 1000


@cache
def _method(experiment: str) -> methods.Method:
    return methods.make(Experiment.model_validate_json(experiment))


def _hardware(about: dict) -> tuple[object, ...]:
    return (about.get("gpu"),) if about.get("gpu") else (about.get("cpu"), about.get("cores"))
