"""Let a small federation run for hundreds of rounds, and measure what grows: memory of its processes, files on disk.

    python benchmarks/soak.py --rounds 200 --json results/soak.json

Two sites with the images of the tests and the small CNN, on the loopback address, with TLS and keys. Every half minute
it notes the resident memory of each long-lived process and the size of everything in the federation's folder, the run's
folder and TMPDIR. Growth is the least-squares slope over rounds, without the first `--warm-up` of them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import finish

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import federated
from deployed import Deployed, below

SITES = ("north", "south")
SETTINGS = "model=cnn clients_per_round=2 local_steps=1 labelled_batch=5 unlabelled_batch=6 evaluate_every=10"
KINDS = {"deploy.supernode": "supernode", "flower-superlink": "superlink", "superexec": "superexec", "serverapp": "run"}
"""Programs by a word of their command lines."""


def main() -> None:
    options = parse()
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        root = federated.write_images(Path(temporary), SITES)
        (root / "tmp").mkdir()
        os.environ["TMPDIR"] = str(root / "tmp")  # what Flower leaves there counts as well
        description = federated.DESCRIPTION.model_copy(update={"sites": SITES})
        with Deployed(root, description) as federation:
            federation.start_server()
            for site in SITES:
                federation.start_site(site, root / "images" / "clients" / site)
            settings = [word for pair in SETTINGS.split() for word in ("--set", pair)]
            settings += ["--test", str(root / "images" / "test")]
            run = federation.start_run("run", root / "run", "--rounds", options.rounds, *settings)
            deadline = time.monotonic() + 60 * options.minutes
            while not run.ended and time.monotonic() < deadline:
                time.sleep(options.every)
                if (rounds := count_rounds(root / "run")) and not run.ended:
                    samples.append({"round": rounds, "time": time.time(), "memory": memory(federation)})
                    samples[-1]["disk"] = disk(root)
                    if options.json:
                        options.json.with_suffix(".samples").write_text(json.dumps(samples))
            if run.ended and run.code:
                raise SystemExit(federation.tails())
    finish(report(samples, options.warm_up), options.json)
    if options.json:
        options.json.with_suffix(".samples").unlink(missing_ok=True)


def count_rounds(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def memory(federation: Deployed) -> dict[str, int]:
    """Resident bytes of what lives longer than a message, by owner and program."""
    found: dict[str, int] = {}
    for owner in ("server", *SITES):
        process = federation.processes[owner]
        for each in [psutil.Process(process.popen.pid), *below(process)]:
            try:
                words = " ".join(each.cmdline())
                own = each.pid == process.popen.pid
                kind = "feddure" if own else next((kind for word, kind in KINDS.items() if word in words), None)
                if kind is not None:
                    found[f"{owner}: {kind}"] = found.get(f"{owner}: {kind}", 0) + each.memory_info().rss
            except psutil.Error:
                continue  # ended meanwhile
    return found


def disk(root: Path) -> dict[str, int]:
    """Bytes of each file, hidden ones included; `images` do not change."""
    sizes = {}
    for path in root.rglob("*"):
        try:
            if path.is_file() and not path.is_relative_to(root / "images"):
                sizes[str(path.relative_to(root))] = path.stat().st_size
        except OSError:
            continue  # removed meanwhile
    return sizes


def report(samples: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Growth per round, and the sizes at both ends; of files, those that change."""
    counted = [sample for sample in samples if sample["round"] >= warm_up]
    rounds = [sample["round"] for sample in counted]
    totals = [{"all files": sum(sample["disk"].values())} | group(sample["disk"]) for sample in counted]
    last = counted[-1]
    sizes = {name: [total.get(name, 0) for total in totals] for name in totals[-1]}
    return {
        "benchmark": "soak",
        "sites": len(SITES),
        "settings": SETTINGS,
        "rounds": last["round"],
        "warm_up_rounds": warm_up,
        "samples": len(counted),
        "seconds_per_round": (last["time"] - counted[0]["time"]) / max(1, rounds[-1] - rounds[0]),
        "memory": {name: growth(rounds, [s["memory"].get(name) for s in counted]) for name in last["memory"]},
        "disk": {name: growth(rounds, each) for name, each in sizes.items() if len(set(each)) > 1},
    }


def group(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes by file; what has a number or a hash for a name counts with its folder."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        parts = name.split("/")
        plain = next((n for n, part in enumerate(parts) if sum(map(str.isdigit, part)) > 3), len(parts))
        key = "/".join(parts[:plain]) + ("/*" if plain < len(parts) else "")
        found[key] = found.get(key, 0) + size
    return found


def growth(rounds: Sequence[int], values: Sequence[int | None]) -> dict[str, float]:
    """First, last, most, and the slope per round."""
    pairs = [(number, value) for number, value in zip(rounds, values, strict=True) if value is not None]
    x, y = np.array(pairs, dtype=float).T
    slope = float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else 0.0
    return {"first": y[0], "last": y[-1], "most": y.max(), "bytes_per_round": round(slope, 1)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many, however many rounds there were")
    parser.add_argument("--every", type=float, default=30, help="seconds between samples")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds that do not count")
    parser.add_argument("--json", type=Path, help="file to write the report to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
