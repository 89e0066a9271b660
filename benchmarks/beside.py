"""Rounds on a CPU, alone and beside other programs: lanes of one core each against one lane of all cores.

    python benchmarks/beside.py --set engine.precision=bf16 --json results/beside-cpu.json

Each case is PRESET:METHOD on the embedded images, without evaluations. The other programs are a second run of the same
kind, or processes that do nothing but count.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import finish, seconds, spread

from feddure import experiments, load_dataset
from feddure.data import partition
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation

ALONE, RUN, BUSY = "nothing", "another run", "six busy processes"
COMPANY = (ALONE, RUN, BUSY)
COUNT = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def main() -> None:
    options = parse()
    if options.endless:
        federation = make(options.cases[0], options.endless, options.sets)
        parent = os.getppid()
        while os.getppid() == parent:
            federation.train_round()
        return
    found = [
        measure(case, company, lanes, options)
        for case in options.cases
        for company in COMPANY
        for lanes in ("1", "auto")
    ]
    finish({"benchmark": "beside", "cases": found}, options.json)


def make(case: str, lanes: str, sets: list[str]) -> Federation:
    preset, method = case.split(":")
    changes = {"method": method, "rounds": 10**6, "evaluate_every": 10**6}
    experiment = experiments.load(preset, changes=changes, sets=[f"engine.lanes={lanes}", *sets])
    dataset = load_dataset(experiment.dataset)
    shares = partition.make(dataset, experiment.partition, experiment.partition_seed)
    return Federation(experiment, dataset, shares, Engine(experiment.engine))


def measure(case: str, company: str, lanes: str, options: argparse.Namespace) -> dict[str, Any]:
    federation = make(case, lanes, options.sets)
    again = [sys.executable, __file__, case, "--endless", lanes, *(f"--set={one}" for one in options.sets)]
    with beside({ALONE: [], RUN: [again], BUSY: 6 * [[sys.executable, "-c", COUNT]]}[company]):
        found = seconds(federation.train_round, options.rounds, warm_up=2)
    print(f"{case}, {lanes} lanes beside {company}: {spread(found)}", file=sys.stderr, flush=True)
    return {"case": case, "beside": company, "lanes": lanes, "ms_per_round": spread(found, 1e3)}


@contextmanager
def beside(commands: list[list[str]]) -> Iterator[None]:
    """Other programs, until the end."""
    processes = [subprocess.Popen(command) for command in commands]
    try:
        time.sleep(12 if commands else 0)  # until all are at work
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["demo:feddure", "recommended:fedtutor"]
    parser.add_argument("cases", nargs="*", metavar="PRESET:METHOD", default=usual)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endless", metavar="LANES", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
