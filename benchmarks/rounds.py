"""Time whole rounds: images, local training, aggregation, and the evaluation of both models where it is due.

    python benchmarks/rounds.py aaai24:fedavg-matched:100 aaai24-fine:feddure:15 --json results/rounds.json

Each case is PRESET:METHOD:ROUNDS, on noise of CIFAR-10's size. Compilation and capture are reported apart; `memory_mb`
is what PyTorch took of a GPU at most, with images and captured graphs. ProxyFL spreads its server's tuning over all
rounds: `cvpr25:proxyfl:5 --set proxyfl.tuning_epochs=500` has the preset's share.
"""

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from common import finish, noise_images, seconds, spread

from feddure import experiments
from feddure.data import partition
from feddure.data.dataset import Dataset
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run


def main() -> None:
    options = parse()
    dataset = noise_images(number=50_000, tests=10_000)
    cases = [measure(*case, dataset, options) for case in options.cases]
    finish({"benchmark": "rounds", "cases": cases}, options.json)


def measure(preset: str, method: str, rounds: int, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a round, over so many of them."""
    changes = {"method": method, "rounds": rounds, "server.ema": 0.9}
    experiment = experiments.load(preset, changes=changes, sets=options.sets)
    shares = partition.make(dataset, experiment.partition, experiment.partition_seed)
    held = _reset_memory()
    engine, began = Engine(experiment.engine), time.perf_counter()
    Federation(experiment, dataset, shares, engine).prepare()
    built = time.perf_counter() - began
    every = [Federation(experiment, dataset, shares, engine) for _ in range(options.repeats + 1)]
    found = seconds(lambda: run(every.pop()), options.repeats, warm_up=1)
    memory = {"memory_mb": (torch.cuda.max_memory_reserved() - held) / 1e6} if torch.cuda.is_available() else {}
    engine.release()  # the next case begins with what this one began with
    return {
        "preset": preset,
        "method": method,
        **({"sets": options.sets} if options.sets else {}),
        "ms_per_round": spread(found, 1000 / experiment.rounds),
        "prepare_s": built,
        "precision": engine.precision,
        **memory,
    }


def _reset_memory() -> int:
    """Forget the peak so far; bytes that are held already.

    Counted is what is reserved: a replayed graph works in memory of its own, which counts as allocated only while it is
    captured.
    """
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def case(text: str) -> tuple[str, str, int]:
    preset, method, rounds = text.split(":")
    return preset, method, int(rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=case, metavar="PRESET:METHOD:ROUNDS")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
