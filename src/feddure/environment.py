"""What a result was measured on: hardware, versions, commit, command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from feddure.version import VERSION


def describe() -> dict[str, str | int | None]:
    """This machine and this installation, as a flat record."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "feddure": VERSION,
        "commit": commit(),
        "command": command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
    }


def command() -> str:
    """What was called, as a shell would take it again."""
    program = Path(sys.argv[0])
    name = "feddure" if program == Path(__file__).with_name("__main__.py") else program.name
    return shlex.join([name, *sys.argv[1:]])


def commit() -> str | None:
    """The commit of the source tree this package runs from; elsewhere, what FEDDURE_COMMIT says."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return os.environ.get("FEDDURE_COMMIT")


def computes_bf16() -> bool:
    """Whether this CPU multiplies in bf16; others only imitate it, slower than single precision."""
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
