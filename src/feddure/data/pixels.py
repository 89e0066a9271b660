"""Images as one 32-bit number per pixel, so that moving a pixel moves all its channels at once.

A batch is an int32 tensor [n, side² + 1]. The bytes of a number are the channels of a pixel; the last number
of every image is a black pixel, the source of whatever a warp takes from outside the image.
"""

import math

import torch
from torch import Tensor

from feddure.data import geometry

CUTOUT_GREY = 127


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
    """Fetch every image's pixels from where its row of `geometry.source_maps` says."""
    maps = geometry.source_maps(_side(pixels), pixels.device)
    return pixels.gather(1, maps.index_select(0, rows))


def cut(pixels: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Grey out, in place, a square of half the side around each image's (y, x), clipped at the border."""
    side = _side(pixels)
    squares = geometry.cutout_masks(side, pixels.device)
    inside = squares.index_select(0, y).unsqueeze(2) & squares.index_select(0, x).unsqueeze(1)
    kept = pixels[:, :-1].unflatten(1, (side, side))
    grey = CUTOUT_GREY * 0x010101
    kept ^= kept.bitwise_xor(grey).bitwise_and_(inside)
    return pixels


def _side(pixels: Tensor) -> int:
    return math.isqrt(pixels.shape[1] - 1)
