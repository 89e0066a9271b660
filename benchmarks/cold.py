"""Seconds from the start of a process to the first step of a run, phase by phase.

    python benchmarks/cold.py fedtutor --json results/cold.json

What compilers leave is kept in an empty folder; a second process, with the same folder, finds it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    options = parse()
    if options.one:
        print(json.dumps(phases(options)))
        return
    from common import finish

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for cache in ("empty", "warm"):
            command = [sys.executable, *sys.argv, "--one"]
            done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr.strip())
            found[cache] = json.loads(done.stdout.splitlines()[-1])
    finish({"benchmark": "cold", "preset": options.preset, "method": options.method, "seconds": found}, options.json)


def phases(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each phase of this process."""
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        found[name] = round(time.perf_counter() - began, 2)
        return result

    timed("PyTorch", lambda: __import__("torch"))
    federations = timed("feddure", lambda: __import__("feddure.simulation.federation", fromlist=["Federation"]))
    from common import noise_images

    from feddure import experiments
    from feddure.data import partition
    from feddure.simulation import compiler
    from feddure.simulation.engine import Engine

    dataset = noise_images(number=50_000, tests=10_000)
    changes = {"method": options.method, "rounds": 1, "server.ema": 0.9}
    experiment = experiments.load(options.preset, changes=changes, sets=options.sets)
    shares = partition.make(dataset, experiment.partition, experiment.partition_seed)
    engine = Engine(experiment.engine)
    if engine.compiles:
        timed("compiler and libraries", lambda: compiler.start(engine.device, engine.dtype))
    federation = timed("federation", lambda: federations.Federation(experiment, dataset, shares, engine))
    timed("lanes", lambda: engine.prepare(federation.tasks()))
    timed("evaluation", federation.prepare)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("--preset", default="aaai24-fine")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--one", action="store_true", help="this process alone, with the compilers' usual folders")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
