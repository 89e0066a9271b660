"""How long cells take: by those already measured on this hardware, else by a model of one H200."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from feddure import environment, methods
from feddure.config import Experiment
from feddure.studies.grid.store import Cell, Measurement, data_size, labels
from feddure.tracking.summary import duration

REFERENCE = "NVIDIA H200"

# Milliseconds on the reference: of a round (drawing, aggregating, evaluating), of a client's local step, of each of its
# images; fitted to fedavg-matched, fedavg-sl and fedavg-fixmatch in aaai24.
_ROUND, _STEP, _IMAGE = 23.0, 0.18, 0.009
# How often a method's step passes each image through the network, relative to one forward and backward pass.
_PASSES = {"feddure": 2.6, "c-reg": 2.6, "avg-c-reg": 3.5, "f-reg": 2.2, "avg-f-reg": 2.6, "baseline+maml": 2.6}
_PASSES |= {"fedmatch": 1.6}
# Of an image in ResNet-9 on two CPU cores: one FedDure round of aaai24 took six to nine minutes there.
_IMAGE_ON_CPU = 36.0
_HOUR = 3600.0  # seconds


@dataclass(frozen=True)
class Estimate:
    """What some cells will take: those of a kind that this hardware has measured apart from the others."""

    known: int  # cells whose network and data set were measured on this hardware
    seconds_known: float
    unknown: int
    seconds_unknown: float  # on the reference
    on_reference: bool = False  # whether this hardware is the reference
    longest_on_cpu: float | None = None  # seconds of the longest unknown one: ResNet-9 without a GPU

    @property
    def seconds(self) -> float:
        """Of all cells, as if this hardware were the reference where it has measured nothing alike."""
        return self.seconds_known + self.seconds_unknown

    @property
    def text(self) -> str:
        """How long, and by what this is known."""
        by_cells = "at the speed of the cells measured on this hardware"
        if not self.unknown:
            return f"about {duration(self.seconds_known)} {by_cells}"
        by_model = f"about {duration(self.seconds_unknown)} on one {REFERENCE}"
        by_model += "" if self.on_reference else "; not measured on this hardware"
        if not self.known:
            return by_model
        return f"about {duration(self.seconds_known)} for {self.known} {by_cells}; the other {self.unknown} {by_model}"

    @property
    def warning(self) -> str | None:
        """What to expect of ResNet-9 without a GPU."""
        if self.longest_on_cpu is None or self.longest_on_cpu < _HOUR:
            return None
        long = "days" if self.longest_on_cpu > 20 * _HOUR else "hours"
        return (
            f"no GPU here: on a CPU expect up to {long} for each such cell "
            "(a FedDure round of the preset aaai24 took 6 to 9 minutes on 2 cores)"
        )


def estimate(cells: Sequence[Cell], measured: Iterable[Measurement]) -> Estimate:
    """What these cells will take, by the speed of cells with the same network and data set on this hardware."""
    about = environment.describe()
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    for found in measured:
        if _hardware(found.environment) == _hardware(about):
            experiment = Experiment.model_validate(found.experiment)
            of_a_kind = rates.setdefault((experiment.model, experiment.dataset), {})
            of_a_kind.setdefault(experiment.method, []).append(found.seconds / reference_seconds(experiment))
    known: list[float] = []
    unknown: list[Experiment] = []
    for cell in cells:
        wanted = cell.experiment
        alike = rates.get((wanted.model, wanted.dataset))
        if alike:
            every = [rate for values in alike.values() for rate in values]
            known.append(reference_seconds(wanted) * statistics.median(alike.get(wanted.method, every)))
        else:
            unknown.append(wanted)
    on_cpu = [_cpu_seconds(wanted) for wanted in unknown if wanted.model == "resnet9" and not about["gpu"]]
    return Estimate(
        known=len(known),
        seconds_known=sum(known),
        unknown=len(unknown),
        seconds_unknown=sum(map(reference_seconds, unknown)),
        on_reference=about["gpu"] == REFERENCE,
        longest_on_cpu=max(on_cpu, default=None),
    )


def reference_seconds(experiment: Experiment) -> float:
    """The model's time for an experiment on the reference."""
    steps, images = _work(experiment)
    step = _STEP + _IMAGE * images
    return experiment.rounds * (_ROUND + experiment.clients_per_round * steps * step) / 1000


def _cpu_seconds(experiment: Experiment) -> float:
    steps, images = _work(experiment)
    return experiment.rounds * experiment.clients_per_round * steps * images * _IMAGE_ON_CPU / 1000


def _work(experiment: Experiment) -> tuple[int, float]:
    """A client's local steps, and the images in each, as if of 32 × 32 pixels and passed through the network once."""
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
    return steps, in_a_step * (side / 32) ** 2


@cache
def _method(experiment: str) -> methods.Method:
    return methods.make(Experiment.model_validate_json(experiment))


def _hardware(about: dict) -> tuple[object, ...]:
    return (about.get("gpu"),) if about.get("gpu") else (about.get("cpu"), about.get("cores"))
