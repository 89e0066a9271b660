"""A real federation on this machine's loopback address: a SuperLink and SuperNodes with TLS and node authentication.

Everything that is started here ends with the `Loopback` that started it, whatever happens.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from feddure.flower.deploy import certificates

CONNECTION = "loopback"
ENDED = ("finished",)
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
PROGRAMS = Path(sys.executable).parent


class Loopback:
    """A federation's processes; use it in a `with` statement."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.environment = os.environ | QUIET | {"FLWR_HOME": str(folder / "flower")}
        self.environment["PATH"] = os.pathsep.join([str(PROGRAMS), self.environment.get("PATH", "")])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        authority = certificates.make_authority("loopback")
        key, certificate = certificates.make_server("127.0.0.1", authority)
        certificates.write_certificate(folder / "ca.crt", authority[1])
        certificates.write_certificate(folder / "server.crt", certificate)
        certificates.write_private_key(folder / "server.key", key)
        (folder / "flower").mkdir(exist_ok=True)
        (folder / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def __enter__(self) -> "Loopback":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended then too
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave processes behind
        try:
            for name in list(self.processes):
                self.kill(name)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    # --- processes -----------------------------------------------------------------------------------
    def start_superlink(self) -> None:
        """The SuperLink; its state is in a file, so that it can be killed and started again."""
        files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        protection = [word for name, file in files.items() for word in (f"--ssl-{name}", str(self.folder / file))]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db")]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.start("superlink", ["flower-superlink", *protection, *place, *options])
        self.wait_for(self.answers, 60, "the SuperLink to answer")

    def start_node(self, name: str, node: Mapping[str, Any], key: bool = True, authority: Path | None = None) -> None:
        """A SuperNode with this configuration, with its own key (unless told otherwise) and its own home."""
        words = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"]
        words += ["--port", str(free_port()), "--root-certificates", str(authority or self.folder / "ca.crt")]
        if key:
            words += ["--auth-supernode-private-key", str(self.key(name))]
        pairs = " ".join(
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in node.items()
        )
        self.start(name, [*words, "--node-config", pairs])

    def start(self, name: str, words: list[str]) -> None:
        """A process of this name, in a group of its own, with its output in `<name>.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(PROGRAMS / words[0]), *words[1:]],
                env=self.environment
                | ({} if name == "superlink" else {"FLWR_HOME": str(self.folder / f"home-{name}")}),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """End a process and all that it started, as a loss of power would."""
        process = self.processes.pop(name)
        for pid in _below(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(20)

    # --- what the operator does ----------------------------------------------------------------------
    def key(self, name: str) -> Path:
        """A node's private key, made when first asked for."""
        path = self.folder / f"{name}.key"
        if not path.exists():
            key = certificates.make_node_key()
            certificates.write_private_key(path, key, ssh=True)
            path.with_suffix(".pub").write_bytes(certificates.public_line(key, name))
        return path

    def register(self, name: str) -> None:
        """Tell the SuperLink a node's public key."""
        self.flwr("supernode", "register", str(self.key(name).with_suffix(".pub")), CONNECTION, "--name", name)

    def run(self, app: Path, **changes: Any) -> str:
        """Start a run; returns its number."""
        pairs = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in changes.items())
        return str(self.flwr("run", str(app), CONNECTION, *(["--run-config", pairs] if pairs else []))["run-id"])

    def state(self, run: str) -> str:
        """The state of a run: `finished:completed` is how it should end."""
        found = self.flwr("list", CONNECTION, "--run-id", run)
        return str(found["runs"][0]["status"])

    def wait_until_ended(self, run: str, seconds: float) -> str:
        """The state in which a run ended."""
        return self.wait_for(lambda: s if (s := self.state(run)).startswith(ENDED) else "", seconds, "the run to end")

    def log(self, run: str) -> str:
        """What a run's server said."""
        words = [str(PROGRAMS / "flwr"), "log", run, CONNECTION, "--show"]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60).stdout

    def flwr(self, *words: str) -> dict[str, Any]:
        """What one of Flower's commands answers."""
        command = [str(PROGRAMS / "flwr"), *words, "--format", "json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = {"success": False}
        if not found.get("success"):
            raise AssertionError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}")
        return found

    def answers(self) -> bool:
        """Whether the SuperLink takes connections."""
        with socket.socket() as connection:
            connection.settimeout(1)
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_for(self, ready: Callable[[], Any], seconds: float, what: str) -> Any:
        """Ask until the answer is true; fails after a while with everybody's last words."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := ready():
                return found
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds:g} seconds for {what}\n{self.logs()}")

    def logs(self) -> str:
        """The end of every process's output."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2500:]}" for file in files)


def _below(pid: int) -> list[int]:
    """A process and all that it started, also those in sessions of their own."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
