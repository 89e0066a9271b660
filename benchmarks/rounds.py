"""Time whole rounds: images, local training, aggregation, and the evaluation of both models where it is due.

    python benchmarks/rounds.py aaai24:fedavg-matched:100 aaai24-fine:feddure:15 --json results/rounds.json

Each case is PRESET:METHOD:ROUNDS, on noise of CIFAR-10's size. Compilation and capture are reported apart. ProxyFL
spreads its server's tuning over all rounds: `cvpr25:proxyfl:5 --set proxyfl.tuning_epochs=500` has the preset's share.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from common import finish, noise_images, seconds, spread

from feddure import experiments
from feddure.data import partition
from feddure.data.dataset import Dataset
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run


def main() -> None:
    options = parse()
    dataset = noise_images(number=50_000, tests=10_000)
    cases = [measure(*case.split(":"), dataset, options) for case in options.cases]
    finish({"benchmark": "rounds", "cases": cases}, options.json)


def measure(preset: str, method: str, rounds: str, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a round, over so many of them."""
    changes = {"method": method, "rounds": int(rounds), "server.ema": 0.9}
    experiment = experiments.load(preset, changes=changes, sets=options.sets)
    shares = partition.make(dataset, experiment.partition, experiment.partition_seed)
    engine, began = Engine(experiment.engine), time.perf_counter()
    Federation(experiment, dataset, shares, engine).prepare()
    built = time.perf_counter() - began
    every = [Federation(experiment, dataset, shares, engine) for _ in range(options.repeats + 1)]
    found = seconds(lambda: run(every.pop()), options.repeats, warm_up=1)
    return {
        "preset": preset,
        "method": method,
        "ms_per_round": spread(found, 1000 / experiment.rounds),
        "prepare_s": built,
        "precision": engine.precision,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="PRESET:METHOD:ROUNDS")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
