"""One image file as a square of 8-bit pixels; also the program of a decoding process.

The rule: the EXIF orientation is applied; 16-bit grey is scaled to 8 bits, white being 2**depth - 1 (of 16-bit
colour Pillow keeps the high bytes); transparency is laid over black; palettes, CMYK and the rest become RGB, or
grey for one channel; the shorter side is resized to `size` with Pillow's bicubic filter, which widens with the
reduction so that no pixel is skipped; and the middle square is cut out. An image that is `size` by `size` already
keeps its pixels. An animation counts as its first frame.

This file imports nothing of the package, so that decoding processes start fast.
"""

import json
import signal
import struct
import sys
from os import PathLike

import numpy as np
from PIL import Image, ImageOps

GOOD, BAD = b"+", b"-"
"""How a decoding process marks what follows: the brightest value and pixels, or the length and text of a problem."""

LEAST_DEPTH = 8
FULL_DEPTH = 16
"""Bits of a grey value in a file of more than 8 bits, unless the user says that fewer are in use."""


class Unreadable(ValueError):
    """Why a file gives no image; the text goes on from "<path>: "."""


def read(
    path: str | PathLike[str], size: int, channels: int, resize: bool = True, depth: int = FULL_DEPTH
) -> np.ndarray:
    """The image as uint8 [size, size, channels]; without `resize` any other size is an error."""
    return read_with_peak(path, size, channels, resize, depth)[0]


def read_with_peak(
    path: str | PathLike[str], size: int, channels: int, resize: bool = True, depth: int = FULL_DEPTH
) -> tuple[np.ndarray, int]:
    """The image, and the brightest value of a grey file of more than 8 bits (0 for any other)."""
    try:
        with Image.open(path) as file:
            ImageOps.exif_transpose(file, in_place=True)
            image, peak = _eight_bits(file, depth)
            image = _flat(image, "RGB" if channels == 3 else "L")
            if image.size != (size, size):
                if not resize:
                    raise Unreadable(f"is {image.width}×{image.height} pixels, expected {size}×{size}")
                image = _square(image, size)
            return np.asarray(image).reshape(size, size, channels), peak
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


def work() -> None:
    """Decode the images named on standard input onto standard output; a problem stands in for one that cannot be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    order = json.load(sys.stdin)
    for path in order["paths"]:
        try:
            pixels, peak = read_with_peak(path, **order["rule"])
            sys.stdout.buffer.write(GOOD + struct.pack("<H", peak) + pixels.tobytes())
        except Unreadable as problem:
            text = str(problem).encode()
            sys.stdout.buffer.write(BAD + struct.pack("<I", len(text)) + text)


if __name__ == "__main__":
    work()
