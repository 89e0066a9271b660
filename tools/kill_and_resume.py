"""Kill a run again and again, resume it each time, and compare what it leaves with an uninterrupted run.

    python tools/kill_and_resume.py --times 20

Half of the kills come at a random moment after the process was started, so that some hit it before its first
checkpoint or while it only starts up; the other half come a random moment after it has finished a few more rounds. All
are SIGKILL, which no program can prepare for. The exit code is 0 where every file that must not differ is
equal to the byte, and 1 where one is not.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = ("metrics.jsonl", "checkpoint/state.safetensors", "model.safetensors", "partition.npz", "config.yaml")
COMMAND = (sys.executable, "-c", "from feddure.cli import main; main()", "run")
MOST_ROUNDS = 3  # between two kills, as long as rounds take some milliseconds
PATIENCE = 120.0  # seconds without a new round after which something is wrong


def options(rounds: int) -> list[str]:
    """A small experiment with all the state a checkpoint can hold."""
    sets = {
        "partition.clients": 12,
        "partition.labels_per_class": 2,
        "clients_per_round": 3,
        "local_steps": 1,
        "labelled_batch": 4,
        "unlabelled_batch": 4,
        "evaluate_every": 5,
        "checkpoint_every": 2,
        "server.optimizer": "adam",
        "server.learning_rate": 0.01,
        "server.ema": 0.9,
        "feddure.f_reg_memory": "client",
        "engine.device": "cpu",
    }
    changes = [text for key, value in sets.items() for text in ("--set", f"{key}={value}")]
    return ["--preset", "demo", "--method", "feddure", "--rounds", str(rounds), *changes]


def start(folder: Path, rounds: int) -> subprocess.Popen:
    """The run as a process of its own, from wherever the folder stands."""
    log = (folder.parent / f"{folder.name}.log").open("ab")
    # One thread: the order of sums, and with it the last bit, must not depend on the machine's load.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [*COMMAND, *options(rounds), "--out", str(folder), "--resume"]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def rounds_done(folder: Path) -> int:
    """Lines of the run's record."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rounds(process: subprocess.Popen, folder: Path, wanted: int) -> None:
    """Return when so many rounds are on disk, or when the process has ended."""
    deadline = time.monotonic() + PATIENCE
    while rounds_done(folder) < wanted and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"{folder}: no new round for {PATIENCE:.0f} seconds")
        time.sleep(0.002)


def kill_once(folder: Path, rounds: int, chance: random.Random, number: int, startup: float) -> str:
    """Start the run, kill it at a random moment, and say when that was."""
    before = rounds_done(folder)
    process = start(folder, rounds)
    if number % 2 == 0:
        moment = chance.uniform(0, startup)
        time.sleep(moment)
        when = f"{moment:.2f} s after its start"
    else:
        wait_for_rounds(process, folder, before + chance.randint(1, MOST_ROUNDS))
        time.sleep(chance.uniform(0, 0.03))
        when = f"with {rounds_done(folder)} rounds on disk"
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"the run ended by itself with exit code {process.returncode}; see {folder}.log")
    return when


def differences(one: Path, other: Path) -> list[str]:
    """Files that are not the same in both folders."""
    return [name for name in FILES if (one / name).read_bytes() != (other / name).read_bytes()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="how often to kill the run")
    parser.add_argument("--seed", type=int, default=None, help="seed of the moments; default: a new one")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    chance = random.Random(seed)
    rounds = 4 * MOST_ROUNDS * arguments.times + 10
    work = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    whole, killed = work / "whole", work / "killed"

    print(f"{arguments.times} kills in {rounds} rounds, seed {seed}, in {work}")
    began = time.monotonic()
    process = start(whole, rounds)
    wait_for_rounds(process, whole, 1)
    startup = time.monotonic() - began
    if process.wait() != 0:
        raise SystemExit(f"the uninterrupted run failed; see {whole}.log")
    for number in range(arguments.times):
        when = kill_once(killed, rounds, chance, number, startup)
        print(f"kill {number + 1}: {when}")
    if start(killed, rounds).wait() != 0:
        raise SystemExit(f"the last resume failed; see {killed}.log")

    different = differences(whole, killed)
    if different:
        print(f"DIFFERENT after {arguments.times} kills: {', '.join(different)}; both are kept in {work}")
        return 1
    print(f"identical after {arguments.times} kills: {', '.join(FILES)}")
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
