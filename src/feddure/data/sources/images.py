"""Image files as squares of 8-bit pixels: one, or many in processes of their own.

The rule: the EXIF orientation is applied; 16-bit grey is scaled to 8 bits, white being 2**depth - 1 (of 16-bit
colour Pillow keeps the high bytes); transparency is laid over black; palettes, CMYK and the rest become RGB, or
grey for one channel; the shorter side is resized to `size` with Pillow's bicubic filter, which widens with the
reduction so that no pixel is skipped; and the middle square is cut out. An image that is `size` by `size` already
keeps its pixels. An animation counts as its first frame; of an image that is more than 8 times as long as wide, its
middle part of that length counts.

Files may come from anybody: only regular files of common formats are opened, and limits on pixels, bytes and JPEG's
passes bound the memory and the time that one can take.

This file is also the program of a decoding process, which receives paths and sends pixels: a plain program, so that
a script that loads data needs no `__main__` guard. It imports hardly anything of the package, so that it starts fast.
Threads would not do: they wait for each other in Python, where small images spend their time.
"""

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from feddure.errors import DataError, FeddureWarning
from feddure.files import open_regular, shown

ENDINGS = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".bmp", ".gif", ".webp")
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"II*\0", b"MM\0*", b"BM", b"GIF8", b"RIFF")

LEAST_DEPTH = 8
FULL_DEPTH = 16
"""Bits of a grey value in a file of more than 8 bits, unless the user says that fewer are in use."""

MOST_PROBLEMS = 20
"""Files that an error names; of more it says how many there are."""

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP")
"""What is decoded; Pillow knows many more, among them EPS, which is a program for Ghostscript."""
MOST_PIXELS = 2**26
"""Of an image: 8192 × 8192. The most that one takes is then about 1.3 GB and a few seconds."""
MOST_BYTES = 2**30
"""Of a file."""
MOST_SCANS = 32
"""Passes over a progressive JPEG, of which cameras and programs make about ten; each goes through all its pixels."""
LONGEST = 8
"""Sides: the length of what is resized of a long image; a thin one would become very large."""

FILES_PER_PROCESS = 64
"""A process is worth starting for this many files."""


class Unreadable(ValueError):
    """Why a file gives no image; the text goes on from "<path>: "."""


@dataclass(frozen=True)
class Rule:
    """What every image becomes; without `resize` any other size is an error."""

    size: int
    channels: int
    resize: bool = True
    depth: int = FULL_DEPTH


def read(path: str | PathLike[str], rule: Rule) -> tuple[np.ndarray, int]:
    """The image as uint8 [size, size, channels], and its brightest value for `note_narrow`."""
    pixels, peak, _, _ = _read(path, rule)
    return pixels, peak


@dataclass(frozen=True)
class Decoded:
    """Files as pixels, in their order; the pixels of one with a problem mean nothing."""

    images: np.ndarray  # uint8 [files, size, size, channels]
    problems: dict[int, str]  # why a file gives no image, by its position
    sizes: list[tuple[int, int]]  # width and height of each file
    modes: list[str]  # Pillow's
    depth: int | None = None  # bits that 16-bit files look like, where unscaled they are nearly black


def looks_like_image(path: str | PathLike[str]) -> bool:
    """Whether a file's name, or for an unusual one its first bytes, are an image's."""
    if Path(path).suffix.lower() in ENDINGS:
        return True
    try:
        with _open(path) as file:
            return file.read(4).startswith(_STARTS)
    except (Unreadable, OSError):
        return False


def headers(paths: Iterable[str | PathLike[str]]) -> Iterator[tuple[tuple[int, int], str]]:
    """Width and height, and mode, of each file that begins as an image; nothing is decoded."""
    for path in paths:
        with suppress(Exception), _open(path) as content:  # `decode` says what is wrong with it
            with Image.open(content, formats=FORMATS) as file:
                found = file.size, file.mode
            yield found


