"""A step of all clients at once (`together_lanes`) against a lane each.

    python benchmarks/together.py fedavg-matched:10+0 fedtutor:10+10 feddure:10+10 --json results/together.json

Before anything is timed both ways take the same steps, and how far they end apart is part of the report. `--check`
does that alone, on a CPU too (with TRITON_INTERPRET=1 by Triton's kernels).
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, load, make_tasks, noise_images, seconds, spread
from together_lanes import CHOSEN, INTERPRETED, WAYS, TogetherLanes

from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Result, Task


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    method, _, batch = case.partition(":")
    labelled, unlabelled = map(int, batch.split("+"))
    precision = "fp64" if options.check and not INTERPRETED else "auto"
    experiment = load(
        method, options.sets, labelled_batch=labelled, unlabelled_batch=max(unlabelled, 1), model=options.model,
        engine__lanes=options.clients, engine__precision=precision,
    )  # fmt: skip
    engine = Engine(experiment.engine)
    tasks = make_tasks(engine, experiment, noise_images(options.side), options.clients, options.steps)
    lanes = TogetherLanes(engine.device, options.clients, bool(engine.compiles))
    if not options.check:
        engine.prepare(tasks)
    lanes.prepare(tasks)
    report: dict[str, Any] = {"method": method, "batch": batch, "precision": engine.precision}
    report |= {"prepare_s": lanes.seconds, "apart": _apart(tasks, engine.run(tasks), lanes.run(tasks))}
    if not options.check:
        before = spread(seconds(lambda: engine.run(tasks), options.repeats), 1e3 / options.steps)
        after = spread(seconds(lambda: lanes.run(tasks), options.repeats), 1e3 / options.steps)
        report |= {"lanes_ms": before, "together_ms": after, "times_as_fast": before["median"] / after["median"]}
        report |= {"kernels": _kernels(lambda: lanes.run(tasks), options.steps)}
    engine.release()
    lanes.release()
    return report


def _apart(tasks: list[Task], expected: list[Result], found: list[Result]) -> dict[str, float]:
    """How far both ways end apart, in terms of how far clients moved."""
    apart = {}
    for name in ("theta", "statistics"):
        wanted, ours = (torch.stack([result.upload[name] for result in results]) for results in (expected, found))
        apart[name] = float((ours - wanted).norm() / (wanted - tasks[0].received[name]).norm())
    return apart


def _kernels(go: Callable[[], None], steps: int) -> dict[str, Any]:
    """Kernels of a step of all: their number, their time, and the largest groups."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        go()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:60], []).append(event.device_time)
    largest = sorted(found.items(), key=lambda item: -sum(item[1]))[:15]
    return {
        "a_step": sum(map(len, found.values())) / steps,
        "ms": sum(map(sum, found.values())) / steps / 1e3,
        "largest": [[name, len(times) / steps, sum(times) / steps] for name, times in largest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["fedavg-matched:10+0", "feddure:10+10"], metavar="METHOD:L+U")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="lanes also receive and send, which many steps hide")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--convolutions", choices=["best", "cudnn", "triton"], default="best")
    parser.add_argument("--set", dest="sets", nargs="+", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--check", action="store_true", help="agreement alone, without compiler and graph")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.convolutions != "best":
        WAYS.intersection_update({options.convolutions})
    cases = [measure(case, options) for case in options.cases]
    chosen = [{"convolution": str(key), "ms": ways} for key, ways in CHOSEN.items()]
    finish({"benchmark": "together", "model": options.model, "cases": cases, "convolutions": chosen}, options.json)


if __name__ == "__main__":
    main()
