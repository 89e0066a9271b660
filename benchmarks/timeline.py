"""Draw when each lane worked on which client in one real round with Dirichlet clients.

python benchmarks/timeline.py --data-dir DATA --lanes 5 --clients 20 --json results/timeline.json --plot FILE.png
python benchmarks/timeline.py --from results/timeline.json --plot FILE.png
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import finish, load

from feddure import data
from feddure.data import partition
from feddure.reports import style
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation
from feddure.simulation.lanes import Lane, Result, Task


def main() -> None:
    options = parse()
    report = json.loads(options.source.read_text()) if options.source else measure(options)
    if options.plot:
        style.save(draw(report), options.plot)
    if not options.source:
        finish(report, options.json)


def measure(options: argparse.Namespace) -> dict:
    """One round, everything captured and warm before."""
    experiment = load(
        options.method,
        dataset=options.dataset,
        model=options.model,
        local_steps="epoch",
        unlabelled_batch=10,
        clients_per_round=options.clients,
        engine__lanes=options.lanes,
    )
    dataset = data.load(options.dataset, options.data_dir)
    engine = Engine(experiment.engine)
    federation = Federation(experiment, dataset, partition.make(dataset, experiment.partition, 0), engine)
    tasks = federation.tasks()
    engine.lanes.prepare(tasks)
    engine.run(tasks)
    spans = watch(lambda: engine.run(tasks), engine.device)
    return {
        "benchmark": "timeline",
        "method": options.method,
        "model": options.model,
        "dataset": options.dataset,
        "lanes": engine.lanes.limit,
        "spans": spans,
    }


def watch(run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """When a lane worked on which client, in seconds since the run began: by events on CUDA, on a CPU by wall time."""
    cuda = device.type == "cuda"
    started: dict[int, tuple[Task, Any]] = {}
    marks: list[tuple[int, Task, Any, Any]] = []
    begin, finish = Lane.begin, Lane.finish

    def now(stream: torch.cuda.Stream | None = None) -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def marked_begin(lane: Lane, task: Task) -> None:
        started[lane.number] = (task, now(lane.stream))
        begin(lane, task)

    def marked_finish(lane: Lane) -> Result:
        result = finish(lane)
        marks.append((lane.number, *started.pop(lane.number), now(lane.stream)))
        return result

    origin = now()
    with mock.patch.multiple(Lane, begin=marked_begin, finish=marked_finish):
        run()
    if cuda:
        torch.cuda.synchronize()

    def seconds(mark: Any) -> float:
        return origin.elapsed_time(mark) / 1000 if cuda else mark - origin

    return [
        {"lane": lane, "client": task.client, "steps": task.steps, "start": seconds(start), "end": seconds(end)}
        for lane, task, start, end in marks
    ]


def draw(report: dict):
    """A bar for each client on its lane."""
    spans = report["spans"]
    lanes = report["lanes"]
    with style.applied():
        figure = style.new_figure(10, 1.6 + 0.42 * lanes)
        axes = figure.add_subplot()
        for span in spans:
            length = span["end"] - span["start"]
            colour = style.PALETTE[span["client"] % len(style.PALETTE)]
            axes.barh(span["lane"], length, left=span["start"], height=0.8, color=colour, edgecolor="white")
            label = f"client {span['client']}\n{span['steps']} step{'s' * (span['steps'] > 1)}"
            if length > 0.055 * max(s["end"] for s in spans):
                fmt = {
                    "ha": "center",
                    "va": "center",
                    "size": 7,
                    "color": "white" if colour == style.BLACK else "black",
                }
                axes.text(span["start"] + length / 2, span["lane"], label, **fmt)
        axes.set_yticks(range(lanes), [f"lane {lane}" for lane in range(lanes)])
        axes.invert_yaxis()
        axes.set_xlabel("seconds since the round began")
        busy = sum(s["end"] - s["start"] for s in spans) / (lanes * max(s["end"] for s in spans))
        axes.set_title(
            f"One round of {report['method']}: {len(spans)} Dirichlet clients on {lanes} lanes, {busy:.0%} busy"
        )
    return figure


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--method", default="feddure")
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=5)
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="draw figures measured before")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
