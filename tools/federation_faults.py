"""What a real federation does when things go wrong: sites killed in the middle of a round, a server killed and started
again, sites that send what cannot be used, images that cannot be read, helpers of Flower that are lost.

    python tools/federation_faults.py --json results/federation-faults.json

Starts a SuperLink and three SuperNodes with TLS and node authentication on the loopback address, every one in processes
of its own, does the damage with SIGKILL, and reads what happened from the runs' records. Then once more with `feddure
federate`, whose server and sites watch over Flower's helpers. Site `north` has no unlabelled images, `south` no
labelled ones, `west` both and one file that is no image. The exit code is 0 where every fault had the outcome that was
expected, and 1 where one had not. It takes nine minutes on two cores.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import federated
from feddure import environment
from feddure.flower.app.run_config import write_app
from feddure.flower.app.description import ServerAddress
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.processes import Process
from feddure.methods.feddure import FedDure
from feddure.tracking import records
from loopback import Loopback, free_port

TIMEOUT = 60.0  # of a round, in seconds
STEPS = 200  # enough for a round to be hit while its sites train
SETTINGS = (
    "model=cnn clients_per_round=3 labelled_batch=5 unlabelled_batch=6 feddure.f_reg_memory=client "
    "engine.device=cpu engine.precision=fp64"
)


class Sick(FedDure):
    """Client 0 sends NaN in round 1, a vector that is too short in round 2, and an unknown name in round 3."""

    def upload(self, client):
        sent = super().upload(client)
        if len(client.key) != 3 or client.key[2] != 0:
            return sent
        ill = {
            1: {"theta": sent["theta"] * math.nan, "statistics": sent["statistics"]},
            2: {"theta": sent["theta"][:-1], "statistics": sent["statistics"]},
            3: {"weights": sent["theta"], "statistics": sent["statistics"]},
        }
        return ill.get(client.key[1], sent)


class Faults:
    """The federation under attack, and what was found."""

    def __init__(self, root: Path, flower: Loopback):
        self.root = root
        self.flower = flower
        self.found: list[dict[str, Any]] = []

    def note(self, fault: str, expected: str, happened: str, as_expected: bool) -> None:
        """One line of the outcome."""
        self.found.append({"fault": fault, "expected": expected, "happened": happened, "as_expected": as_expected})
        print(f"{'ok  ' if as_expected else 'FAIL'} {fault}: {happened}", flush=True)

    def start(self) -> None:
        """The SuperLink and all sites."""
        self.flower.start_superlink()
        for site in federated.SITES:
            self.flower.register(site)
            self.start_site(site)

    def start_site(self, site: str) -> None:
        folder = self.root / "images" / "clients" / site
        own = {"site": site, "data": str(folder), "state": str(self.root / "state" / site)}
        self.flower.start_node(site, own | {"modules": "true"})  # for the method of this file

    def restart_site(self, site: str) -> float:
        """Start a killed site again; the SuperLink takes it for online until its heartbeats have been missing a while.

        Returns the seconds until it was let in.
        """
        log, began = self.flower.folder / f"{site}.log", time.monotonic()
        connected = log.read_text(errors="replace").count("SuperNode ID")
        self.start_site(site)

        def let_in() -> bool:
            if self.flower.processes[site].poll() is not None:
                self.flower.kill(site)
                self.start_site(site)
            return log.read_text(errors="replace").count("SuperNode ID") > connected

        self.flower.wait_for(let_in, 120, f"{site} to be let in again")
        return time.monotonic() - began

    def record(self, run: str, number: int, seconds: float = 120.0) -> dict[str, Any]:
        """The record of a round, once it is there."""
        path = self.root / run / records.METRICS

        def ready() -> dict[str, Any] | None:
            lines = records.read(path) if path.exists() else []
            return next((line for line in lines if line["round"] == number), None)

        return self.flower.wait_for(ready, seconds, f"round {number} of {run}")

    def wait_until_training(self, site: str) -> None:
        """Until a site has taken up a further training message and works on it."""
        log = self.flower.folder / f"{site}.log"
        seen = log.read_text(errors="replace").count("Receiving: train message")
        self.flower.wait_for(
            lambda: log.read_text(errors="replace").count("Receiving: train message") > seen, 120, f"{site} to train"
        )
        time.sleep(4.0)  # its process has started by then, and trains for longer than this

    # --- the faults ----------------------------------------------------------------------------------
    def odd_sites(self) -> None:
        record = self.record("run", 1)
        about = {
            site["site"]: site for site in json.loads((self.root / "run" / "federation.json").read_text())["sites"]
        }
        told = {name: f"{s['labelled']}+{s['unlabelled']}" for name, s in about.items()}
        self.note(
            "a site without labelled and one without unlabelled images",
            "all train",
            f"labelled+unlabelled images: {told}; left out in round 1: {record['left_out']}",
            record["left_out"] == [] and about["north"]["unlabelled"] == 0 and about["south"]["labelled"] == 0,
        )
        self.note(
            "a file at a site that is no image",
            "it is left out and counted, the site trains",
            f"unreadable files: { ({name: s['unreadable'] for name, s in about.items()}) }",
            about["west"]["unreadable"] == 1 and record["left_out"] == [],
        )

    def kill_a_site(self) -> None:
        self.wait_until_training("west")
        self.flower.kill("west")
        killed = max(line["round"] for line in records.read(self.root / "run" / records.METRICS)) + 1
        record = self.record("run", killed)
        problem = next((s.get("problem", "") for s in record["federation"]["sites"] if s["site"] == "west"), "")
        seconds = next(t["seconds"] for t in records.read(self.root / "run" / records.TIMING) if t["round"] == killed)
        self.note(
            "a site is killed in the middle of a round",
            f"the round goes on with the others within {TIMEOUT:g} s and names the site",
            f"round {killed} took {seconds:.0f} s, left out west ({problem})",
            record["left_out"] == [2] and bool(problem) and seconds < TIMEOUT + 15,
        )
        waited = self.restart_site("west")
        number = killed + 1
        while 2 in (record := self.record("run", number))["left_out"] and number < killed + 9:
            number += 1
        notes = [s.get("memory", "kept") for s in record["federation"]["sites"] if s["site"] == "west"]
        self.note(
            "the site is started again",
            "it takes part again, and remembers its regulator",
            f"let in after {waited:.0f} s, used again in round {number}; memory {notes[0] if notes else 'unknown'}",
            2 not in record["left_out"] and notes == ["kept"],
        )

    def kill_the_server(self) -> None:
        self.wait_until_training("north")
        before = records.read(self.root / "run" / records.METRICS)[-1]["round"]
        self.flower.kill("superlink")
        time.sleep(2)
        self.flower.start_superlink()
        self.flower.run(self.root / "app", resume=True)
        record = self.record("run", before + 1, 180)
        numbers = [line["round"] for line in records.read(self.root / "run" / records.METRICS)]
        lost = [s["site"] for s in record["federation"]["sites"] if "memory" in s]
        self.note(
            "SuperLink and server app are killed in the middle of a round, and started again with resume",
            "the run goes on after the last whole round, with all sites and their memories",
            f"killed after round {before}, went on with round {before + 1}; sites {record['federation']['connected']}, "
            f"left out {record['left_out']}, memories lost {lost}",
            numbers == list(range(1, len(numbers) + 1)) and record["left_out"] == [] and not lost,
        )

    def sick_site(self) -> None:
        settings = SETTINGS + " local_steps=2"
        folder = str(self.root / "sick")
        method = "federation_faults:Sick"
        run = self.flower.run(self.root / "app", method=method, rounds=4, settings=settings, run_folder=folder)
        for number, fault, reason in (
            (1, "a site sends NaN", "not finite"),
            (2, "a site sends an array of the wrong shape", "shape"),
            (3, "a site sends an array of a wrong name", "sent arrays"),
        ):
            record = self.record("sick", number)
            problem = record["federation"]["sites"][[s["client"] for s in record["federation"]["sites"]].index(0)]
            self.note(
                fault,
                "it is left out and named, the round goes on",
                f"left out {record['left_out']} ({problem.get('problem')})",
                record["left_out"] == [0] and reason in problem.get("problem", ""),
            )
        record = self.record("sick", 4)
        state = self.flower.wait_until_ended(run, 60)
        self.note(
            "the site is well again",
            "it takes part, and the run is completed",
            f"left out in round 4: {record['left_out']}; {state}",
            record["left_out"] == [] and state == "finished:completed",
        )

    def lose_superexecs(self) -> None:
        """With the commands of feddure, which do not leave Flower's SuperExec alone."""
        address = ServerAddress(host="127.0.0.1", port=free_port())
        description = federated.DESCRIPTION.model_copy(update={"server": address, "timeout_seconds": TIMEOUT})
        folder = initialise(self.root / "federation", description, control_port=free_port()).root
        with ExitStack() as ending:

            def start(log: str, *words: Any) -> Process:
                command = [sys.executable, "-m", "feddure", "federate", *map(str, words)]
                surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
                return ending.enter_context(Process(command, surroundings, self.flower.folder / f"{log}.log"))

            server = start("server", "server", folder)
            self.flower.wait_for(lambda: "ready" in server.log_tail(), 60, "the server to be ready")
            images = self.root / "images" / "clients"
            sites = {
                site: start(site, "site", folder, site, "--data", images / site, "--verbose")
                for site in federated.SITES
            }
            wanted = [word for pair in [*SETTINGS.split(), f"local_steps={STEPS}"] for word in ("--set", pair)]
            run = start("run", "run", folder, "--out", self.root / "kept", "--rounds", 60, *wanted)
            self.lose_superexec_of_server(
                server, run, lambda: start("resumed", "run", folder, "--out", self.root / "kept", "--resume")
            )
            self.lose_superexec_of_site(sites["west"])

    def lose_superexec_of_server(self, server: Process, run: Process, resume: Callable[[], Process]) -> None:
        self.record("kept", 1)
        self.wait_until_training("north")
        lost, began = superexec(server), time.monotonic()
        os.kill(lost, signal.SIGKILL)
        self.flower.wait_for(lambda: superexec(server) not in (None, lost), 60, "another SuperExec")
        seconds = time.monotonic() - began
        self.flower.wait_for(lambda: run.ended, 60, "the run to end")
        told = "its program was ended" in run.log_tail() and "--resume" in run.log_tail()
        before = records.read(self.root / "kept" / records.METRICS)[-1]["round"]
        resume()
        record = self.record("kept", before + 1, 180)
        self.note(
            "the server's SuperExec is killed in the middle of a round",
            "it is started again, `federate run` ends with an error, and resume goes on after the last whole round",
            f"another one after {seconds:.0f} s; the run ended with code {run.code} and {'' if told else 'without '}"
            f"the next step; it went on with round {record['round']}, left out {record['left_out']}",
            seconds < 15 and told and run.code == 2 and record["left_out"] == [],
        )

    def lose_superexec_of_site(self, site: Process) -> None:
        self.wait_until_training("west")
        os.kill(superexec(site), signal.SIGKILL)
        killed = records.read(self.root / "kept" / records.METRICS)[-1]["round"] + 1
        record = self.record("kept", killed)
        problem = next((s.get("problem", "") for s in record["federation"]["sites"] if s["site"] == "west"), "")
        number = killed
        while 2 in self.record("kept", number)["left_out"] and number < killed + 9:
            number += 1
        self.note(
            "a site's SuperExec is killed while the site trains",
            "the round goes on without the site, which joins again by itself",
            f"round {killed} left out {record['left_out']} ({problem}); used again in round {number}",
            record["left_out"] == [2] and bool(problem) and number < killed + 9,
        )


