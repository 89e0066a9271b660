"""What pixels become: the eight colour operations of T_s on planes of uint8 values.

Six of them are a table of 256 values per image and channel; Color and Sharpness blend each pixel with
a grey or a smoothed one. The arithmetic follows Pillow's, down to its truncations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from feddure.data.geometry import LEVELS

KINDS = ("AutoContrast", "Equalize", "Table", "Contrast", "Color", "Sharpness")
"""The order in which `recolour` wants its images; Table means Brightness, Posterize or Solarize."""

_FACTORS = (0.09 * np.arange(1, LEVELS + 1) + 0.05).astype(np.float32)
_POSTERIZE = LEVELS * 256
_SOLARIZE = _POSTERIZE + LEVELS


def kind(operation: str) -> str:
    """The one of KINDS that an operation belongs to."""
    return "Table" if operation in ("Brightness", "Posterize", "Solarize") else operation


def table_row(operation: str, level: int) -> int:
    """What `recolour` must know of an image beside its kind: where its table is, or else its level."""
    match operation:
        case "Brightness" | "Contrast":
            return (level - 1) * 256
        case "Posterize":
            return _POSTERIZE + level - 1
        case "Solarize":
            return _SOLARIZE + level - 1
        case _:
            return level - 1


@dataclass(frozen=True)
class _Constants:
    tables: Tensor  # uint8 [9 * 256 + 9 + 9, 256]: blends with each grey at each level, Posterize, Solarize
    factors: Tensor  # float32 [9]: share of the original in a blend
    stretches: Tensor  # float64 [256]: AutoContrast's scale by the range of values
    identity: Tensor  # int32 [256]
    one: Tensor  # int32 []


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> _Constants:
    values = np.arange(256)
    grey, value = values[:, None].astype(np.float32), values.astype(np.float32)
    blends = (grey + _FACTORS[:, None, None] * (value - grey)).astype(np.uint8)
    levels = range(1, LEVELS + 1)
    posterize = np.stack([values & ~(2 ** (4 - int(0.4 * level)) - 1) for level in levels])
    thresholds = np.array([[256 - int(25.6 * level)] for level in levels])
    solarize = np.where(values < thresholds, values, 255 - values)
    tables = np.concatenate([blends.reshape(-1, 256), posterize, solarize]).astype(np.uint8)
    stretches = np.array([1.0, *(255.0 / width for width in range(1, 256))])
    arrays = (tables, _FACTORS, stretches, values.astype(np.int32), np.array(1, dtype=np.int32))
    return _Constants(*(torch.from_numpy(array).to(device) for array in arrays))


def recolour(planes: Tensor, counts: Sequence[int], rows: Tensor) -> Tensor:
    """Apply one operation to each image of uint8 planes [n, channels, side, side].

    The images lie in the order of KINDS, `counts` says how many there are of each kind, and `rows` holds
    each image's `table_row`.
    """
    constants = _constants(planes.device)
    # Each name is the end of a kind's images: those of kind Table are planes[equalized:tabled].
    stretched, equalized, tabled, contrasted, coloured, _ = accumulate(counts)
    grey = _grey(planes[tabled:coloured])
    result = torch.empty_like(planes)

    values = planes[:contrasted].flatten(2).long()
    shared_rows = rows[equalized:contrasted].clone()
    shared_rows[tabled - equalized :].add_(_rounded_mean(grey[: contrasted - tabled]))
    tables = torch.cat(
        [
            _autocontrast_tables(planes[:stretched], constants),
            _equalize_tables(values[stretched:equalized], constants),
            constants.tables.index_select(0, shared_rows).unsqueeze(1).expand(-1, planes.shape[1], -1),
        ]
    )
    torch.gather(tables, 2, values, out=result[:contrasted].flatten(2))

    blended = planes[contrasted:]
    colourless = grey[contrasted - tabled :].unsqueeze(1).expand(-1, planes.shape[1], -1, -1)
    plainer = torch.cat([colourless, _smooth(planes[coloured:])])
    factors = constants.factors.index_select(0, rows[contrasted:]).view(-1, 1, 1, 1)
    result[contrasted:].copy_(blended.float().sub_(plainer).mul_(factors).add_(plainer))
    return result


def _grey(planes: Tensor) -> Tensor:
    """Luminance, rounded, as float32 [n, side, side]; sums of 65536ths below 256 are exact."""
    if planes.shape[1] == 1:
        return planes[:, 0].float()
    red, green, blue = planes.float().unbind(1)
    weighted = red.mul(19595 / 65536).add_(green, alpha=38470 / 65536).add_(blue, alpha=7471 / 65536)
    return weighted.add_(0.5).floor_()


def _rounded_mean(grey: Tensor) -> Tensor:
    # In integers: dividing by a constant is inexact on a GPU, and halves must go up.
    pixels = grey.shape[1] * grey.shape[2]
    return grey.sum((1, 2), dtype=torch.int64).add_(pixels // 2).div_(pixels, rounding_mode="floor")


def _smooth(planes: Tensor) -> Tensor:
    """Pillow's SMOOTH filter as float32; it leaves the border alone."""
    smooth = planes.float()
    inner = smooth[..., 1:-1, 1:-1]
    lines = (smooth[..., :-2, :] + smooth[..., 1:-1, :]).add_(smooth[..., 2:, :])
    sums = (lines[..., :-2] + lines[..., 1:-1]).add_(lines[..., 2:])
    # The weights are 5 in the middle and 1 around it. Thirteenths never tie, so any rounding agrees.
    inner.copy_(sums.add_(inner, alpha=4).div_(13).round_())
    return smooth


def _autocontrast_tables(planes: Tensor, constants: _Constants) -> Tensor:
    """uint8 [n, channels, 256] that stretch each channel's values to 0..255; a flat channel stays."""
    low = planes.amin((2, 3))
    width = planes.amax((2, 3)) - low
    scale = constants.stretches.index_select(0, width.flatten().long()).view(*width.shape, 1)
    # A flat channel has width 0 and scale 1; without an offset its table is the identity.
    offset = scale * (low * width.clamp(max=1)).unsqueeze(2)
    return (constants.identity * scale).sub_(offset).clamp_(0, 255).to(torch.uint8)


def _equalize_tables(values: Tensor, constants: _Constants) -> Tensor:
    """uint8 [n, channels, 256] that even out the histograms of int64 values [n, channels, side²]."""
    histogram = torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=values.device)
    histogram.scatter_add_(2, values, constants.one.expand_as(values))
    brightest = histogram.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - brightest).div_(255, rounding_mode="floor")
    darker = histogram.cumsum(2, dtype=torch.int32).sub_(histogram)
    table = darker.add_(step.div(2, rounding_mode="floor")).div_(step.clamp(min=1), rounding_mode="floor")
    # With too few pixels for one per step Pillow leaves the channel alone.
    return torch.where(step > 0, table.clamp_(max=255), constants.identity).to(torch.uint8)