def decode(paths: Sequence[Path], rule: Rule, description: str, progress: bool = False) -> Decoded:
    """All files, in processes of their own where there are many; a warning if they look too dark."""
    from feddure.data.sources.base import bar  # not above: a decoding process has no use for it

    found = Decoded(
        np.zeros((len(paths), rule.size, rule.size, rule.channels), dtype=np.uint8),
        {},
        [(0, 0)] * len(paths),
        [""] * len(paths),
    )
    peaks = np.zeros(len(paths), dtype=np.uint16)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = max(FILES_PER_PROCESS, -(-len(paths) // (4 * cores)))  # a few parts a core, or the bar would stand still
    parts = [paths[start : start + size] for start in range(0, len(paths), size)]
    work = _decode if len(parts) < 2 else _decode_aside
    with bar(description, len(paths), progress) as advance, ThreadPoolExecutor(cores) as threads:
        try:
            results = (result for part in threads.map(work, parts, [rule] * len(parts)) for result in part)
            for position, result in enumerate(results):
                if isinstance(result, str):
                    found.problems[position] = result
                else:
                    found.images[position], peaks[position], found.sizes[position], found.modes[position] = result
                advance(1)
        finally:
            threads.shutdown(cancel_futures=True)  # or Ctrl-C would wait for every part
    depth = note_narrow(paths, peaks, rule, "Say so with folder:PATH?depth={bits}, or convert them")
    return replace(found, depth=depth)


Result = tuple[np.ndarray, int, tuple[int, int], str] | str
"""Of a file: its pixels, the brightest value of a grey file of more than 8 bits (0 for any other), its size and mode;
or a problem."""


def _decode(paths: Iterable[str | PathLike[str]], rule: Rule) -> Iterator[Result]:
    for path in paths:
        try:
            yield _read(path, rule)
        except Unreadable as problem:
            yield str(problem)


def _read(path: str | PathLike[str], rule: Rule) -> tuple[np.ndarray, int, tuple[int, int], str]:
    size = rule.size
    try:
        with _open(path) as content, Image.open(content, formats=FORMATS) as file:
            _expect_small(file, content)
            ImageOps.exif_transpose(file, in_place=True)
            mode, dimensions = file.mode, file.size
            image, peak = _eight_bits(file, rule.depth)
            image = _flat(image, "RGB" if rule.channels == 3 else "L")
            if image.size != (size, size):
                if not rule.resize:
                    raise Unreadable(f"is {image.width}×{image.height} pixels, expected {size}×{size}")
                image = _square(image, size)
            return np.asarray(image).reshape(size, size, rule.channels), peak, dimensions, mode
    except Unreadable:
        raise
    except Image.UnidentifiedImageError:
        raise Unreadable(f"is not an image of {', '.join(FORMATS)}; move it away or convert it to PNG") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels() from None
    except MemoryError:
        raise Unreadable("needs more memory than there is; make it smaller") from None
    except Exception as error:  # Pillow's many formats fail in many ways on a damaged file
        raise Unreadable(f"cannot be decoded ({type(error).__name__}: {error}); the file is damaged") from None


def _open(path: str | PathLike[str]) -> BinaryIO:
    """A regular file; to open a pipe would wait for somebody who writes to it."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None
    if 0 < (size := os.fstat(file.fileno()).st_size) <= MOST_BYTES:
        return file
    file.close()
    if not size:
        raise Unreadable("is empty")
    raise Unreadable(f"is larger than {MOST_BYTES / 2**20:,.0f} MiB, the most that an image file may have")


def _expect_small(image: Image.Image, content: BinaryIO) -> None:
    """Refuse an image that would take too much memory or time, before any of it is decoded."""
    if image.width * image.height > MOST_PIXELS:
        raise _too_many_pixels(f"is {image.width}×{image.height} pixels")
    if image.format in ("JPEG", "MPO"):
        place = content.tell()
        content.seek(0)
        scans = content.read().count(b"\xff\xda")
        content.seek(place)
        if scans > MOST_SCANS:
            raise Unreadable(f"is a JPEG of {scans} passes, expected at most {MOST_SCANS}; convert it to PNG")


def _too_many_pixels(found: str = "has too many pixels") -> Unreadable:
    return Unreadable(f"{found}, expected at most {MOST_PIXELS / 1e6:.0f} million; make it smaller")


def _eight_bits(image: Image.Image, depth: int) -> tuple[Image.Image, int]:
    if image.mode == "F":
        raise Unreadable("has floating-point pixels, whose range nobody knows; convert it to 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image, 0
    values = np.asarray(image)
    white, peak = 2**depth - 1, int(values.max())
    if values.min() < 0 or peak > 65535:
        raise Unreadable("has pixels of more than 16 bits; convert it to 8 or 16 bits")
    if peak > white:
        raise Unreadable(f"has pixels up to {peak}, but depth={depth} was given, which ends at {white}")
    scaled = (2 * 255 * np.arange(white + 1) + white) // (2 * white)
    return Image.fromarray(scaled.astype(np.uint8)[values]), peak


def _flat(image: Image.Image, mode: str) -> Image.Image:
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return image if image.mode == mode else image.convert(mode)


def _square(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    shorter = min(width, height)
    if max(width, height) > LONGEST * shorter:
        left, top = (max(0, (side - LONGEST * shorter) // 2) for side in (width, height))
        width, height = min(width, LONGEST * shorter), min(height, LONGEST * shorter)
        image = image.crop((left, top, left + width, top + height))
    width, height = round(width * size / shorter), round(height * size / shorter)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def note_narrow(paths: Sequence[Path], peaks: Sequence[int] | np.ndarray, rule: Rule, advice: str) -> int | None:
    """Say so where 16-bit files look like images of fewer bits, and return those: unscaled they are nearly black.

    `peaks` has each file's brightest value, 0 where it is not of 16-bit grey; `advice` may hold {bits}.
    """
    narrow = [number for number, peak in enumerate(peaks) if 0 < peak < 2**FULL_DEPTH // 4]
    if rule.depth < FULL_DEPTH or not narrow:
        return None
    most = int(max(peaks[number] for number in narrow))
    bits = most.bit_length()
    bits += bits % 2  # detectors have 10, 12 or 14
    first = ", ".join(shown(paths[number]) for number in narrow[:2])
    warnings.warn(
        f"{len(narrow):,} 16-bit image(s) use less than a quarter of the range (values up to {most:,} of 65,535) and "
        f"become nearly black, such as {first}: were they {bits}-bit? {advice.format(bits=bits)}",
        FeddureWarning,
        stacklevel=3,
    )
    return bits


def _decode_aside(paths: Sequence[Path], rule: Rule) -> list[Result]:
    """What `_decode` says, in a process of its own."""
    # -P keeps the folder of the program, whose modules are not meant to be imported bare, off the path.
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = json.dumps({"rule": asdict(rule), "paths": [str(path) for path in paths]}).encode()
    done = subprocess.run(command, input=asked, capture_output=True, env=environment)
    if done.returncode:
        raise DataError(f"{paths[0]}: the process that decoded it and the next ended early; is memory short?")
    return pickle.loads(done.stdout)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    pickle.dump(list(_decode(asked["paths"], Rule(**asked["rule"]))), sys.stdout.buffer)
