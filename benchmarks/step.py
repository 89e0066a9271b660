"""Time a FedDure step: five clients in lanes against the textbook twin, client after client, in one run.

    python benchmarks/step.py --json results/step.json

ResNet-9 at 3×32×32, batch 10 + 10. The twin (tests/oracle) is the paper's equations in plain modules with double
backpropagation; here it runs in the same precision and memory format, with fused Adam. Augmentation is outside both.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from common import finish, load, make_tasks, noise_images, seconds, spread

from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Task
from feddure.simulation.program import new_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from oracle.client import Settings
from oracle.feddure_twin import FedDure as Twin
from oracle.feddure_twin import new_f_reg

# Multiply-adds of ResNet-9 on one 32×32 image, and passes of a FedDure step in units of a forward pass over one
# image: θ forward and backward on x, T_w(u), T_s(u); φ forward and two backwards on T_s(u); φ⁻ forward and backward
# on x; the tangent's two products on T_s(u); φ and φ_new forward on x.
MULTIPLY_ADDS = 379e6


def useful_flops(labelled: int, unlabelled: int) -> float:
    images = 3 * (labelled + 2 * unlabelled) + (1 + 2 * 2) * unlabelled + 3 * labelled + 2 * unlabelled + 2 * labelled
    return 2 * MULTIPLY_ADDS * images


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available()
    dataset = noise_images()
    experiment = load(
        "feddure", model=options.model, unlabelled_batch=options.unlabelled, engine__lanes=options.clients
    )
    engine = Engine(experiment.engine)
    tasks = make_tasks(engine, experiment, dataset, options.clients, options.steps)
    began = time.perf_counter()
    engine.lanes.prepare(tasks)
    engine.run(tasks)
    build = time.perf_counter() - began
    ours = spread(seconds(lambda: engine.run(tasks), options.repeats), 1000 / options.steps)
    memory = torch.cuda.max_memory_reserved() / 1e9 if cuda else None
    report = {
        "benchmark": "step",
        "method": "feddure",
        "model": options.model,
        "batch": f"{experiment.labelled_batch} + {options.unlabelled}",
        "clients": options.clients,
        "precision": engine.precision,
        "lanes_ms_per_step_of_all": ours,
        "compile_and_capture_s": build,
        "gpu_memory_reserved_gb": memory,
    }
    if options.model == "resnet9":
        flops = options.clients * useful_flops(experiment.labelled_batch, options.unlabelled)
        report["useful_tflop_per_s"] = flops / (ours["median"] / 1000) / 1e12
    if options.twin_steps:
        module = new_module(experiment, dataset).to(engine.device, memory_format=torch.channels_last)
        found = seconds(lambda: twin_loop(module, tasks, engine.precision, options.twin_steps), options.twin_repeats)
        twin = spread(found, 1000 / options.twin_steps)
        report |= {"twin_ms_per_step_of_all": twin, "times_as_fast": twin["median"] / ours["median"]}
    if options.profile and cuda:
        report["kernels"] = profile(engine, tasks)
    finish(report, options.json)


class FusedTwin(Twin):
    """The twin with the fastest Adam that PyTorch has."""

    def new_adam(self, parameters) -> torch.optim.Adam:  # type: ignore[no-untyped-def]
        parameters = list(parameters)
        return torch.optim.Adam(parameters, lr=self.settings.learning_rate, fused=parameters[0].is_cuda)


def twin_loop(module: torch.nn.Module, tasks: list[Task], precision: str, steps: int) -> None:
    """Every client in turn."""
    device = next(module.parameters()).device
    for task in tasks:
        client = FusedTwin(module, Settings(), new_f_reg(10).to(device))
        for step in range(steps):
            batch = task.batches.step(step)
            images = [tensor.float() for tensor in (batch.labelled, batch.weak, batch.strong)]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                client.step(images[0], batch.labels, images[1], images[2])


def profile(engine: Engine, tasks: list[Task]) -> dict:
    """Kernels of one client's step: their number, their time, and the largest groups."""
    from torch.profiler import ProfilerActivity

    task = tasks[0]
    lane = engine.lanes._lane(0, task.program)
    lane.begin(task)
    lane.step(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        lane.step(1)
        torch.cuda.synchronize()
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    groups: dict[str, list[float]] = {}
    for event in kernels:
        groups.setdefault(event.name, []).append(event.device_time)
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:45]
    return {
        "per_step": len(kernels),
        "device_ms": sum(e.device_time for e in kernels) / 1000,
        "largest": [{"name": name[:90], "number": len(times), "us": round(sum(times), 1)} for name, times in largest],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--unlabelled", type=int, default=10, help="unlabelled images in a step")
    parser.add_argument("--steps", type=int, default=40, help="local steps of each client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--twin-steps", type=int, default=6, help="local steps of the twin; 0 leaves it out")
    parser.add_argument("--twin-repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="count the kernels of a step")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
