"""Many image files at once, in processes of their own.

Threads would not do: for small images the time goes into Python, where only one thread runs at a time. The
processes are plain programs that receive paths and send pixels, so a script that loads data needs no
`__main__` guard.
"""

import contextlib
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from feddure.data.sources import images as images_program
from feddure.data.sources.progress import bar
from feddure.errors import DataError

FILES_PER_PROCESS = 32
"""A process is worth starting for this many files."""


@dataclass(frozen=True)
class Rule:
    """What every image becomes; see `images.read`."""

    size: int
    channels: int
    resize: bool = True


def decode_all(paths: Sequence[Path], rule: Rule, description: str, progress: bool = False) -> np.ndarray:
    """All images as uint8 [images, size, size, channels], in the order of `paths`."""
    images = np.empty((len(paths), rule.size, rule.size, rule.channels), dtype=np.uint8)
    processes = min(_cores(), len(paths) // FILES_PER_PROCESS)
    with bar(description, len(paths), progress) as advance:
        if processes > 1:
            _in_processes(paths, rule, images, processes, advance)
        else:
            _in_this_process(paths, rule, images, advance)
    return images


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_this_process(paths: Sequence[Path], rule: Rule, images: np.ndarray, advance: Callable[[int], None]) -> None:
    for position, path in enumerate(paths):
        try:
            images[position] = images_program.read(path, **asdict(rule))
        except images_program.Unreadable as problem:
            raise DataError(f"{path}: {problem}") from None
        advance(1)


def _in_processes(
    paths: Sequence[Path], rule: Rule, images: np.ndarray, count: int, advance: Callable[[int], None]
) -> None:
    # -P keeps the folder of the program, whose modules are not meant to be imported bare, off the path.
    command = [sys.executable, "-P", images_program.__file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    cuts = [len(paths) * number // count for number in range(count + 1)]
    processes: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(count) as threads:
        try:
            followed = []
            for start, stop in itertools.pairwise(cuts):
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                processes.append(process)
                followed.append(threads.submit(_follow, process, paths[start:stop], rule, images[start:stop], advance))
            for future in as_completed(followed):
                future.result()
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _follow(
    process: subprocess.Popen[bytes],
    paths: Sequence[Path],
    rule: Rule,
    images: np.ndarray,
    advance: Callable[[int], None],
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as answers:
        # A process that is gone already is found out below, where its first answer is missing.
        with contextlib.suppress(BrokenPipeError), process.stdin as orders:
            orders.write(json.dumps({"rule": asdict(rule), "paths": [str(path) for path in paths]}).encode())
        for path, image in zip(paths, images, strict=True):
            mark = answers.read(1)
            if mark == images_program.BAD:
                (length,) = struct.unpack("<I", answers.read(4))
                raise DataError(f"{path}: {answers.read(length).decode()}")
            pixels = answers.read(image.nbytes)
            if mark != images_program.GOOD or len(pixels) != image.nbytes:
                raise DataError(f"{path}: the process that decoded it ended early; is memory short?")
            image[:] = np.frombuffer(pixels, dtype=np.uint8).reshape(image.shape)
            advance(1)
