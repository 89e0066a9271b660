"""What a real federation does when things go wrong: sites killed in the middle of a round, a server killed and started
again, sites that send what cannot be used, images that cannot be read, helpers of Flower that are lost.

    python tools/federation_faults.py --json results/federation-faults.json

Starts `feddure federate` server, three sites and runs on the loopback address, every one in processes of its own, does
the damage with SIGKILL, and reads what happened from the runs' records. Site `north` has no unlabelled images, `south`
no labelled ones, `west` both and one file that is no image. The exit code is 0 where every fault had the outcome that
was expected, and 1 where one had not. It takes nine minutes on two cores.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import federated
from deployed import Deployed, superexec
from feddure import environment
from feddure.flower.deploy.status import read_status
from feddure.methods.feddure import FedDure
from feddure.tracking import records

TIMEOUT = 60.0  # of a round, in seconds
STEPS = 200  # enough for a round to be hit while its sites train
SETTINGS = (
    *("model=cnn", "clients_per_round=3", "labelled_batch=5", "unlabelled_batch=6", "feddure.f_reg_memory=client"),
    *("engine.device=cpu", "engine.precision=fp64"),
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

    def __init__(self, root: Path, federation: Deployed):
        self.root = root
        self.federation = federation
        self.found: list[dict[str, Any]] = []

    def note(self, fault: str, expected: str, happened: str, as_expected: bool) -> None:
        """One line of the outcome."""
        self.found.append({"fault": fault, "expected": expected, "happened": happened, "as_expected": as_expected})
        print(f"{'ok  ' if as_expected else 'FAIL'} {fault}: {happened}", flush=True)

    def start_site(self, site: str) -> None:
        folder = self.root / "images" / "clients" / site
        self.federation.start_site(site, folder, "--allow-modules")  # for the method of this file

    def start_run(self, name: str, folder: str, *options: Any, steps: int = STEPS) -> None:
        wanted = [word for pair in (*SETTINGS, f"local_steps={steps}") for word in ("--set", pair)]
        self.federation.start_run(name, self.root / folder, *options, *wanted)

    def resume(self, folder: str) -> None:
        """Go on once the server knows that the run is over: a killed one counts as running for a while."""
        self.federation.processes.pop("run").stop()
        self.federation.wait_for(
            lambda: all(run.status.startswith("finished") for run in read_status(self.federation.folder).runs),
            180,
            "the run to be over",
        )
        self.federation.start_run("run", self.root / folder, "--resume")

    def metrics(self, folder: str) -> list[dict[str, Any]]:
        path = self.root / folder / records.METRICS
        return records.read(path) if path.exists() else []

    def record(self, folder: str, number: int, seconds: float = 180.0) -> dict[str, Any]:
        """The record of a round, once it is there."""

        def ready() -> dict[str, Any] | None:
            return next((line for line in self.metrics(folder) if line["round"] == number), None)

        return self.federation.wait_for(ready, seconds, f"round {number} of {folder}")

    def next_use(self, folder: str, site: int, number: int) -> int:
        """The first round from this one on that uses a site."""
        last = number + 9
        while site in self.record(folder, number)["left_out"] and number < last:
            number += 1
        return number

    def wait_until_training(self, site: str) -> None:
        """Until a site has taken up a further training message and works on it."""
        seen = self.federation.log(site).count("Receiving: train message")
        self.federation.wait_for(
            lambda: self.federation.log(site).count("Receiving: train message") > seen, 180, f"{site} to train"
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
        self.federation.kill("west")
        killed = self.metrics("run")[-1]["round"] + 1
        record = self.record("run", killed)
        problem = next((s.get("problem", "") for s in record["federation"]["sites"] if s["site"] == "west"), "")
        seconds = next(t["seconds"] for t in records.read(self.root / "run" / records.TIMING) if t["round"] == killed)
        self.note(
            "a site is killed in the middle of a round",
            f"the round goes on with the others within {TIMEOUT:g} s and names the site",
            f"round {killed} took {seconds:.0f} s, left out west ({problem})",
            record["left_out"] == [2] and bool(problem) and seconds < TIMEOUT + 15,
        )
        self.start_site("west")
        number = self.next_use("run", 2, killed + 1)
        record = self.record("run", number)
        notes = [s.get("memory", "kept") for s in record["federation"]["sites"] if s["site"] == "west"]
        self.note(
            "the site is started again",
            "it takes part again, and remembers its regulator",
            f"used again in round {number}; memory {notes[0] if notes else 'unknown'}",
            2 not in record["left_out"] and notes == ["kept"],
        )

    def kill_the_server(self) -> None:
        self.wait_until_training("north")
        before = self.metrics("run")[-1]["round"]
        self.federation.kill("server")
        self.federation.start_server()
        self.resume("run")
        record = self.record("run", before + 1, 240)
        numbers = [line["round"] for line in self.metrics("run")]
        lost = [s["site"] for s in record["federation"]["sites"] if "memory" in s]
        self.note(
            "the server is killed in the middle of a round, and started again with resume",
            "the run goes on after the last whole round, with all sites and their memories",
            f"killed after round {before}, went on with round {before + 1}; sites {record['federation']['connected']}, "
            f"left out {record['left_out']}, memories lost {lost}",
            numbers == list(range(1, len(numbers) + 1)) and record["left_out"] == [] and not lost,
        )

    def lose_superexec_of_server(self) -> None:
        self.wait_until_training("north")
        server, run = self.federation.processes["server"], self.federation.processes["run"]
        lost, began = superexec(server), time.monotonic()
        lost.kill()
        self.federation.wait_for(lambda: superexec(server) not in (None, lost), 60, "another SuperExec")
        seconds = time.monotonic() - began
        self.federation.wait_for(lambda: run.ended, 60, "the run to end")
        told = "its program was ended" in run.log_tail() and "--resume" in run.log_tail()
        before = self.metrics("run")[-1]["round"]
        self.resume("run")
        record = self.record("run", before + 1, 240)
        self.note(
            "the server's SuperExec is killed in the middle of a round",
            "it is started again, `federate run` ends with an error, and resume goes on after the last whole round",
            f"another one after {seconds:.0f} s; the run ended with code {run.code} and {'' if told else 'without '}"
            f"the next step; it went on with round {record['round']}, left out {record['left_out']}",
            seconds < 15 and told and run.code == 2 and record["left_out"] == [],
        )

    def lose_superexec_of_site(self) -> None:
        self.wait_until_training("west")
        superexec(self.federation.processes["west"]).kill()
        killed = self.metrics("run")[-1]["round"] + 1
        record = self.record("run", killed)
        problem = next((s.get("problem", "") for s in record["federation"]["sites"] if s["site"] == "west"), "")
        number = self.next_use("run", 2, killed)
        self.note(
            "a site's SuperExec is killed while the site trains",
            "the round goes on without the site, which joins again by itself",
            f"round {killed} left out {record['left_out']} ({problem}); used again in round {number}",
            record["left_out"] == [2] and bool(problem) and number < killed + 9,
        )

    def sick_site(self) -> None:
        self.federation.processes.pop("run").stop()
        self.start_run("sick", "sick", "--method", "federation_faults:Sick", "--rounds", 4, steps=2)
        for number, fault, reason in (
            (1, "a site sends NaN", "not finite"),
            (2, "a site sends an array of the wrong shape", "shape"),
            (3, "a site sends an array of a wrong name", "sent arrays"),
        ):
            record = self.record("sick", number)
            problem = next(s.get("problem", "") for s in record["federation"]["sites"] if s["client"] == 0)
            self.note(
                fault,
                "it is left out and named, the round goes on",
                f"left out {record['left_out']} ({problem})",
                record["left_out"] == [0] and reason in problem,
            )
        record = self.record("sick", 4)
        process = self.federation.processes["sick"]
        self.federation.wait_for(lambda: process.ended, 60, "the run to end")
        self.note(
            "the site is well again",
            "it takes part, and the run is completed",
            f"left out in round 4: {record['left_out']}; exit code {process.code}",
            record["left_out"] == [] and process.code == 0,
        )


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
        description = federated.DESCRIPTION.model_copy(update={"timeout_seconds": TIMEOUT})
        with Deployed(root, description, Path(__file__).resolve().parent) as federation:
            faults = Faults(root, federation)
            federation.start_server()
            for site in federated.SITES:
                faults.start_site(site)
            faults.start_run("run", "run", "--rounds", 60)
            faults.odd_sites()
            faults.kill_a_site()
            faults.kill_the_server()
            faults.lose_superexec_of_server()
            faults.lose_superexec_of_site()
            faults.sick_site()
    good = all(line["as_expected"] for line in faults.found)
    if options.json:
        report = {"faults": faults.found, "all_as_expected": good, "environment": environment.describe()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("all as expected" if good else "not all as expected")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
