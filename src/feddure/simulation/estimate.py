"""How long a run will take here, by a few of its steps."""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import TypeVar

from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation
from feddure.simulation.lanes import Task

_STEPS = 3
_Value = TypeVar("_Value")


def seconds(experiment: Experiment, dataset: Dataset, partition: Partition) -> float | None:
    """About how long the rounds will take on this CPU; nothing that the run computes depends on this.

    None on a GPU, where compiling would take longer than the answer is worth. A run that cannot be made is an error
    here already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run says it
        engine = Engine(experiment.engine)
        if engine.device.type != "cpu" or engine.compiles:
            return None
        return _measure(Federation(experiment, dataset, partition, engine), engine)


def in_words(seconds: float) -> str:
    """As exact as it is known: "about 40 s", "about 7 minutes", "about 2.5 hours"."""
    if seconds < 90:
        return f"about {max(10, 10 * round(seconds / 10))} s"
    return f"about {round(seconds / 60)} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def _measure(federation: Federation, engine: Engine) -> float | None:
    experiment = federation.experiment
    tasks, preparing = _timed(federation.tasks)
    if not tasks:
        return None
    queues = engine.lanes.deal(tasks)
    first = [tasks[queue[0]] for queue in queues]  # one a lane
    _steps(engine, first, 1)  # the first also pays for warming up
    few, many = (mean(_steps(engine, first, number) for _ in range(2)) for number in (1, 1 + _STEPS))
    step = (many - few) / _STEPS if many > few else many / (1 + _STEPS)
    once = max(0.0, few - step)  # what a client does before its steps
    training = max(sum(once + tasks[index].steps * step for index in queue) for queue in queues)
    _, testing = _timed(federation.server.test)
    evaluations = experiment.rounds // experiment.evaluate_every
    return experiment.rounds * (preparing + training) + evaluations * testing


def _steps(engine: Engine, tasks: list[Task], steps: int) -> float:
    return _timed(lambda: engine.run([replace(task, steps=min(steps, task.steps)) for task in tasks]))[1]


def _timed(work: Callable[[], _Value]) -> tuple[_Value, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began
