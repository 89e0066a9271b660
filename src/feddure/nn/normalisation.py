"""Normalisation layers: which parameters are theirs, and a network without them."""

import torch
from torch import nn

_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameters(module: nn.Module) -> set[str]:
    """Names of the scales and shifts of a module's normalisation layers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, _LAYERS)
        for name, _ in layer.named_parameters()
    }


def remove(module: nn.Module) -> nn.Module:
    """Take normalisation layers and biases out of a module, in place.

    Biases stay in the state, at zero, and are not trained. Nothing else now keeps the signal from fading from layer
    to layer, so that weights are drawn anew with variance 1 / fan-in.
    """
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, _LAYERS):
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, nn.Identity())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.rpartition(".")[2] == "bias":
                parameter.zero_().requires_grad_(False)
            elif parameter.dim() >= 2:
                nn.init.kaiming_normal_(parameter, nonlinearity="linear")
    return module
