"""What many clients cost: memory, time of a round and bytes on disk as more and more of them have trained.

    python benchmarks/scale.py fedavg-matched fedmatch --json results/scale-cpu.json

1,000 clients of CIFAR-10's size (noise), 50 a round, one local step each on the small network, a checkpoint every ten
rounds. FedMatch's server keeps a part of each client's parameters; other methods keep nothing of a client.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import psutil
from common import finish, noise_images, spread

from feddure import experiments
from feddure.data.dataset import Dataset
from feddure.simulation import checkpoint, runs
from feddure.simulation.federation import Federation
from feddure.tracking.observer import Observer


def main() -> None:
    options = parse()
    dataset = noise_images(number=50_000, tests=1000)
    cases = [measure(method, dataset, options) for method in options.methods]
    shared = {name: getattr(options, name) for name in ("model", "clients", "per_round", "rounds")}
    finish({"benchmark": "scale", **shared, "cases": cases}, options.json)


def measure(method: str, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """A run in a folder, looked at after each checkpoint."""
    experiment = experiments.load(
        changes={
            "method": method,
            "model": options.model,
            "rounds": options.rounds,
            "clients_per_round": options.per_round,
            "local_steps": 1,
            "labelled_batch": 5,
            "unlabelled_batch": 10,
            "evaluate_every": options.rounds,
            "checkpoint_every": options.every,
            "partition.clients": options.clients,
            "partition.labels_per_class": 1,
        },
        sets=options.sets,
    )
    with tempfile.TemporaryDirectory() as folder:
        scale = Scale(Path(folder) / "run", options.every)
        runs.execute(experiment, dataset, scale.folder, progress=False, observers=[scale])
    later = scale.seconds[1:]
    tenth = max(1, len(later) // 10)
    return {
        "method": method,
        "ms_per_round": spread(later, 1000),
        "ms_per_round_of_the_first_tenth": spread(later[:tenth], 1000),
        "ms_per_round_of_the_last_tenth": spread(later[-tenth:], 1000),
        "looks": scale.looks,
    }


class Scale(Observer):
    """Comes after what writes to disk, and so sees this round's checkpoint."""

    def __init__(self, folder: Path, every: int):
        self.folder = folder
        self.seconds: list[float] = []
        self.looks: list[dict[str, float]] = []
        self._every = every
        self._seen: set[int] = set()

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        self.seconds.append(seconds)
        self._seen |= set(record["clients"])
        if federation.round % self._every:
            return
        memory = psutil.Process().memory_info()
        files = [path.stat().st_size for path in (self.folder / checkpoint.CLIENTS).glob("*")]
        self.looks.append(
            {
                "round": federation.round,
                "clients_seen": len(self._seen),
                "own_memory_mb": (memory.rss - getattr(memory, "shared", 0)) / 1e6,
                "mapped_from_files_mb": getattr(memory, "shared", 0) / 1e6,
                "checkpoint_mb": (self.folder / checkpoint.FILE).stat().st_size / 1e6,
                "files_of_clients": len(files),
                "files_of_clients_mb": sum(files) / 1e6,
            }
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="rounds between two checkpoints")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
