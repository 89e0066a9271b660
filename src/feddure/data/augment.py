"""Weak and strong augmentation, T_w and T_s, of whole batches on any device.

Both are pure functions of uint8 images and of integer decisions, which are made on the CPU from raw random
bits, one row per image. Since the decisions are known on the CPU, images are sorted by operation
there and each operation runs once for all its images, without ever waiting for the device.
`tests/oracle/augment_twin.py` does the same to one image with Pillow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddure.data import colour, geometry
from feddure.errors import DataError

OPERATIONS = (
    *("Identity", "AutoContrast", "Equalize", "Brightness", "Color", "Contrast", "Sharpness"),
    *("Posterize", "Rotate", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY"),
)

WEAK_BITS = 1
"""Random 64-bit words that T_w takes per image."""
CUTOUT_BITS = 1
"""Random 64-bit words that a cutout takes per image."""
STRONG_BITS = WEAK_BITS + 2 + CUTOUT_BITS
"""Random 64-bit words that T_s takes per image."""

# The order in which images are sorted for a slot, and the place of each operation in it.
_GROUPS = ("Unchanged", "Warp", *colour.KINDS)


def _group(operation: str) -> int:
    if operation == "Identity":
        return 0
    return _GROUPS.index("Warp" if operation in geometry.WARPS else colour.kind(operation))


def _row(operation: str, level: int, negative: int) -> int:
    if operation in geometry.WARPS:
        return geometry.warp_row(operation, level, negative)
    return colour.table_row(operation, level)


_GROUP = np.array([_group(operation) for operation in OPERATIONS], dtype=np.int8)  # numpy sorts bytes fastest
_LEVELS = range(1, geometry.LEVELS + 1)
_ROW = np.array([[[_row(name, level, sign) for sign in (0, 1)] for level in _LEVELS] for name in OPERATIONS])

# Work goes in chunks of so many pixels: on a CPU to stay in the cache, on a GPU to bound the memory.
_CHUNK_ON_CPU = 1 << 19
_CHUNK_ON_GPU = 1 << 24


@dataclass(frozen=True)
class Normalise:
    """How pixels become numbers: (x / 255 - mean) / std per channel, in this dtype."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32


def weak_decisions(raw: np.ndarray, side: int, cutout: bool = False) -> np.ndarray:
    """T_w's decisions from random words [n, WEAK_BITS]: int64 [n, 3] of flip, dy and dx in 0..8.

    With `cutout` the words are [n, WEAK_BITS + CUTOUT_BITS] and the decisions end with the centre's y and x.
    """
    columns = _crop_columns(raw[:, 0])
    if cutout:
        columns += _cutout_columns(raw[:, 1], side)
    return np.stack(columns, axis=1)


def strong_decisions(raw: np.ndarray, side: int) -> np.ndarray:
    """T_s's decisions from random words [n, STRONG_BITS]: int64 [n, 13].

    The columns are flip, dy, dx; then twice the operation's place in OPERATIONS, its level 1..9, whether
    it is applied and whether its sign is negative; then the cutout centre's y and x.
    """
    columns = _crop_columns(raw[:, 0])
    for word in (raw[:, 1], raw[:, 2]):
        operation, level, applied, negative = _split(word, len(OPERATIONS), geometry.LEVELS)
        columns += [operation, level + 1, applied, negative]
    columns += _cutout_columns(raw[:, 3], side)
    return np.stack(columns, axis=1)


def _split(word: np.ndarray, first: int, second: int) -> list[np.ndarray]:
    """A number below `first`, one below `second` and two bits out of a random word's 31 + 31 + 1 + 1 bits."""
    low, high = word & np.uint64(0x7FFFFFFF), (word >> np.uint64(31)) & np.uint64(0x7FFFFFFF)
    numbers = [(low * np.uint64(first)) >> np.uint64(31), (high * np.uint64(second)) >> np.uint64(31)]
    bits = [(word >> np.uint64(62)) & np.uint64(1), word >> np.uint64(63)]
    return [column.astype(np.int64) for column in numbers + bits]


def _crop_columns(word: np.ndarray) -> list[np.ndarray]:
    dy, dx, flip, _ = _split(word, geometry.OFFSETS, geometry.OFFSETS)
    return [flip, dy, dx]


def _cutout_columns(word: np.ndarray, side: int) -> list[np.ndarray]:
    return _split(word, side, side)[:2]


def weak(images: Tensor, decisions: np.ndarray, normalise: Normalise | None = None) -> Tensor:
    """T_w: flip and crop, then a grey cutout where the decisions hold its centre; shapes are those of `strong`."""
    return _run(_weak, images, decisions, normalise)


def strong(images: Tensor, decisions: np.ndarray, normalise: Normalise | None = None) -> Tensor:
    """T_s: flip and crop, two random operations, a grey cutout.

    Takes uint8 images [n, side, side, channels] on any device; the result is [n, channels, side, side] in
    channels-last memory, or without `normalise` uint8 like the images.
    """
    return _run(_strong, images, decisions, normalise)


