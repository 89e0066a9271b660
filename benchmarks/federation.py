"""Time rounds of a real federation against the simulator's for the same work, and count what travels.

    python benchmarks/federation.py --json results/federation.json

Three sites with images of noise, all of them in every round: FedDure, five steps of 10 labelled and 10 unlabelled
images. The federation is `feddure federate` on the loopback address of this machine, with TLS and keys; every process
has one thread, and the first round of each does not count. Flower starts a Python process for each message and asks for
work every three seconds, so a round costs seconds whatever is trained in it; `at_sites_s` is the longest of the sites'
own times, without the start of the process and of PyTorch.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import finish, noise_images, spread
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from deployed import Deployed
from feddure import data, experiments
from feddure.data import partition as partitions
from feddure.flower.app.description import Description
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run
from feddure.tracking import records
from feddure.tracking.observer import Observer

SITES = ("east", "north", "west")


class Clock(Observer):
    """The wall time of every round."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: list[float] = []

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # as at the sites, which share this machine's cores
    images = noise_images(number=options.images)
    settings = (
        f"model={options.model} clients_per_round=3 local_steps=5 labelled_batch=10 unlabelled_batch=10 "
        f"evaluate_every={options.rounds}"
    )
    description = Description(
        name="noise", classes=images.classes, size=32, channels=3, mean=images.mean, std=images.std, sites=SITES
    )
    with tempfile.TemporaryDirectory(prefix="federation-benchmark-") as temporary:
        root = Path(temporary)
        write_images(root / "images", images)
        simulated = simulate(root, settings, options.rounds)
        timing, metrics = federate(root, description, settings, options.rounds)
    counted = timing[1:]
    report: dict[str, Any] = {
        "benchmark": "federation",
        "method": "feddure",
        "model": options.model,
        "sites": len(SITES),
        "images": options.images,
        "simulator_s_per_round": spread(simulated[1:]),
        "federation_s_per_round": spread([line["seconds"] for line in counted]),
        "at_sites_s": spread([max(line["sites"].values()) for line in counted]),
        "bytes_per_site_and_round": {
            way: metrics[-1]["federation"]["sites"][0]["bytes"][way] for way in ("down", "up")
        },
        "threads": torch.get_num_threads(),
    }
    finish(report, options.json)


def write_images(root: Path, images: Any) -> None:
    """Two thirds of the images unlabelled, a few to test on."""
    for number, (pixels, label) in enumerate(zip(images.images, images.labels, strict=True)):
        home = root / "clients" / SITES[number % 3]
        folder = home / "labelled" / images.classes[label] if number // 3 % 3 == 0 else home / "unlabelled"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number:05}.png")
    for label, pixels in enumerate(images.images[: len(images.classes)]):
        folder = root / "test" / images.classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "0.png")


def simulate(root: Path, settings: str, rounds: int) -> list[float]:
    """Seconds of each of the simulator's rounds on the same images."""
    dataset = data.load(f"folder:{root / 'images'}?size=32&channels=3")
    fixed = {"dataset": "noise", "method": "feddure", "rounds": rounds, "partition.setting": "sites"}
    experiment = experiments.load(None, None, fixed | {"partition.clients": len(SITES)}, settings.split())
    engine = Engine(experiment.engine)
    owned = partitions.make(dataset, experiment.partition, experiment.partition_seed)
    federation, clock = Federation(experiment, dataset, owned, engine), Clock()
    run(federation, [clock])
    return clock.seconds


def federate(root: Path, description: Description, settings: str, rounds: int) -> tuple[list[dict], list[dict]]:
    """Timing and records of a real federation's rounds."""
    with Deployed(root, description) as federation:
        federation.start_server()
        for site in SITES:
            federation.start_site(site, root / "images" / "clients" / site)
        wanted = [word for pair in settings.split() for word in ("--set", pair)]
        run = federation.start_run("run", root / "run", "--rounds", rounds, *wanted)
        federation.wait_for(lambda: run.ended, 60 * rounds + 120, "the last round")
        if run.code:
            raise SystemExit(run.log_tail())
    return records.read(root / "run" / records.TIMING), records.read(root / "run" / records.METRICS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet9-slim", help="network")
    parser.add_argument("--rounds", type=int, default=6, help="rounds, the first of which does not count")
    parser.add_argument("--images", type=int, default=900, help="images of all sites together")
    parser.add_argument("--json", type=Path, help="file to write the report to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
