"""Where pixels come from: every crop, flip, rotation, shear and shift as a map of source pixels.

A batch is packed into one 32-bit number per pixel, so that moving a pixel moves all its channels at once: an int32
tensor [n, side² + 1] whose bytes are channels. The last number of every image is a black pixel, the source of
whatever lies outside the image. A map lists, for each pixel of the result, the number of its source pixel. There are
only 162 crops and 90 warps, so all their maps are made once and moving any mix of images is one gather.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

PADDING = 4
CUTOUT_GREY = 127
LEVELS = 9
OFFSETS = 2 * PADDING + 1
WARPS = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")

_CROPS = 2 * OFFSETS * OFFSETS


def pack(images: Tensor) -> Tensor:
    """Pixels of uint8 images [n, side, side, channels]."""
    count, height, width, channels = images.shape
    pixels = torch.zeros(count, height * width + 1, dtype=torch.int32, device=images.device)
    copy_channels(images.permute(0, 3, 1, 2), planes(pixels, channels))
    return pixels


def unpack(pixels: Tensor, out: Tensor) -> Tensor:
    """Write pixels to uint8 images `out` [n, side, side, channels]."""
    copy_channels(planes(pixels, out.shape[3]), out.permute(0, 3, 1, 2))
    return out


def copy_channels(source: Tensor, target: Tensor) -> None:
    """Copy [n, channels, side, side] channel by channel: a CPU likes long lines better than many triples."""
    for source_plane, target_plane in zip(source.unbind(1), target.unbind(1), strict=True):
        target_plane.copy_(source_plane)


def planes(pixels: Tensor, channels: int) -> Tensor:
    """The same memory as uint8 [n, channels, side, side]: writing there changes the pixels."""
    side = _side(pixels)
    values = pixels.view(torch.uint8).view(*pixels.shape, 4)[:, :-1, :channels]
    return values.unflatten(1, (side, side)).permute(0, 3, 1, 2)


def move(pixels: Tensor, rows: Tensor) -> Tensor:
    """Fetch every image's pixels from where its row of `source_maps` says."""
    maps = source_maps(_side(pixels), pixels.device)
    return pixels.gather(1, maps.index_select(0, rows))


def cut(pixels: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Grey out, in place, a square of half the side around each image's (y, x), clipped at the border."""
    side = _side(pixels)
    squares = cutout_masks(side, pixels.device)
    inside = squares.index_select(0, y).unsqueeze(2) & squares.index_select(0, x).unsqueeze(1)
    kept = pixels[:, :-1].unflatten(1, (side, side))
    grey = CUTOUT_GREY * 0x010101
    kept ^= kept.bitwise_xor(grey).bitwise_and_(inside)
    return pixels


def _side(pixels: Tensor) -> int:
    return math.isqrt(pixels.shape[1] - 1)


def crop_row(flip: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> np.ndarray:
    """The rows of `source_maps` that flip and crop reflect-padded images at offsets (dy, dx)."""
    return (flip * OFFSETS + dy) * OFFSETS + dx


def warp_row(warp: str, level: int, negative: int) -> int:
    """The row of `source_maps` for one of WARPS at a level of 1 to 9."""
    return _CROPS + (WARPS.index(warp) * LEVELS + level - 1) * 2 + negative


@lru_cache(maxsize=8)
def source_maps(side: int, device: torch.device) -> Tensor:
    """All crops, then all warps, of square images with this side: int64 [252, side² + 1]."""
    maps = [_crop(side, flip, dy, dx) for flip in (0, 1) for dy in range(OFFSETS) for dx in range(OFFSETS)]
    for warp in WARPS:
        for level in range(1, LEVELS + 1):
            maps += [_affine(side, _matrix(warp, level, sign, side)) for sign in (1, -1)]
    black = np.full((len(maps), 1), side * side)
    return torch.from_numpy(np.concatenate([np.stack(maps), black], axis=1)).to(device)


@lru_cache(maxsize=8)
def cutout_masks(side: int, device: torch.device) -> Tensor:
    """int32 [side, side] with all bits set where a cutout centred at the row's number covers the column's."""
    centre, position = np.indices((side, side))
    offset = position - centre + side // 2 // 2
    covered = (offset >= 0) & (offset < side // 2)
    return torch.from_numpy(-covered.astype(np.int32)).to(device)


def _crop(side: int, flip: int, dy: int, dx: int) -> np.ndarray:
    reflected = np.pad(np.arange(side), PADDING, mode="reflect")
    rows = reflected[dy : dy + side]
    columns = reflected[dx : dx + side]
    if flip:
        columns = side - 1 - columns
    return (rows[:, None] * side + columns).ravel()


def _matrix(warp: str, level: int, sign: int, side: int) -> tuple[float, ...]:
    """(a, b, c, d, e, f): the result's pixel (x, y) comes from (ax + by + c, dx + ey + f)."""
    match warp:
        case "Rotate":
            return _rotation(sign * 3 * level, side)
        case "ShearX":
            return (1, sign * 0.03 * level, 0, 0, 1, 0)
        case "ShearY":
            return (1, 0, 0, sign * 0.03 * level, 1, 0)
        case "TranslateX":
            return (1, 0, sign * int(0.03 * level * side), 0, 1, 0)
        case _:
            return (1, 0, 0, 0, 1, sign * int(0.03 * level * side))


def _rotation(degrees: int, side: int) -> tuple[float, ...]:
    # Pillow reduces the angle to [0, 360) and rounds to 15 digits; both can move a pixel on a tie.
    angle = -math.radians(degrees % 360.0)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    centre = side / 2
    x_shift = cosine * -centre + sine * -centre + centre
    y_shift = -sine * -centre + cosine * -centre + centre
    return (cosine, sine, x_shift, -sine, cosine, y_shift)


def _affine(side: int, matrix: tuple[float, ...]) -> np.ndarray:
    """Nearest neighbour of every pixel's centre, in the 16.16 fixed point that Pillow computes in."""
    a, b, c, d, e, f = matrix
    y, x = np.indices((side, side))
    column = (_fixed(c + a * 0.5 + b * 0.5) + x * _fixed(a) + y * _fixed(b)) >> 16
    row = (_fixed(f + d * 0.5 + e * 0.5) + x * _fixed(d) + y * _fixed(e)) >> 16
    inside = (column >= 0) & (column < side) & (row >= 0) & (row < side)
    return np.where(inside, row * side + column, side * side).ravel()


def _fixed(value: float) -> int:
    return math.floor(value * 65536.0 + 0.5)
