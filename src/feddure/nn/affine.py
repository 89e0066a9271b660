"""Batch norm in evaluation as what it is: a scale and a shift of each channel, made once for many images.

The compiler would work them out anew, from four vectors and a root, for every pixel.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Named = dict[str, Tensor]


class Affine(nn.Module):
    """x · scale + shift, channel by channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor):
        super().__init__()
        self.register_buffer("scale", torch.ones_like(scale))
        self.register_buffer("shift", torch.zeros_like(scale))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *(1,) * (x.dim() - 2))
        return (x * self.scale.view(shape) + self.shift.view(shape)).to(x.dtype)


class AffineNorms:
    """A module in evaluation mode whose batch norms are affine maps; other layers are as they were."""

    def __init__(self, module: nn.Module):
        self.module = copy.deepcopy(module)
        self._epsilon: dict[str, float] = {}  # of each batch norm, by its path
        made: dict[nn.Module, Affine] = {}
        for path, layer in list(self.module.named_modules(remove_duplicate=False)):
            plain = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
            if not path or not plain or layer.running_var is None:
                continue
            if layer not in made:
                made[layer], self._epsilon[path] = Affine(layer.running_var), layer.eps
            parent, _, name = path.rpartition(".")
            setattr(self.module.get_submodule(parent), name, made[layer])

    def state(self, state: Mapping[str, Tensor]) -> Named:
        """What `module` is to be given, from what the module was given."""
        if not self._epsilon:
            return dict(state)
        found = dict(state)

        def take(name: str, otherwise: Sequence[Tensor] = ()) -> list[Tensor]:
            names = [f"{path}.{name}" for path in self._epsilon]
            return [found.pop(key) if key in found else otherwise[place] for place, key in enumerate(names)]

        means, variances = take("running_mean"), take("running_var")
        sizes, ones = [len(mean) for mean in means], torch.ones_like(torch.cat(means))
        roots = [variance + epsilon for variance, epsilon in zip(variances, self._epsilon.values(), strict=True)]
        scale = torch.cat(take("weight", ones.split(sizes))) / torch.cat(roots).sqrt()
        shift = torch.cat(take("bias", (0 * ones).split(sizes))) - torch.cat(means) * scale
        for path, one, other in zip(self._epsilon, scale.split(sizes), shift.split(sizes), strict=True):
            found |= {f"{path}.scale": one, f"{path}.shift": other}
        return found
