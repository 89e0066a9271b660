"""What a result was measured on: hardware, versions, commit, command."""

import ctypes
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from feddure.version import VERSION

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of them
_MEMORY_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


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


def memory() -> int:
    """Bytes of memory that this machine has, or that its container may use."""
    found = psutil.virtual_memory().total
    for limit in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # "max" is none
            found = min(found, int(limit.read_text()))
    return found


def began_at(pid: Any) -> float | None:
    """When a living process began; its number may have been another's before. None where it has ended."""
    with suppress(psutil.Error, ValueError, OverflowError):
        process = psutil.Process(pid) if isinstance(pid, int) else None
        return process.create_time() if process and process.status() != psutil.STATUS_ZOMBIE else None
    return None


def keep_freed_memory() -> None:
    """Let the C library keep what tensors gave back for the next ones: a fresh page costs more than to fill it."""
    with suppress(AttributeError, OSError, TypeError):  # it is not glibc
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 2**25)  # the largest it takes
        library.mallopt(_TRIM_THRESHOLD, 2**29)


def give_back_freed_memory() -> None:
    """The opposite, once: what others may have, and what is counted as free."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