def plain(images: Tensor, normalise: Normalise) -> Tensor:
    """The images themselves, normalised, for evaluation."""
    out = torch.empty(images.shape, dtype=normalise.dtype, device=images.device)
    for part in _chunks(images):
        _normalise(images[part], normalise, out[part])
    return out.permute(0, 3, 1, 2)


def _run(
    transform: Callable[[Tensor, np.ndarray], Tensor],
    images: Tensor,
    decisions: np.ndarray,
    normalise: Normalise | None,
) -> Tensor:
    _check(images)
    dtype = torch.uint8 if normalise is None else normalise.dtype
    out = torch.empty(images.shape, dtype=dtype, device=images.device)
    for part in _chunks(images):
        result = transform(images[part], decisions[part])
        if normalise is None:
            geometry.unpack(result, out[part])
        else:
            _normalise(geometry.unpack(result, torch.empty_like(images[part])), normalise, out[part])
    return out if normalise is None else out.permute(0, 3, 1, 2)


def _chunks(images: Tensor) -> list[slice]:
    count, height, width, _ = images.shape
    size = max(1, (_CHUNK_ON_CPU if images.device.type == "cpu" else _CHUNK_ON_GPU) // (height * width))
    return [slice(start, start + size) for start in range(0, count, size)]


def _weak(images: Tensor, decisions: np.ndarray) -> Tensor:
    crop, *centre = _send([geometry.crop_row(*decisions[:, :3].T), *decisions[:, 3:].T], images.device)
    result = geometry.move(geometry.pack(images), crop)
    return geometry.cut(result, *centre) if centre else result


def _strong(images: Tensor, decisions: np.ndarray) -> Tensor:
    channels = images.shape[3]
    first, second = _sort(decisions[:, 3:7], channels), _sort(decisions[:, 7:11], channels)
    first_place, second_place = np.argsort(first.order), np.argsort(second.order)
    order, crop, first_rows, reorder, second_rows, restore, y, x = _send(
        [
            first.order,
            geometry.crop_row(*decisions[first.order, :3].T),
            first.rows,
            first_place[second.order],
            second.rows,
            second_place,
            *decisions[:, 11:].T,
        ],
        images.device,
    )
    # Images stay sorted from one slot to the next and come back to their own order before the cutout.
    result = geometry.move(geometry.pack(images.index_select(0, order)), crop)
    _operate(result, first.counts, first_rows, channels)
    result = result.index_select(0, reorder)
    _operate(result, second.counts, second_rows, channels)
    return geometry.cut(result.index_select(0, restore), y, x)


class _Slot(NamedTuple):
    """One operation for every image: the order that groups them, the size of each group, and their rows."""

    order: np.ndarray
    counts: list[int]
    rows: np.ndarray


def _sort(decisions: np.ndarray, channels: int) -> _Slot:
    operation, level, applied, negative = decisions.T
    group = np.where(applied, _GROUP[operation], _GROUP[0])
    if channels == 1:
        group[operation == OPERATIONS.index("Color")] = _GROUP[0]
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group, minlength=len(_GROUPS)).tolist()
    return _Slot(order, counts, _ROW[operation, level - 1, negative][order])


def _operate(batch: Tensor, counts: list[int], rows: Tensor, channels: int) -> None:
    unchanged, warped, *coloured = counts
    if warped:
        part = slice(unchanged, unchanged + warped)
        batch[part] = geometry.move(batch[part], rows[part])
    if any(coloured):
        part = slice(unchanged + warped, None)
        planes = geometry.planes(batch[part], channels)
        geometry.copy_channels(colour.recolour(planes.contiguous(), coloured, rows[part]), planes)


def _send(columns: list[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Bring integer columns to the device in one copy that nobody waits for."""
    table = torch.from_numpy(np.stack(columns))
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True).unbind(0)


def _normalise(images: Tensor, normalise: Normalise, out: Tensor) -> None:
    shift, scale = _lines(normalise, images.shape[2], images.device)
    lines = images.flatten(2).to(scale.dtype).sub_(shift)
    torch.mul(lines, scale, out=out.flatten(2))


@lru_cache(maxsize=32)
def _lines(normalise: Normalise, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """255 mean and 1 / (255 std), repeated for a line of pixels: long lines are quick, triples are not."""
    dtype = torch.float64 if normalise.dtype == torch.float64 else torch.float32
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (normalise.mean, normalise.std))
    return (255 * mean).repeat(width).to(device, dtype), (1 / (255 * std)).repeat(width).to(device, dtype)


def _check(images: Tensor) -> None:
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != shape[2] or shape[3] not in (1, 3):
        raise DataError(
            f"augmentation was given {images.dtype} images of shape {shape}; "
            "it takes uint8 [n, side, side, channels] with 1 or 3 channels: make the images square"
        )
    if shape[1] <= geometry.PADDING:
        raise DataError(f"images of {shape[1]} × {shape[1]} pixels are too small to augment: make them 5 × 5 or more")
