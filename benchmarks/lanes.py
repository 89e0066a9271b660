"""Time local training by the number of lanes: more of them fill the chip, fewer of them fit its cache.

    python benchmarks/lanes.py --methods feddure fedavg-fixmatch --unlabelled 10 90 --json results/lanes.json

Noise images, ResNet-9 at 3×32×32, ten labelled images a step; the same clients are dealt to 1, 2, 3, ... lanes.
"""

import argparse
from pathlib import Path
from typing import Any

from common import finish, load, make_tasks, noise_images, seconds, spread

from feddure.data.dataset import Dataset
from feddure.simulation.engine import Engine


def main() -> None:
    options = parse()
    dataset = noise_images()
    found = [
        measure(method, unlabelled, dataset, options) for method in options.methods for unlabelled in options.unlabelled
    ]
    report = {"benchmark": "lanes", "model": options.model, "clients": options.clients, "steps": options.steps}
    finish(report | {"measured": found}, options.json)


def measure(method: str, unlabelled: int, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a client's step by the number of lanes; one compilation and one engine for all."""
    experiment = load(method, model=options.model, unlabelled_batch=unlabelled, engine__lanes=max(options.lanes))
    engine = Engine(experiment.engine)
    tasks = make_tasks(engine, experiment, dataset, options.clients, options.steps)
    engine.prepare(tasks)
    by_lanes = []
    for lanes in options.lanes:
        engine.lanes.limit = lanes
        times = seconds(lambda: engine.run(tasks), options.repeats)
        by_lanes.append({"lanes": lanes, "ms_per_client_step": spread(times, 1000 / options.steps / options.clients)})
    engine.release()
    batch = f"{experiment.labelled_batch} + {unlabelled}"
    return {"method": method, "batch": batch, "precision": engine.precision, "by_lanes": by_lanes}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["feddure", "fedavg-fixmatch"])
    parser.add_argument("--unlabelled", type=int, nargs="+", default=[10, 90], help="unlabelled images in a step")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3, 5, 10, 20])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="local steps of each client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
