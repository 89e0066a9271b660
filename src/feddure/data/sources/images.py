"""Image files as squares of 8-bit pixels: one, or many in processes of their own.

The rule: the EXIF orientation is applied; 16-bit grey is scaled to 8 bits, white being 2**depth - 1 (of 16-bit
colour Pillow keeps the high bytes); transparency is laid over black; palettes, CMYK and the rest become RGB, or
grey for one channel; the shorter side is resized to `size` with Pillow's bicubic filter, which widens with the
reduction so that no pixel is skipped; and the middle square is cut out. An image that is `size` by `size` already
keeps its pixels. An animation counts as its first frame.

This file is also the program of a decoding process, which receives paths and sends pixels: a plain program, so that
a script that loads data needs no `__main__` guard. It imports hardly anything of the package, so that it starts fast.
Threads would not do: for small images the time goes into Python, where only one thread runs at a time.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from feddure.errors import DataError, FeddureWarning

LEAST_DEPTH = 8
FULL_DEPTH = 16
"""Bits of a grey value in a file of more than 8 bits, unless the user says that fewer are in use."""

MOST_PROBLEMS = 20
"""Files that an error names; of more it says how many there are."""

FILES_PER_PROCESS = 32
"""A process is worth starting for this many files."""

_GOOD, _BAD = b"+", b"-"
# How a decoding process marks what follows: the brightest value and pixels, or the length and text of a problem.


class Unreadable(ValueError):
    """Why a file gives no image; the text goes on from "<path>: "."""


@dataclass(frozen=True)
class Rule:
    """What every image becomes; without `resize` any other size is an error."""

    size: int
    channels: int
    resize: bool = True
    depth: int = FULL_DEPTH


def read(path: str | PathLike[str], rule: Rule) -> np.ndarray:
    """The image as uint8 [size, size, channels]."""
    return _read(path, rule)[0]


def decode_all(paths: Sequence[Path], rule: Rule, description: str, progress: bool = False) -> np.ndarray:
    """All images as uint8 [images, size, size, channels], in the order of `paths`; a warning if they look too dark."""
    from feddure.data.sources.base import bar  # not above: a decoding process has no use for it

    images = np.empty((len(paths), rule.size, rule.size, rule.channels), dtype=np.uint8)
    peaks = np.zeros(len(paths), dtype=np.uint16)
    problems: dict[int, str] = {}
    count = min(_cores(), len(paths) // FILES_PER_PROCESS)

    def take(start: int, results: Iterable[Result]) -> None:
        for position, result in enumerate(results, start):
            if isinstance(result, str):
                problems[position] = result
            else:
                images[position], peaks[position] = result
            advance(1)

    with bar(description, len(paths), progress) as advance:
        if count < 2:
            take(0, _decode(paths, rule))
        else:
            starts = [len(paths) * number // count for number in range(count)]
            parts = [paths[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]
            with ThreadPoolExecutor(count) as threads, _processes(count) as processes:
                answers = map(_ask, processes, parts, [rule] * count)
                for future in as_completed(list(map(threads.submit, [take] * count, starts, answers))):
                    future.result()
    if problems:
        found = [f"{paths[position]}: {problems[position]}" for position in sorted(problems)]
        more = [f"and {len(found) - MOST_PROBLEMS:,} more files"] if len(found) > MOST_PROBLEMS else []
        raise DataError("\n".join([*found[:MOST_PROBLEMS], *more]))
    _note_narrow(peaks, rule)
    return images


Result = tuple[np.ndarray, int] | str
"""Of a file, its pixels and the brightest value of a grey file of more than 8 bits (0 for any other); or a problem."""


def _decode(paths: Iterable[str | PathLike[str]], rule: Rule) -> Iterator[Result]:
    for path in paths:
        try:
            yield _read(path, rule)
        except Unreadable as problem:
            yield str(problem)


def _read(path: str | PathLike[str], rule: Rule) -> tuple[np.ndarray, int]:
    size = rule.size
    try:
        with Image.open(path) as file:
            ImageOps.exif_transpose(file, in_place=True)
            image, peak = _eight_bits(file, rule.depth)
            image = _flat(image, "RGB" if rule.channels == 3 else "L")
            if image.size != (size, size):
                if not rule.resize:
                    raise Unreadable(f"is {image.width}×{image.height} pixels, expected {size}×{size}")
                image = _square(image, size)
            return np.asarray(image).reshape(size, size, rule.channels), peak
    except Unreadable:
        raise
    except Image.UnidentifiedImageError:
        raise Unreadable("is not an image that Pillow can read; move it away or convert it to PNG") from None
    except Exception as error:  # Pillow's many formats fail in many ways on a damaged file
        raise Unreadable(f"cannot be decoded ({type(error).__name__}: {error}); the file is damaged") from None


def _eight_bits(image: Image.Image, depth: int) -> tuple[Image.Image, int]:
    if image.mode == "F":
        raise Unreadable("has floating-point pixels, whose range nobody knows; convert it to 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image, 0
    values = np.asarray(image).astype(np.int64)
    white, peak = 2**depth - 1, int(values.max())
    if values.min() < 0 or peak > 65535:
        raise Unreadable("has pixels of more than 16 bits; convert it to 8 or 16 bits")
    if peak > white:
        raise Unreadable(f"has pixels up to {peak}, but depth={depth} was given, which ends at {white}")
    return Image.fromarray(((2 * 255 * values + white) // (2 * white)).astype(np.uint8)), peak


def _flat(image: Image.Image, mode: str) -> Image.Image:
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return image if image.mode == mode else image.convert(mode)


def _square(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    shorter = min(width, height)
    width, height = round(width * size / shorter), round(height * size / shorter)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _note_narrow(peaks: np.ndarray, rule: Rule) -> None:
    """Say so where 16-bit files look like images of fewer bits: unscaled they are nearly black."""
    narrow = peaks[(peaks > 0) & (peaks < 2**FULL_DEPTH // 4)]
    if rule.depth < FULL_DEPTH or not len(narrow):
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


@contextlib.contextmanager
def _processes(count: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Decoding processes, which are gone when the block ends, however it does."""
    # -P keeps the folder of the program, whose modules are not meant to be imported bare, off the path.
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def _ask(process: "subprocess.Popen[bytes]", paths: Sequence[Path], rule: Rule) -> Iterator[Result]:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as answers:
        # A process that is gone already is found out below, where its first answer is missing.
        with contextlib.suppress(BrokenPipeError), process.stdin as asked:
            asked.write(json.dumps({"rule": asdict(rule), "paths": [str(path) for path in paths]}).encode())
        shape = (rule.size, rule.size, rule.channels)
        for path in paths:
            mark, number = answers.read(1), answers.read(4)
            length = int.from_bytes(number, "little") if mark == _BAD else int(np.prod(shape))
            content = answers.read(length)
            if mark not in (_GOOD, _BAD) or len(content) != length:
                raise DataError(f"{path}: the process that decoded it ended early; is memory short?")
            if mark == _BAD:
                yield content.decode()
            else:
                yield np.frombuffer(content, np.uint8).reshape(shape), int.from_bytes(number, "little")


def _serve(asked: dict[str, Any]) -> None:
    """Decode the images that `_ask` names onto standard output."""
    for result in _decode(asked["paths"], Rule(**asked["rule"])):
        if isinstance(result, str):
            text = result.encode()
            sys.stdout.buffer.write(_BAD + struct.pack("<I", len(text)) + text)
        else:
            pixels, peak = result
            sys.stdout.buffer.write(_GOOD + struct.pack("<I", peak) + pixels.tobytes())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    _serve(json.load(sys.stdin))
