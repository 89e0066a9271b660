"""Waiting for what other processes do."""

import subprocess
import time
from collections.abc import Callable
from typing import Any


def until(ready: Callable[[], Any], process: subprocess.Popen | None = None, seconds: float = 120.0) -> Any:
    """Ask until the answer is true, and give it; fails after a while, or when `process` has ended."""
    limit = time.monotonic() + seconds
    while not (found := ready()):
        assert process is None or process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.1)
    return found
