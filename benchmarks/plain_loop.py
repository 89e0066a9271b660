"""Time local training of a round: clients in lanes against a plain PyTorch loop, client after client, in one run.

    python benchmarks/plain_loop.py --json results/plain-loop.json

`fedavg-sl` (one labelled batch of 10 a step) on ResNet-9 at 3×32×32. The plain loop is what one would write by hand:
a module in channels-last memory, autocast to the same precision, fused Adam, the same images on the device. Compilation
and capture are reported apart and not part of any other figure.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import finish, load, make_tasks, noise_images, seconds, spread

from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Task
from feddure.simulation.program import new_module


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available()
    clients = [int(n) for n in options.clients.split(",")] if options.clients else [5, 20] if cuda else [2]
    dataset = noise_images()
    report: dict = {"benchmark": "plain-loop", "method": "fedavg-sl", "model": options.model, "steps": options.steps}
    report["against_plain_loop"] = []
    for number in clients:
        experiment = load("fedavg-sl", model=options.model, engine__lanes=number if cuda else 1)
        engine = Engine(experiment.engine)
        tasks = make_tasks(engine, experiment, dataset, number, options.steps)
        began = time.perf_counter()
        engine.lanes.prepare(tasks)
        engine.run(tasks)
        build = time.perf_counter() - began
        ours = spread(seconds(lambda: engine.run(tasks), options.repeats), 1000 / options.steps)  # noqa: B023
        module = new_module(experiment, dataset).to(engine.device, memory_format=torch.channels_last)
        plain = spread(
            seconds(lambda: plain_loop(module, tasks, engine.precision), options.plain_repeats),  # noqa: B023
            1000 / options.steps,
        )
        report["precision"] = engine.precision
        report["against_plain_loop"].append(
            {
                "clients": number,
                "lanes_ms_per_step_of_all": ours,
                "plain_ms_per_step_of_all": plain,
                "times_as_fast": plain["median"] / ours["median"],
                "compile_and_capture_s": build,
            }
        )
    finish(report, options.json)


def plain_loop(module: torch.nn.Module, tasks: list[Task], precision: str) -> None:
    """Every client in turn, as in a textbook."""
    for task in tasks:
        local = copy.deepcopy(module).train()
        device = next(local.parameters()).device
        adam = torch.optim.Adam(local.parameters(), lr=5e-4, fused=device.type == "cuda")
        for step in range(task.steps):
            batch = task.batches.step(step)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(local(batch.labelled.float()), batch.labels)
            adam.zero_grad(set_to_none=True)
            loss.backward()
            adam.step()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--clients", help="comma-separated numbers of clients")
    parser.add_argument("--steps", type=int, default=50, help="local steps of each client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain-repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
