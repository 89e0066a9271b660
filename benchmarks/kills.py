"""Kill runs with SIGKILL at random moments, go on with them, and compare what is left with a run that nobody killed.

    python benchmarks/kills.py --simulator 100 --federation 20 --json results/kills.json

The simulator's run is `feddure run --resume` in a forked process, so that kills hit its work and not its imports; its
files must be those of the unkilled run, byte for byte. Whenever a run completes the next one begins.

The federation is `feddure federate` on the loopback address: first the server, its children and the command that
watches the run are killed in turn, and the model must be the simulator's; then the sites and their children, which
costs a site a round, and the model must be whole. Whatever ended is started again as an operator would. At the end the
audit logs of server and sites are verified.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from common import finish
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import federated
import folders
import tiny
from deployed import Deployed, below
from feddure import experiments
from feddure.cli import main as feddure
from feddure.flower.app import audit
from feddure.simulation import runs
from feddure.simulation.federation import run as simulate
from feddure.tracking import records

ROUNDS = 16, 16
"""Of the run whose server is killed, and of the one whose sites are: that one goes on meanwhile."""
AT_SERVER = ("feddure", "superlink", "superexec", "serverapp", "run")
AT_SITE = ("feddure", "supernode", "superexec", "allowlist")
"""A word of the command line of each program; `feddure` is the command itself, `run` is `federate run`, and a site's
ClientApp runs under the allowlist."""


def main() -> None:
    options = parse()
    random.seed(options.seed)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"benchmark": "kills", "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        if options.simulator:
            report["simulator"] = kill_simulator(Path(temporary) / "simulator", options.simulator)
        if options.federation:
            root, minutes = Path(temporary) / "federation", options.minutes
            report["federation"] = kill_federation(root, options.federation, minutes)
    finish(report, options.json)


# --- the simulator -----------------------------------------------------------------------------------
def kill_simulator(root: Path, wanted: int) -> dict[str, Any]:
    """Kills at moments that are spread evenly over a fifth of the time that the run takes."""
    root.mkdir()
    images = {name: getattr(folders.IMAGES, name) for name in ("images", "labels", "test_images", "test_labels")}
    np.savez(root / "tiny.npz", **images)
    changes = {"dataset": f"npz:{root / 'tiny.npz'}", "rounds": 300, "checkpoint_every": 7, "evaluate_every": 20}
    experiment = tiny.experiment(folders.LONG | changes)
    (root / "config.yaml").write_text(experiments.to_yaml(experiment))
    began = time.monotonic()
    whole = _start(root, root / "whole")
    whole.join()
    taken, expected = time.monotonic() - began, folders.contents(root / "whole")
    kills, completed, different, failed, at_round = 0, 0, 0, 0, []
    while kills < wanted:
        folder = root / f"run-{completed}"
        process = _start(root, folder)
        process.join(random.uniform(0, taken / 5))
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
            metrics = folder / records.METRICS
            at_round.append(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
            if kills < wanted:
                continue
            process = _start(root, folder)
            process.join()
        failed += process.exitcode != 0
        different += process.exitcode == 0 and folders.contents(folder) != expected
        completed += 1
    return {
        "kills": kills,
        "seconds_of_a_run": taken,
        "killed_after_rounds": at_round,
        "completed_runs": completed,
        "failed_to_resume": failed,
        "runs_with_other_files": different,
    }


def _start(root: Path, folder: Path) -> Any:
    words = ["run", "--config", str(root / "config.yaml"), "--out", str(folder), "--resume"]
    process = multiprocessing.get_context("fork").Process(target=_work, args=(words, root / "log"))
    process.start()
    return process


def _work(words: Sequence[str], log: Path) -> None:
    with log.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv = ["feddure", *words]
    feddure()


# --- the federation ----------------------------------------------------------------------------------
def kill_federation(root: Path, wanted: int, minutes: float) -> dict[str, Any]:
    """Three fifths of the kills, and of the time, at the server, the rest at sites."""
    root.mkdir()
    federated.write_images(root)
    description = federated.DESCRIPTION.model_copy(update={"timeout_seconds": 30})
    at_server = wanted * 3 // 5
    with Deployed(root, description) as federation:
        killer = Killer(federation, root)
        server = killer.run("at-server", AT_SERVER, at_server, ROUNDS[0], ("server",), 0.6 * minutes)
        apart = from_simulator(root, root / "at-server")
        sites = killer.run("at-sites", AT_SITE, wanted - at_server, ROUNDS[1], federated.SITES, 0.4 * minutes)
        model = load_file(root / "at-sites" / runs.MODEL_FILE)
    logs = {"server": federation.folder.server} | {
        name: federation.folder.bundle(name).state for name in federated.SITES
    }
    audits = {name: audit.read(place / audit.FILE) for name, place in logs.items()}
    return {
        "server": server | {"largest_difference_from_the_simulator": apart},
        "sites": sites | {"finite": all(bool(tensor.isfinite().all()) for tensor in model.values())},
        "audit_entries": {name: len(found.entries) for name, found in audits.items()},
        "broken_chains": [name for name, found in audits.items() if found.problem],
        "torn_lines": sum(entry["event"] == "a line was torn" for found in audits.values() for entry in found.entries),
    }


def from_simulator(root: Path, folder: Path) -> float:
    """How far a run's model is from that of the simulator on the run's own experiment, at most."""
    asked = runs.read_config(folder)
    assert asked is not None
    simulated = federated.simulator(root, asked)
    simulate(simulated)
    expected, found = simulated.server.model_state(), load_file(folder / runs.MODEL_FILE)
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


class Killer:
    """Ends processes of a federation in turn, and starts again what an operator would."""

    def __init__(self, federation: Deployed, root: Path):
        self._federation = federation
        self._root = root
        self._resumes = 0
        self._restarts: Counter[str] = Counter()

    def run(
        self, name: str, kinds: Sequence[str], kills: int, rounds: int, owners: Sequence[str], minutes: float
    ) -> dict[str, Any]:
        """A run to its end, with so many kills or as many as fit into the time."""
        self._folder, self._resumes, self._restarts = self._root / name, 0, Counter()
        self._begin = ("--rounds", rounds, "--test", self._root / "images" / "test")
        self._begin += tuple(word for pair in federated.SETTINGS.split() for word in ("--set", pair))
        killed, began = [], time.monotonic()
        for number in range(kills):
            if self._rounds() >= rounds - 1 or time.monotonic() - began > 60 * minutes:
                break
            time.sleep(2)  # what ends with a killed process takes a moment
            self._federation.wait_for(self._goes_on, 300, "the run to go on")
            if number % 2:  # a run that is killed before its first round is not resumed, but begun again
                reached = self._rounds()
                self._federation.wait_for(lambda n=reached: self._rounds() > n or self._ended(), 300, "a round")
            self._pause(random.uniform(0, 30))
            owner, kind = owners[number % len(owners)], kinds[number % len(kinds)]
            killed.append({"what": f"{owner}: {kind}", "after_round": self._rounds(), "hit": self._kill(owner, kind)})
            print(f"{time.monotonic() - began:.0f} s: {killed[-1]}", flush=True)
        self._federation.wait_for(lambda: self._goes_on() is None, 120 * rounds, "the run's end")
        return {
            "kills": sum(kill["hit"] for kill in killed),
            "rounds": self._rounds(),
            "rounds_with_a_site_left_out": sum(
                bool(line["left_out"]) for line in records.read(self._folder / records.METRICS)
            ),
            "resumed": self._resumes,
            "started_again": dict(self._restarts),
            "seconds": time.monotonic() - began,
            "killed": killed,
        }

    def _goes_on(self) -> bool | None:
        """Start what has ended; whether the run's program is at work, or None where the run is complete."""
        if (self._folder / runs.MODEL_FILE).exists() and self._ended():
            return None
        self._recover()
        return all(self._find("server", kind) for kind in AT_SERVER) and not self._ended()

    def _ended(self) -> bool:
        return "run" not in self._federation.processes or self._federation.processes["run"].ended

    def _rounds(self) -> int:
        metrics = self._folder / records.METRICS
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._ended():
            time.sleep(0.05)

    def _recover(self) -> None:
        """What an operator does: start what has ended, and go on with the run."""
        federation, processes = self._federation, self._federation.processes
        if self._is_gone("server"):
            federation.start_server()
        for site in federated.SITES:
            if self._is_gone(site):
                federation.start_site(site, self._root / "images" / "clients" / site)
        if "run" in processes and processes["run"].ended:
            processes.pop("run").stop()
        if "run" not in processes and not (self._folder / runs.MODEL_FILE).exists():
            begun = (self._folder / records.CONFIG).exists()
            self._resumes += begun
            federation.start_run("run", self._folder, *(["--resume"] if begun else self._begin))

    def _is_gone(self, name: str) -> bool:
        processes = self._federation.processes
        if name in processes and processes[name].ended:
            processes.pop(name).stop()
            self._restarts[name] += 1
        return name not in processes

    def _kill(self, owner: str, kind: str) -> bool:
        """SIGKILL one process; False where there was none for 20 seconds."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            process = self._find(owner, kind)
            if process is not None:
                process.send_signal(signal.SIGKILL)
                return True
            time.sleep(0.02)
        return False

    def _find(self, owner: str, kind: str) -> psutil.Process | None:
        process = self._federation.processes.get("run" if kind == "run" else owner)
        with suppress(psutil.Error):  # ended meanwhile
            if process is None:
                return None
            if kind in ("feddure", "run"):
                return psutil.Process(process.popen.pid)
            for each in below(process):
                words = each.cmdline()
                if "-S" not in words and any(kind in word for word in words):  # not one that is about to become it
                    return each
        return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulator", type=int, default=100, help="kills of a simulated run")
    parser.add_argument("--federation", type=int, default=20, help="kills of a real federation's processes")
    parser.add_argument("--minutes", type=float, default=60, help="for the kills of a federation")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="file to write the report to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
