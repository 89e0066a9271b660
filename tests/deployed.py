"""A real federation on this machine's loopback address: `feddure federate` server, sites and runs, in processes of
their own. Everything that is started here ends with the `Deployed` that started it, whatever happens."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

import feddure
from feddure.flower.app.description import Description, ServerAddress
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.processes import Process, free_port

SOURCE = Path(feddure.__file__).resolve().parents[1]


class Deployed:
    """A federation's processes by name; use it in a `with` statement."""

    def __init__(self, root: Path, description: Description, module_folder: Path | None = None):
        """Modules in `module_folder` can be imported by the federation's processes."""
        address = ServerAddress(host="127.0.0.1", port=free_port())
        self.folder = initialise(
            root / "federation", description.model_copy(update={"server": address}), control_port=free_port()
        )
        self.logs = root / "logs"
        self.logs.mkdir()
        found = [str(SOURCE), *([str(module_folder)] if module_folder else []), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, found))}
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> "Deployed":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:  # the last one first: sites leave before their server ends
            for process in self.processes.values():
                ending.callback(process.stop)
            for name, process in self.processes.items():
                if name != "server":
                    process.terminate()  # side by side

    def start_server(self) -> None:
        """The server, once it takes sites."""
        process = self.start("server", "server", self.folder.root)
        self.wait_for(lambda: "ready: " in process.log_tail(), 90, "the server to be ready")

    def start_site(self, name: str, images: Path, *options: Any) -> None:
        """A site with its images, which takes part in every run; its log has Flower's lines too."""
        usual = ("--data", images, "--verbose", "--approve", "always")
        self.start(name, "site", self.folder.root, name, *usual, *options)

    def start_run(self, name: str, out: Path, *options: Any) -> Process:
        """A run into a folder."""
        return self.start(name, "run", self.folder.root, "--out", out, *options)

    def start(self, name: str, *words: Any) -> Process:
        """A command of `feddure federate`, its output in `<name>.log`."""
        command = [sys.executable, "-m", "feddure", "federate", *map(str, words)]
        self.processes[name] = Process(command, self.environment, self.logs / f"{name}.log")
        return self.processes[name]

    def kill(self, name: str) -> None:
        """End a process and all that it started, as a loss of power would."""
        process = self.processes.pop(name)
        for each in [psutil.Process(process.popen.pid), *below(process)]:
            each.kill()
        process.stop()

    def wait_for(self, ready: Callable[[], Any], seconds: float, what: str) -> Any:
        """Ask until the answer is true; fails after a while with the end of every log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := ready():
                return found
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds:g} seconds for {what}\n{self.tails()}")

    def log(self, name: str) -> str:
        """All that a process wrote."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def tails(self) -> str:
        """The end of every process's output."""
        return "\n".join(f"--- {file.name}\n{self.log(file.stem)[-2500:]}" for file in sorted(self.logs.iterdir()))


def below(process: Process) -> list[psutil.Process]:
    """All that a process has started, also in sessions of their own."""
    return psutil.Process(process.popen.pid).children(recursive=True)


def superexec(process: Process) -> psutil.Process | None:
    """The SuperExec that a server or a site has started."""
    for each in psutil.Process(process.popen.pid).children():
        if each.status() != psutil.STATUS_ZOMBIE and any("superexec" in word for word in each.cmdline()):
            return each
    return None
