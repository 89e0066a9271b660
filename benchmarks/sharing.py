"""Time rounds of one federation alone and of several that share the lanes: what a grid gains by sharing.

python benchmarks/sharing.py --data-dir DATA --together 3 9 --json results/sharing.json
"""

import argparse
import time
from pathlib import Path

from common import finish, load, seconds, spread

from feddure import data
from feddure.data import partition
from feddure.data.dataset import Dataset
from feddure.simulation.engine import Engine
from feddure.simulation.rounds import Federation, prepare, run

SETTINGS = ("iid-iid", "iid-dir", "dir-dir")


def main() -> None:
    options = parse()
    dataset = data.load(options.dataset, options.data_dir)
    engine = Engine(load("fedavg").engine)
    found = {method: measure(method, dataset, engine, options) for method in options.methods}
    report = {"benchmark": "sharing", "dataset": options.dataset, "rounds": options.rounds, "lanes": engine.lanes.limit}
    finish(report | {"methods": found}, options.json)


def measure(method: str, dataset: Dataset, engine: Engine, options: argparse.Namespace) -> dict:
    """Seconds of a federation's rounds, evaluation included, by how many federations train together."""
    per_run = {}
    for together in (1, *options.together):
        federations = [make(method, number, dataset, engine, options) for number in range(together)]
        began = time.perf_counter()
        prepare(federations, engine)
        building = time.perf_counter() - began

        def rounds(federations: list[Federation] = federations) -> None:
            for federation in federations:
                federation.round = 0  # the same clients each time
            run(federations, engine)

        times = [value / together for value in seconds(rounds, options.repeats)]
        per_run[str(together)] = {"seconds_a_run": spread(times), "compile_and_capture_seconds": building}
    alone = per_run["1"]["seconds_a_run"]["median"]
    factors = {together: alone / entry["seconds_a_run"]["median"] for together, entry in per_run.items()}
    engine.release()
    return {"together": per_run, "times_as_fast": factors}


def make(method: str, number: int, dataset: Dataset, engine: Engine, options: argparse.Namespace) -> Federation:
    """The grid's runs in its own order: settings, then seeds."""
    changes = {"dataset": options.dataset, "rounds": options.rounds, "server__ema": 0.9}
    changes |= {"seed": number // len(SETTINGS), "partition__setting": SETTINGS[number % len(SETTINGS)]}
    experiment = load(method, **changes)
    shares = partition.make(dataset, experiment.partition, experiment.partition_seed)
    return Federation(experiment, dataset, shares, engine)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg-matched", "fedavg-fixmatch", "feddure"])
    parser.add_argument("--together", type=int, nargs="+", default=[3, 9])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
