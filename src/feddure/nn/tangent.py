"""Forward-mode derivatives of networks, layer by layer.

A pair (x, ẋ) of activations and their derivative along a direction in parameter space is carried through the layers
that the built-in networks, and most others, are made of. Written out like this, the pass compiles and fuses;
PyTorch's own forward mode does neither. A network with other layers falls back to PyTorch's.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor | None]  # the derivative is None where it is zero: the images themselves
Named = Mapping[str, Tensor]


class GlobalMaxPool(nn.Module):
    """The maximum over the whole map, flattened."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, x.shape[-2:]).flatten(1)


class Residual(nn.Module):
    """x + inner(x), or shortcut(x) + inner(x) where shapes change."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None):
        super().__init__()
        self.inner = inner
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.shortcut is None else self.shortcut(x)) + self.inner(x)


def supports(module: nn.Module) -> bool:
    """Whether every layer of the module has its rule here, and no two places share parameters."""
    every = list(module.named_parameters(remove_duplicate=False))
    if len(every) != len(list(module.parameters())):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if _is_chain(module):
        return all(supports(child) for child in module.children())
    return type(module) in _RULES and not (isinstance(module, nn.Conv2d) and module.padding_mode != "zeros")


def _is_chain(module: nn.Module) -> bool:
    return type(module) is Residual or type(module).forward is nn.Sequential.forward


def derivative(module: nn.Module, weights: Named, along: Named, images: Tensor) -> tuple[Tensor, Tensor]:
    """The module's output and its derivative along a direction, batch norm with this batch's statistics."""
    output, change = _carry(module, "", weights, along, (images, None))
    assert change is not None
    return output, change


def _carry(module: nn.Module, prefix: str, weights: Named, along: Named, pair: Pair) -> Pair:
    if isinstance(module, Residual):
        x, dx = pair
        if module.shortcut is not None:
            x, dx = _carry(module.shortcut, prefix + "shortcut.", weights, along, pair)
        y, dy = _carry(module.inner, prefix + "inner.", weights, along, pair)
        return x + y, dy if dx is None else dx if dy is None else dx + dy
    if isinstance(module, nn.Sequential):
        for name, child in module._modules.items():  # named_children() leaves out a second place
            assert child is not None
            pair = _carry(child, f"{prefix}{name}.", weights, along, pair)
        return pair
    names = [name for name, parameter in module._parameters.items() if parameter is not None]  # quick to trace
    values = {name: weights[prefix + name] for name in names}
    changes = {name: along.get(prefix + name) for name in names}
    return _RULES[type(module)](module, values, changes, pair)


def _sum(*terms: Tensor | None) -> Tensor | None:
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def _linear_map(apply: Callable[..., Tensor], values: dict, changes: dict, pair: Pair) -> Pair:
    """Rule of y = A(x; weight) + bias, with each bias shaped as it is added."""
    (x, dx), weight, bias = pair, values["weight"], values.get("bias")
    y = apply(x, weight, bias)
    dweight, dbias = changes["weight"], changes.get("bias")
    if dweight is not None:
        moved: Tensor | None = apply(x, dweight, dbias)
    elif dbias is not None:
        moved = dbias.view(-1, *[1] * (y.dim() - 2)).expand_as(y)
    else:
        moved = None
    return y, _sum(None if dx is None else apply(dx, weight, None), moved)


def _convolution(layer, values: dict, changes: dict, pair: Pair) -> Pair:
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    return _linear_map(apply, values, changes, pair)


def _linear(layer: nn.Module, values: dict, changes: dict, pair: Pair) -> Pair:
    return _linear_map(F.linear, values, changes, pair)


def _normalise(x: Tensor, dx: Tensor | None, axes: list[int], epsilon: float) -> Pair:
    """(x − mean) / √(variance + ε) over these axes; its Jacobian is symmetric, so ẏ is what backpropagation of ẋ is."""
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + epsilon)
    y = (x - mean) * scale
    if dx is None:
        return y, None
    return y, scale * (dx - dx.mean(axes, keepdim=True) - y * (y * dx).mean(axes, keepdim=True))


def _normalise_channels(x: Tensor, dx: Tensor | None, epsilon: float) -> Pair:
    """The same of each channel; on a CPU by the kernels of batch norm, which nothing would fuse there."""
    if x.device.type != "cpu":
        return _normalise(x, dx, [axis for axis in range(x.dim()) if axis != 1], epsilon)
    y, mean, scale = torch.native_batch_norm(x, None, None, None, None, True, 0.0, epsilon)
    if dx is None:
        return y, None
    how = None, None, None, mean, scale, True, epsilon, [True, False, False]
    return y, torch.ops.aten.native_batch_norm_backward(dx, x, *how)[0]


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _affine(values: dict, changes: dict, pair: Pair, dtype: torch.dtype) -> Pair:
    """Scale and shift per channel, back in the network's arithmetic."""
    x, dx = pair
    shape = [1, -1] + [1] * (x.dim() - 2)
    if values:
        scale, dscale, dshift = values["weight"].view(shape), changes["weight"], changes["bias"]
        dx = _sum(
            None if dx is None else dx * scale,
            None if dscale is None else x * dscale.view(shape),
            None if dshift is None else dshift.view(shape).expand_as(x),
        )
        x = x * scale + values["bias"].view(shape)
    return x.to(dtype), None if dx is None else dx.to(dtype)


def _batch_norm(layer, values: dict, changes: dict, pair: Pair) -> Pair:
    x, dx = pair
    wide = _wide(x)
    assert wide is not None
    return _affine(values, changes, _normalise_channels(wide, _wide(dx), layer.eps), x.dtype)


def _group_norm(layer, values: dict, changes: dict, pair: Pair) -> Pair:
    x, dx = pair

    def grouped(tensor: Tensor | None) -> Tensor | None:
        wide = _wide(tensor)
        return None if wide is None else wide.unflatten(1, (layer.num_groups, -1))

    first = grouped(x)
    assert first is not None
    y, dy = _normalise(first, grouped(dx), list(range(2, x.dim() + 1)), layer.eps)
    return _affine(values, changes, (y.flatten(1, 2), None if dy is None else dy.flatten(1, 2)), x.dtype)


def _relu(layer: nn.Module, values: dict, changes: dict, pair: Pair) -> Pair:
    x, dx = pair
    return torch.relu(x), None if dx is None else torch.ops.aten.threshold_backward(dx, x, 0)


def _pool(x: Tensor, dx: Tensor | None, *window) -> Pair:
    y, index = F.max_pool2d(x, *window, return_indices=True)
    if dx is None:
        return y, None
    return y, dx.flatten(2).gather(2, index.flatten(2)).view_as(y)


def _max_pool(layer, values: dict, changes: dict, pair: Pair) -> Pair:
    return _pool(*pair, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)


def _global_max_pool(layer: nn.Module, values: dict, changes: dict, pair: Pair) -> Pair:
    y, dy = _pool(*pair, pair[0].shape[-2:])
    return y.flatten(1), None if dy is None else dy.flatten(1)


def _flatten(layer, values: dict, changes: dict, pair: Pair) -> Pair:
    return layer(pair[0]), None if pair[1] is None else layer(pair[1])


_RULES: dict[type, Callable[[nn.Module, dict, dict, Pair], Pair]] = {
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.ReLU: _relu,
    nn.MaxPool2d: _max_pool,
    GlobalMaxPool: _global_max_pool,
    nn.Flatten: _flatten,
    nn.AvgPool2d: _flatten,
    nn.AdaptiveAvgPool2d: _flatten,
    nn.Identity: _flatten,
}
