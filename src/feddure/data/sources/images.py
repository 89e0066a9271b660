"""One image file as a square of 8-bit pixels; also the program of a decoding process.

The rule: the EXIF orientation is applied; 16-bit grey is scaled to 8 bits (of 16-bit colour Pillow keeps the
high bytes); transparency is laid over black; palettes, CMYK and the rest become RGB, or grey for one channel;
the shorter side is resized to `size` with Pillow's bicubic filter, which widens with the reduction so that no
pixel is skipped; and the middle square is cut out. An image that is `size` by `size` already keeps its
pixels. An animation counts as its first frame.

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
"""How a decoding process marks what follows: pixels, or the length and text of a problem."""


class Unreadable(ValueError):
    """Why a file gives no image; the text goes on from "<path>: "."""


def read(path: str | PathLike[str], size: int, channels: int, resize: bool = True) -> np.ndarray:
    """The image as uint8 [size, size, channels]; without `resize` any other size is an error."""
    try:
        with Image.open(path) as file:
            ImageOps.exif_transpose(file, in_place=True)
            image = _flat(file, "RGB" if channels == 3 else "L")
            if image.size != (size, size):
                if not resize:
                    raise Unreadable(f"is {image.width}×{image.height} pixels, expected {size}×{size}")
                image = _square(image, size)
            return np.asarray(image).reshape(size, size, channels)
    except Unreadable:
        raise
    except Image.UnidentifiedImageError:
        raise Unreadable("is not an image that Pillow can read; move it away or convert it to PNG") from None
    except Exception as error:  # Pillow's many formats fail in many ways on a damaged file
        raise Unreadable(f"cannot be decoded ({type(error).__name__}: {error}); the file is damaged") from None


def _flat(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise Unreadable("has floating-point pixels, whose range nobody knows; convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise Unreadable("has pixels of more than 16 bits; convert it to 8 or 16 bits")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
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
    """Decode the images named on standard input onto standard output, up to the first that cannot be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    order = json.load(sys.stdin)
    for path in order["paths"]:
        try:
            sys.stdout.buffer.write(GOOD + read(path, **order["rule"]).tobytes())
        except Unreadable as problem:
            text = str(problem).encode()
            sys.stdout.buffer.write(BAD + struct.pack("<I", len(text)) + text)
            return


if __name__ == "__main__":
    work()
