"""Time local training by the number of lanes: more of them fill the chip, fewer of them fit its cache.

    python benchmarks/lanes.py --methods feddure fedavg-fixmatch --unlabelled 10 90 --json results/lanes.json

Noise images at 3×32×32; the same clients are dealt to 1, 2, 3, ... lanes. Of SAGE's protocol:

    python benchmarks/lanes.py --model resnet8 --methods fedtutor proxyfl --labelled 128 --unlabelled 256 \
        --clients 8 --lanes 1 2 4 8 --set optimizer.name=sgd fedtutor.contrast=1
"""

import argparse
import time
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
    batches = {"labelled_batch": options.labelled, "unlabelled_batch": unlabelled}
    experiment = load(method, options.sets, model=options.model, engine__lanes=max(options.lanes), **batches)
    engine = Engine(experiment.engine)
    tasks = make_tasks(engine, experiment, dataset, options.clients, options.steps)
    began = time.perf_counter()
    engine.prepare(tasks)
    built = time.perf_counter() - began
    by_lanes = []
    for lanes in options.lanes:
        engine.lanes.limit = lanes
        times = seconds(lambda: engine.run(tasks), options.repeats)
        by_lanes.append({"lanes": lanes, "ms_per_client_step": spread(times, 1000 / options.steps / options.clients)})
    engine.release()
    batch = f"{experiment.labelled_batch} + {unlabelled}"
    return {"method": method, "batch": batch, "precision": engine.precision, "prepare_s": built, "by_lanes": by_lanes}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["feddure", "fedavg-fixmatch"])
    parser.add_argument("--labelled", type=int, default=10, help="labelled images in a step")
    parser.add_argument("--unlabelled", type=int, nargs="+", default=[10, 90], help="unlabelled images in a step")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3, 5, 10, 20])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="local steps of each client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--set", dest="sets", nargs="+", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
