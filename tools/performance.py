"""The tables of docs/performance.md, from what benchmarks wrote to results/; `make findings` puts them there."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS = {"aaai24": 200, "aaai24-fine": 200, "cvpr25": 300}


@cache
def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def span(found: Mapping[str, float], digits: int = 1) -> str:
    """A median with its least and most."""
    return f"{found['median']:.{digits}f} ({found['least']:.{digits}f}–{found['most']:.{digits}f})"


def rows(head: str, *lines: str) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|---" + "|---:" * (columns - 1) + "|", *lines])


def whole_runs() -> str:
    """What a user waits for: the newest commit that each case was timed at."""
    newest = {(case["preset"], case["method"]): case for case in read("rounds")["cases"]}
    return rows(
        "|preset|method|ms a round|seconds a run|",
        *(
            f"|`{preset}`|{method}|{span(case['ms_per_round'])}|"
            f"{case['ms_per_round']['median'] * ROUNDS[preset] / 1000:.0f}|"
            for (preset, method), case in sorted(newest.items())
        ),
    )


def steps() -> str:
    step, floors = read("step"), read("floor")["steps"]
    wide = next(m for m in read("lanes")["measured"] if m["method"] == "feddure" and m["batch"] == "10 + 90")
    five = next(one for one in wide["by_lanes"] if one["lanes"] == 5)["ms_per_client_step"]
    five = {name: 5 * value for name, value in five.items() if name != "repeats"}
    twin = step["twin_ms_per_step_of_all"]["median"]
    lines = [
        f"|10 + 10|{span(step['lanes_ms_per_step_of_all'])}|{twin:.0f}|{step['times_as_fast']:.1f}|"
        f"{floors['feddure 10 + 10, plain']['ms']['median']:.1f}|",
        f"|10 + 90|{span(five)}|–|–|{floors['feddure 10 + 90, plain']['ms']['median']:.1f}|",
    ]
    return rows("|images a step|five lanes, ms|textbook twin, ms|times as fast|convolutions alone, ms|", *lines)


def plain_loops() -> str:
    cases = [("H200", case) for case in read("round")["against_plain_loop"]]
    cases += [("2 CPU cores", case) for case in read("round-cpu")["against_plain_loop"]]
    return rows(
        "|`fedavg-sl` on|clients|lanes, ms a step of all|plain loop, ms|times as fast|",
        *(
            f"|{where}|{case['clients']}|{span(case['lanes_ms_per_step_of_all'], 2)}|"
            f"{case['plain_ms_per_step_of_all']['median']:.1f}|{case['times_as_fast']:.1f}|"
            for where, case in cases
        ),
    )


def augmentation() -> str:
    return rows(
        "|T_s of 10,000 CIFAR-10 images on|images a second|Pillow, image by image|times as fast|",
        *(
            f"|{where}|{found['batched']['images_per_second']:,}|{found['pillow']['images_per_second']:,}|"
            f"{found['speedup']:.1f}|"
            for where, found in (("H200", read("augment")), ("2 CPU cores", read("augment-cpu")))
        ),
    )


def federation() -> str:
    found = read("federation-cpu")
    named = {
        "simulator": found["simulator_s_per_round"],
        "federation of three sites on one machine": found["federation_s_per_round"],
        "of which the slowest site's own work": found["at_sites_s"],
    }
    return rows("||seconds a round|", *(f"|{name}|{span(times)}|" for name, times in named.items()))


def races() -> str:
    """Every competitor that was raced, beside this engine in the arithmetic nearest to its own and in its default."""
    lines = []
    places = {
        "race": "H200",
        "race-cpu-time": "CPU seconds",
        "race-cpu": "2 busy cores",
        "race-flower-cpu": "2 cores, here two threads, there two actors",
    }
    for name, where in places.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        for race in read(name)["races"]:
            times, other = race["ms_per_round"], race["against"]
            for ours, faster in race["times_as_fast"].items():
                last = {who: [list(curve.values())[-1] for curve in race["accuracy"][who]] for who in (ours, other)}
                accuracy = " / ".join(f"{100 * sum(found) / len(found):.1f}" for found in last.values())
                lines.append(
                    f"|{where}|{RACED[race['model']]}|{RACED[other]}|{ours.removeprefix('feddure ')}|"
                    f"{span(times[ours], 0)}|{span(times[other], 0)}|{faster:.2f}|{accuracy}|"
                )
    return rows("|on|network|against|arithmetic|ms a round|theirs|times as fast|accuracy, % / theirs|", *lines)


def many_clients() -> str:
    """The first and the last look at each run."""
    lines = []
    for case in read("scale-cpu")["cases"]:
        for look, when in ((case["looks"][0], "first"), (case["looks"][-1], "last")):
            lines.append(
                f"|{case['method']}|{look['round']}|{look['clients_seen']}|{look['own_memory_mb']:.0f}|"
                f"{look['checkpoint_mb']:.2f}|{look['files_of_clients_mb']:.0f}|"
                f"{case[f'ms_per_round_of_the_{when}_tenth']['median']:.0f}|"
            )
    return rows("|method|round|clients seen|memory, MB|checkpoint, MB|files of clients, MB|ms a round|", *lines)


RACED = {"cnn": "two convolutions", "resnet9": "ResNet-9", "pfl": "pfl-research", "flower": "Flower's simulation"}
TABLES = {
    "whole-runs": whole_runs,
    "steps": steps,
    "plain-loops": plain_loops,
    "augmentation": augmentation,
    "real-federation": federation,
    "races": races,
    "many-clients": many_clients,
}
