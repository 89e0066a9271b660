"""What a result says about where it comes from."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import feddure
from feddure import environment

MAIN = str(Path(feddure.__file__).with_name("__main__.py"))


@pytest.mark.parametrize(
    ("called", "command"),
    [
        (["/usr/bin/feddure", "run", "--out", "my runs"], "feddure run --out 'my runs'"),
        ([MAIN, "theory"], "feddure theory"),  # python -m feddure
        (["somewhere/else/__main__.py", "--fast"], "__main__.py --fast"),
    ],
)
def test_the_command_can_be_given_to_a_shell_again(monkeypatch, called, command):
    monkeypatch.setattr(sys, "argv", called)
    assert environment.describe()["command"] == command


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_an_engine_on_a_cpu_keeps_the_memory_of_tensors():
    """Tensors of sizes that were there before take pages that are there."""
    code = """
import resource, torch
from feddure.config import EngineOptions
from feddure.simulation.engine import Engine
Engine(EngineOptions(device="cpu"))
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        [torch.ones(5_000_000) for _ in range(10)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(3))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) < 30_000  # three times 200 MB are 146,484 pages
