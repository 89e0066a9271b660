"""`--jobs N`: the same command in N equal processes, with no protocol but the store, or the folders of runs.

Each claims cells as if it had been started by hand. The command that starts them waits, shows what the store says,
passes Ctrl-C on, and names the cells of those that died.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from feddure.simulation.runs import stopping
from feddure.studies.grid.runner import LOST, GridStopped, Load, measure, new_command
from feddure.studies.grid.store import Cell, Store

JOB = "FEDDURE_JOB"
"""In the environment of such a process: the command that has started it."""

_POLL_SECONDS = 0.2


def is_job() -> bool:
    """Whether this process is one of several that a command has started."""
    return JOB in os.environ


def work(cells: Sequence[Cell], store: Store, load: Load, track: Sequence[str] = ()) -> None:
    """What such a process does; it ends with its parent, and keeps what it has under way."""
    end_with_parent()
    measure(cells, store, load, command=os.environ[JOB], track=track)


def end_with_parent() -> None:
    """Let this process stop, as by Ctrl-C, once the command that has started it is gone."""
    parent = int(os.environ[JOB].partition("-")[0])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def measure_in_jobs(
    cells: Sequence[Cell],
    store: Store,
    jobs: int,
    refresh: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[int]:
    """Start this many processes of the command that this process is, and wait for them.

    A cell whose process died is a failure, which the other processes leave alone. `say` is told once what they print.
    Returns the exit codes of those that ended early.
    """
    command = new_command()

    def gone(pid: int) -> None:
        _name_lost(pid, command, cells, store)

    return run_in_jobs(command, jobs, sys.argv[1:], refresh, say, gone)


def run_in_jobs(
    command: str,
    jobs: int,
    arguments: Sequence[str],
    refresh: Callable[[], None],
    say: Callable[[str], None],
    gone: Callable[[int], None] = lambda pid: None,
) -> list[int]:
    """Start this many processes with the same arguments and wait for them; `gone` is told of each that has ended."""
    said: set[str] = set()
    with stopping() as stop:
        processes = [_start(command, jobs, arguments) for _ in range(jobs)]

        def listen(process: subprocess.Popen[str]) -> None:
            assert process.stderr is not None
            for line in process.stderr:
                if line not in said and not stop():
                    said.add(line)
                    say(line.rstrip("\n"))

        listeners = [threading.Thread(target=listen, args=(process,), daemon=True) for process in processes]
        for listener in listeners:
            listener.start()
        asked = False
        running = list(processes)
        try:
            while running:
                if stop() and not asked:
                    asked = True
                    for process in running:
                        process.terminate()
                for process in [one for one in running if one.poll() is not None]:
                    running.remove(process)
                    if not asked:
                        gone(process.pid)
                refresh()
                time.sleep(_POLL_SECONDS)
        finally:
            for process in running:
                process.terminate()
        for listener in listeners:
            listener.join(timeout=10)  # a process of the user's own may hold the pipe
    refresh()
    if stop():
        raise GridStopped(stop.signal)
    return [process.returncode for process in processes if process.returncode != 0]


def _start(command: str, jobs: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    about = os.environ | {JOB: command, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if not torch.cuda.is_available():
        about["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "feddure", *arguments],
        env=about,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C is the parent's to pass on
    )


def _name_lost(pid: int, command: str, cells: Sequence[Cell], store: Store) -> None:
    """A process is gone: if it has left a cell as it was, as one does that is killed, that cell has failed."""
    by_hash = {cell.hash: cell for cell in cells}
    for name, noted in store.notes().items():
        if (noted.command, noted.pid) == (command, pid) and not store.has(by_hash[name]):
            store.fail(by_hash[name], LOST)
