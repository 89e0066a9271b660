"""A module's tensors as one flat vector with named views.

Receiving, Adam, the proximal term, aggregation, averaging and export then are one operation each. Convolution
weights lie in memory as output × height × width × input, so that their views are channels-last and no
convolution has to rearrange them. Trained tensors that are cast to the network's arithmetic come first, trained ones
that keep full precision (batch-norm scales) next, frozen tensors last.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """Where one named tensor lies."""

    name: str
    shape: torch.Size
    start: int

    @property
    def size(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor, offset: int = 0) -> Tensor:
        """This tensor inside a flat vector that begins at `offset` of the layout."""
        part = flat[self.start - offset : self.start - offset + self.size]
        if len(self.shape) == 4:
            outputs, inputs, height, width = self.shape
            return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
        return part.view(self.shape)


class Layout:
    """The order of named tensors in a flat vector."""

    def __init__(self, tensors: Mapping[str, Tensor], precise: Collection[str] = (), frozen: Collection[str] = ()):
        groups: tuple[list[str], list[str], list[str]] = ([], [], [])
        for name in tensors:
            groups[2 if name in frozen else 1 if name in precise else 0].append(name)
        self.entries: list[Entry] = []
        ends = []
        start = 0
        for group in groups:
            for name in group:
                self.entries.append(Entry(name, tensors[name].shape, start))
                start += tensors[name].numel()
            ends.append(start)
        self.cast, self.trained, self.size = ends  # where the three groups end
        self._cast_entries, self._trained_entries = len(groups[0]), len(groups[0]) + len(groups[1])

    @property
    def groups(self) -> tuple[slice, slice]:
        """Where the trained tensors lie: those that are cast, those that keep full precision."""
        return slice(0, self.cast), slice(self.cast, self.trained)

    @property
    def trained_entries(self) -> list[Entry]:
        return self.entries[: self._trained_entries]

    @property
    def frozen_entries(self) -> list[Entry]:
        return self.entries[self._trained_entries :]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name → view into `flat`."""
        return {entry.name: entry.view(flat) for entry in self.entries}

    def flatten(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new flat vector with these values."""
        flat = torch.empty(self.size, dtype=dtype, device=device)
        for entry in self.entries:
            entry.view(flat).copy_(tensors[entry.name])
        return flat

    def gather(self, gradients: Sequence[Tensor]) -> "Pieces":
        """Gradients of the trained entries, in order, as flat pieces of one type each."""
        parts = [_in_memory_order(gradient).reshape(-1) for gradient in gradients]
        groups = (parts[: self._cast_entries], parts[self._cast_entries :])
        return [(part, torch.cat(group)) for part, group in zip(self.groups, groups, strict=True) if group]


Pieces = list[tuple[slice, Tensor]]
"""A flat gradient in pieces: where each lies, and its values."""


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