def superexec(process: Process) -> int | None:
    """The SuperExec that a command of feddure has started."""
    words = ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="]
    table = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for number, parent, state, command in (line.split(maxsplit=3) for line in table.splitlines()):
        if int(parent) == process.popen.pid and not state.startswith("Z") and "flower-superexec" in command:
            return int(number)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the outcome to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="federation-faults-") as temporary:
        root = federated.write_images(Path(temporary))
        sites = root / "images" / "clients"
        shutil.rmtree(sites / "north" / "unlabelled")
        shutil.rmtree(sites / "south" / "labelled")
        (sites / "west" / "unlabelled" / "notes.png").write_text("no image")
        defaults = {
            "rounds": 60,
            "method": "feddure",
            "settings": f"{SETTINGS} local_steps={STEPS}",
            "run-folder": str(root / "run"),
            "timeout-seconds": TIMEOUT,
        }
        write_app(root / "app", federated.DESCRIPTION, defaults)
        with Loopback(root / "flower") as flower:
            places = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
            flower.environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
            faults = Faults(root, flower)
            faults.start()
            flower.run(root / "app")
            faults.odd_sites()
            faults.kill_a_site()
            faults.kill_the_server()
            for number in [found["run-id"] for found in flower.flwr("list", "loopback")["runs"]]:
                if not flower.state(str(number)).startswith("finished"):
                    flower.flwr("stop", str(number), "loopback")
            faults.sick_site()
            for name in list(flower.processes):
                flower.kill(name)
            faults.lose_superexecs()
    good = all(line["as_expected"] for line in faults.found)
    if options.json:
        report = {"faults": faults.found, "all_as_expected": good, "environment": environment.describe()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("all as expected" if good else "not all as expected")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
