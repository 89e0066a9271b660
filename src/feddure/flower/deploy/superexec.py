"""Flower's SuperExec, whose programs end with it, and whose tokens no other user sees.

With a token one can act as that program at the SuperLink. Flower passes it as an argument, which every user of the
machine can read; here it comes in an open file that has no name.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from feddure.flower.deploy.processes import ending_with_parent


def start_hiding_token(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a program of Flower's that ends with this process; its `--token` becomes a `--token-file`."""
    position = list(command).index("--token")
    with tempfile.TemporaryFile() as file:
        file.write(command[position + 1].encode())
        file.seek(0)
        hidden = ["--token-file", f"/dev/fd/{file.fileno()}"]
        # A run's program asks itself to end when this process is gone, and then waits for a server for a minute.
        ending = ending_with_parent([*command[:position], *hidden, *command[position + 2 :]], signal.SIGKILL)
        return subprocess.Popen(ending, pass_fds=[file.fileno()], **options)


def main() -> None:
    """`flower-superexec` with the same options."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    if os.name == "posix":  # elsewhere a process inherits no open file
        hiding = SimpleNamespace(Popen=start_hiding_token, DEVNULL=subprocess_executor.subprocess.DEVNULL)
        subprocess_executor.subprocess = hiding  # type: ignore[assignment]
    flower_superexec()


if __name__ == "__main__":
    main()
