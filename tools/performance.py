"""The tables of docs/performance.md, from what benchmarks wrote to results/; `make findings` puts them there."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from feddure.methods import title

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS = {"aaai24": 200, "aaai24-fine": 200, "cvpr25": 300}
HARDWARE = {"": "H200", "-cpu": "2 CPU cores"}
"""By the endings of results' names."""
RACES = {
    "race": "H200",
    "race-cpu-time": "CPU seconds",
    "race-flower-cpu": "2 cores, here two threads, there two actors",
}
RACED = {"cnn": "two convolutions", "resnet9": "ResNet-9", "pfl": "pfl-research", "flower": "Flower's simulation"}


@cache
def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rounds(preset: str) -> dict[str, Any]:
    """Cases of a preset by method."""
    return {case["method"]: case for case in read("rounds")["cases"] if case["preset"] == preset}


def span(found: Mapping[str, float], digits: int = 1) -> str:
    """A median with its least and most."""
    return f"{found['median']:.{digits}f} ({found['least']:.{digits}f}–{found['most']:.{digits}f})"


def table(head: Sequence[str], lines: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """Markdown; columns from `numbers_from` on are aligned to the right."""
    marks = ["---" if place < numbers_from else "---:" for place in range(len(head))]
    return "\n".join(f"|{'|'.join(line)}|" for line in [head, marks, *lines])


def whole_runs() -> str:
    """What a user waits for."""
    lines = [
        (f"`{case['preset']}`", _method(case), span(case["ms_per_round"]),
         f"{case['ms_per_round']['median'] * ROUNDS[case['preset']] / 1000:.0f}", f"{case['memory_mb'] / 1000:.1f}")
        for case in sorted(read("rounds")["cases"], key=lambda case: (case["preset"], case["ms_per_round"]["median"]))
    ]  # fmt: skip
    return table(("preset", "method", "ms a round", "seconds a run", "GPU memory, GB"), lines, 2)


def cold() -> str:
    """From the start of a process to the first step."""
    lines = []
    for left, phases in read("cold")["seconds"].items():
        ready = sum(phases.values()) - phases["lanes"]
        lines.append((left, f"{ready:.0f}", f"{phases['lanes']:.0f}", f"{sum(phases.values()):.0f}"))
    return table(("cache of compilers", "imports and libraries, s", "compile and capture, s", "in all, s"), lines)


def _method(case: Mapping[str, Any]) -> str:
    return title(case["method"]) + "".join(f", `{one}`" for one in case.get("sets", ()))


def steps() -> str:
    step, floors = read("step"), read("floor")["steps"]
    wide = next(m for m in read("lanes")["measured"] if m["method"] == "feddure" and m["batch"] == "10 + 90")
    five = next(one for one in wide["by_lanes"] if one["lanes"] == 5)["ms_per_client_step"]
    five = {name: 5 * value for name, value in five.items() if name != "repeats"}
    twin = f"{step['twin_ms_per_step_of_all']['median']:.0f}", f"{step['times_as_fast']:.1f}"
    lines = [
        (batch, span(ms), *against, f"{floors[f'feddure {batch}, plain']['ms']['median']:.1f}")
        for batch, ms, against in (("10 + 10", step["lanes_ms_per_step_of_all"], twin), ("10 + 90", five, "––"))
    ]
    head = ("images a step", "five lanes, ms", "textbook twin, ms", "times as fast", "convolutions alone, ms")
    return table(head, lines)


def plain_loops() -> str:
    lines = [
        (where, str(case["clients"]), span(case["lanes_ms_per_step_of_all"], 2),
         f"{case['plain_ms_per_step_of_all']['median']:.1f}", f"{case['times_as_fast']:.1f}")
        for ending, where in HARDWARE.items() for case in read(f"plain-loop{ending}")["against_plain_loop"]
    ]  # fmt: skip
    return table(("`fedavg-sl` on", "clients", "lanes, ms a step of all", "plain loop, ms", "times as fast"), lines)


def augmentation() -> str:
    lines = [
        (where, *(f"{found[how]['images_per_second']:,}" for how in ("batched", "pillow")), f"{found['speedup']:.1f}")
        for ending, where in HARDWARE.items()
        for found in [read(f"augment{ending}")]
    ]
    head = ("T_s of 10,000 CIFAR-10 images on", "images a second", "Pillow, image by image", "times as fast")
    return table(head, lines)


def federation() -> str:
    named = {
        "simulator": "simulator_s_per_round",
        "federation of three sites on one machine": "federation_s_per_round",
        "of which the slowest site's own work": "at_sites_s",
    }
    return table(("", "seconds a round"), [(name, span(read("federation-cpu")[key])) for name, key in named.items()])


def races() -> str:
    """Every competitor that was raced, beside this engine in the arithmetic nearest to its own and in its default."""
    lines = []
    for name, where in RACES.items():
        for race in read(name)["races"] if (RESULTS / f"{name}.json").exists() else ():
            other = race["against"]
            for ours, faster in race["times_as_fast"].items():
                last = [[list(curve.values())[-1] for curve in race["accuracy"][who]] for who in (ours, other)]
                lines.append((
                    where, RACED[race["model"]], RACED[other], ours.removeprefix("feddure "),
                    *(span(race["ms_per_round"][who], 0) for who in (ours, other)), f"{faster:.2f}",
                    " / ".join(f"{100 * sum(found) / len(found):.1f}" for found in last),
                ))  # fmt: skip
    head = ("on", "network", "against", "arithmetic", "ms a round", "theirs", "times as fast", "accuracy, % / theirs")
    return table(head, lines)


def many_clients() -> str:
    """The first and the last look at each run."""
    lines = [
        (case["method"], str(look["round"]), str(look["clients_seen"]), f"{look['own_memory_mb']:.0f}",
         f"{look['checkpoint_mb']:.2f}", f"{look['files_of_clients_mb']:.0f}",
         f"{case[f'ms_per_round_of_the_{when}_tenth']['median']:.0f}")
        for case in read("scale-cpu")["cases"]
        for look, when in ((case["looks"][0], "first"), (case["looks"][-1], "last"))
    ]  # fmt: skip
    head = ("method", "round", "clients seen", "memory, MB", "checkpoint, MB", "files of clients, MB", "ms a round")
    return table(head, lines)


TABLES = {
    "whole-runs": whole_runs,
    "cold": cold,
    "steps": steps,
    "plain-loops": plain_loops,
    "augmentation": augmentation,
    "real-federation": federation,
    "races": races,
    "many-clients": many_clients,
}
