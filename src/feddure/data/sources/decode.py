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
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from feddure.data.sources import images as images_program
from feddure.data.sources.progress import bar
from feddure.errors import DataError, FeddureWarning

MOST_PROBLEMS = 20
"""Files that an error names; of more it says how many there are."""

FILES_PER_PROCESS = 32
"""A process is worth starting for this many files."""


@dataclass(frozen=True)
class Rule:
    """What every image becomes; see `images.read`."""

    size: int
    channels: int
    resize: bool = True
    depth: int = images_program.FULL_DEPTH


@dataclass(frozen=True)
class _Work:
    """Files to decode, and where what is found in them goes."""

    paths: Sequence[Path]
    rule: Rule
    images: np.ndarray
    peaks: np.ndarray
    problems: dict[Path, str]
    advance: Callable[[int], None]

    def part(self, start: int, stop: int) -> "_Work":
        piece = slice(start, stop)
        return replace(self, paths=self.paths[piece], images=self.images[piece], peaks=self.peaks[piece])


def decode_all(paths: Sequence[Path], rule: Rule, description: str, progress: bool = False) -> np.ndarray:
    """All images as uint8 [images, size, size, channels], in the order of `paths`; a warning if they look too dark."""
    images = np.empty((len(paths), rule.size, rule.size, rule.channels), dtype=np.uint8)
    peaks = np.zeros(len(paths), dtype=np.uint16)
    problems: dict[Path, str] = {}
    processes = min(_cores(), len(paths) // FILES_PER_PROCESS)
    with bar(description, len(paths), progress) as advance:
        work = _Work(paths, rule, images, peaks, problems, advance)
        if processes > 1:
            _in_processes(work, processes)
        else:
            _in_this_process(work)
    if problems:
        found = [f"{path}: {problems[path]}" for path in paths if path in problems]
        more = [f"and {len(found) - MOST_PROBLEMS:,} more files"] if len(found) > MOST_PROBLEMS else []
        raise DataError("\n".join([*found[:MOST_PROBLEMS], *more]))
    _note_narrow(peaks, rule)
    return images


def _note_narrow(peaks: np.ndarray, rule: Rule) -> None:
    """Say so where 16-bit files look like images of fewer bits: unscaled they are nearly black."""
    narrow = peaks[(peaks > 0) & (peaks < 2**images_program.FULL_DEPTH // 4)]
    if rule.depth < images_program.FULL_DEPTH or not len(narrow):
        return
    bits = int(narrow.max()).bit_length()
    bits += bits % 2  # detectors have 10, 12 or 14
    warnings.warn(
        f"{len(narrow):,} 16-bit image(s) use less than a quarter of the range (values up to {narrow.max():,} of "
        f"65,535) and become nearly black: were they {bits}-bit? Say so with folder:PATH?depth={bits}, or convert them",
        FeddureWarning,
        stacklevel=3,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_this_process(work: _Work) -> None:
    for position, path in enumerate(work.paths):
        try:
            read = images_program.read_with_peak(path, **asdict(work.rule))
            work.images[position], work.peaks[position] = read
        except images_program.Unreadable as problem:
            work.problems[path] = str(problem)
        work.advance(1)


def _in_processes(work: _Work, count: int) -> None:
    # -P keeps the folder of the program, whose modules are not meant to be imported bare, off the path.
    command = [sys.executable, "-P", images_program.__file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    cuts = [len(work.paths) * number // count for number in range(count + 1)]
    processes: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(count) as threads:
        try:
            followed = []
            for start, stop in itertools.pairwise(cuts):
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                processes.append(process)
                followed.append(threads.submit(_follow, process, work.part(start, stop)))
            for future in as_completed(followed):
                future.result()
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _follow(process: subprocess.Popen[bytes], work: _Work) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as answers:
        # A process that is gone already is found out below, where its first answer is missing.
        with contextlib.suppress(BrokenPipeError), process.stdin as orders:
            orders.write(json.dumps({"rule": asdict(work.rule), "paths": [str(path) for path in work.paths]}).encode())
        for position, (path, image) in enumerate(zip(work.paths, work.images, strict=True)):
            mark = answers.read(1)
            if mark == images_program.BAD:
                (length,) = struct.unpack("<I", answers.read(4))
                work.problems[path] = answers.read(length).decode()
                work.advance(1)
                continue
            peak, pixels = answers.read(2), answers.read(image.nbytes)
            if mark != images_program.GOOD or len(pixels) != image.nbytes:
                raise DataError(f"{path}: the process that decoded it ended early; is memory short?")
            (work.peaks[position],) = struct.unpack("<H", peak)
            image[:] = np.frombuffer(pixels, dtype=np.uint8).reshape(image.shape)
            work.advance(1)
