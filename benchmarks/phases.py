"""Time the phases of a round apart: making batches, local training, aggregation, evaluation.

python benchmarks/phases.py --data-dir DATA --methods fedavg-matched feddure --json results/phases.json
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import finish, load, seconds, spread

from feddure import data
from feddure.data import partition
from feddure.data.dataset import Dataset
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation


def main() -> None:
    options = parse()
    dataset = data.load(options.dataset, options.data_dir)
    found = {method: measure(method, dataset, options) for method in options.methods}
    report = {"benchmark": "phases", "dataset": options.dataset, "preset": "aaai24", "rounds": options.rounds}
    finish(report | {"methods": found}, options.json)


def measure(method: str, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each phase, with nothing else going on."""
    experiment = load(method, dataset=options.dataset, rounds=options.rounds, server__ema=0.9)
    engine = Engine(experiment.engine)
    shares = partition.make(dataset, experiment.partition, experiment.partition_seed)
    federation = Federation(experiment, dataset, shares, engine)
    federation.prepare()
    times: dict[str, list[float]] = {}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        results = []
        times.setdefault(phase, []).extend(seconds(lambda: results.append(work()), repeats=1, warm_up=0))
        return results[0]

    for number in range(options.rounds):
        tasks = timed("batches", federation.tasks)
        results = timed("local training", lambda tasks=tasks: engine.run(tasks))
        timed("aggregation", lambda tasks=tasks, results=results: federation.finish_round(tasks, results))
        if number % experiment.evaluate_every == 0:
            timed("evaluation of two models", federation.server.test)
    return {phase: spread(values[1:] or values, 1000) for phase, values in times.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg-matched", "feddure"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
