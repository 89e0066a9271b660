"""The readable twin of `feddure.data.augment`: one image at a time, with Pillow.

It takes the same decisions and defines what the batched code must return; tests compare the two and a benchmark
races them.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from feddure.data.augment import OPERATIONS
from feddure.data.geometry import CUTOUT_GREY, PADDING


def weak(image: np.ndarray, decision: np.ndarray) -> np.ndarray:
    """T_w of one uint8 image [height, width, channels]: flip and crop, then cutout if its centre is given."""
    result = _flip_and_crop(image, *decision[:3])
    return _cutout(result, *decision[3:]) if len(decision) > 3 else result


def strong(image: np.ndarray, decision: np.ndarray) -> np.ndarray:
    """T_s of one uint8 image [height, width, channels]: flip, crop, two operations, cutout."""
    picture = to_picture(_flip_and_crop(image, *decision[:3]))
    for operation, level, applied, negative in (decision[3:7], decision[7:11]):
        if applied:
            picture = apply(OPERATIONS[operation], picture, int(level), bool(negative))
    return _cutout(to_array(picture), *decision[11:])


def apply(operation: str, picture: Image.Image, level: int, negative: bool) -> Image.Image:
    """One operation of T_s at a level of 1 to 9."""
    factor = 0.09 * level + 0.05
    sign = -1 if negative else 1
    side = picture.width
    match operation:
        case "Identity":
            return picture
        case "AutoContrast":
            return ImageOps.autocontrast(picture)
        case "Equalize":
            return ImageOps.equalize(picture)
        case "Brightness":
            return ImageEnhance.Brightness(picture).enhance(factor)
        case "Color":
            return ImageEnhance.Color(picture).enhance(factor)
        case "Contrast":
            return ImageEnhance.Contrast(picture).enhance(factor)
        case "Sharpness":
            return ImageEnhance.Sharpness(picture).enhance(factor)
        case "Posterize":
            return ImageOps.posterize(picture, int(0.4 * level) + 4)
        case "Rotate":
            return picture.rotate(sign * 3 * level)
        case "ShearX":
            return _affine(picture, (1, sign * 0.03 * level, 0, 0, 1, 0))
        case "ShearY":
            return _affine(picture, (1, 0, 0, sign * 0.03 * level, 1, 0))
        case "Solarize":
            return ImageOps.solarize(picture, 256 - int(25.6 * level))
        case "TranslateX":
            return _affine(picture, (1, 0, sign * int(0.03 * level * side), 0, 1, 0))
        case "TranslateY":
            return _affine(picture, (1, 0, 0, 0, 1, sign * int(0.03 * level * side)))
    raise ValueError(f"unknown operation '{operation}'; there are: {', '.join(OPERATIONS)}")


def to_picture(image: np.ndarray) -> Image.Image:
    """A uint8 array [height, width, 1 or 3] as a Pillow image."""
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def to_array(picture: Image.Image) -> np.ndarray:
    """A Pillow image as a uint8 array [height, width, 1 or 3]."""
    return np.array(picture).reshape(picture.height, picture.width, -1)


def _flip_and_crop(image: np.ndarray, flip: int, dy: int, dx: int) -> np.ndarray:
    side = len(image)
    if flip:
        image = image[:, ::-1]
    padded = np.pad(image, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)), mode="reflect")
    return padded[dy : dy + side, dx : dx + side]


def _affine(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


def _cutout(image: np.ndarray, y: int, x: int) -> np.ndarray:
    size = len(image) // 2
    top, left = y - size // 2, x - size // 2
    image[max(top, 0) : top + size, max(left, 0) : left + size] = CUTOUT_GREY
    return image
