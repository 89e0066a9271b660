"""Time the evaluation of one model on 10,000 images by the size of the pieces they are taken in.

    python benchmarks/evaluation.py --json results/evaluation.json

Noise images, ResNet-9 at 3×32×32, compiled where the engine compiles.
"""

import argparse
import time
from pathlib import Path

from common import finish, load, noise_images, seconds, spread

from feddure.simulation.engine import Engine
from feddure.simulation.program import new_module


def main() -> None:
    options = parse()
    noise = noise_images(number=options.images)
    dataset = type(noise)(**{**vars(noise), "test_images": noise.images, "test_labels": noise.labels})
    experiment = load("fedavg", model=options.model)
    engine = Engine(experiment.engine)
    network, feed = engine.program(experiment, dataset).network, engine.images(dataset)
    model = network.take(new_module(experiment, dataset))
    found = []
    for size in options.sizes:
        logits = network.evaluator(*model)
        began = time.perf_counter()
        logits(feed.test_batches(size)[0][0])
        build = time.perf_counter() - began
        times = seconds(lambda: [logits(images) for images, _ in feed.test_batches(size)], options.repeats)  # noqa: B023
        found.append({"size": size, "ms": spread(times, 1000), "first_piece_s": build})
    report = {
        "benchmark": "evaluation",
        "model": options.model,
        "images": options.images,
        "precision": engine.precision,
    }
    finish(report | {"by_size": found}, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[125, 250, 500, 1000, 2500, 10000])
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
