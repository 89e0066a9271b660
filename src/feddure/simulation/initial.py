"""Where training starts when it does not start fresh: a model file's tensors in the network, by name and shape."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from feddure import methods, pretrained
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureWarning

_MOST_NAMES = 8  # of each kind of problem


def fill(module: Module, experiment: Experiment, dataset: Dataset) -> None:
    """Put the tensors of the experiment's `init` in place, batch-norm statistics too.

    The classifier starts fresh where the file has none, or one for other classes.
    """
    path = Path(str(experiment.init))
    tensors, about = pretrained.read(path, experiment.init_sha256)
    trained = about.get("experiment")
    if isinstance(trained, dict) and not methods.exchanges(str(trained.get("method"))):
        raise ConfigError(
            f"init (--init) {path}: its clients trained alone (method '{trained['method']}'), so that it holds nothing "
            "they have learned; give the model of another method"
        )
    own = {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    given = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    fresh = _classifier(module, len(dataset.classes))
    classes = about.get("classes")
    if all(name in given and given[name].shape == own[name].shape for name in fresh) and (
        classes is None or classes == list(dataset.classes)
    ):
        fresh = set()
    fresh -= {name for name in fresh & given.keys() if given[name].shape[1:] != own[name].shape[1:]}
    _expect_fit(path, experiment, about, {name: own[name] for name in own.keys() - fresh}, given, own)
    broken = sorted(name for name in given.keys() - fresh if not torch.isfinite(given[name]).all())
    if broken:
        raise ConfigError(f"init (--init) {path}: {_listed(broken)} not finite; that training has diverged")
    with torch.no_grad():
        for name in own.keys() - fresh:
            own[name].copy_(given[name])  # state_dict shares memory with the module
    if fresh:
        warnings.warn(
            f"{path}: its classifier is not for these {len(dataset.classes)} classes and is left out; {_listed(fresh)} "
            "start fresh",
            FeddureWarning,
            stacklevel=2,
        )


def _classifier(module: Module, classes: int) -> set[str]:
    """The tensors of the last layer with one row a class."""
    found: set[str] = set()
    for path, layer in module.named_modules():
        rows = dict(layer.named_parameters(prefix=path, recurse=False))
        if rows and all(len(tensor.shape) and len(tensor) == classes for tensor in rows.values()):
            found = set(rows)
    return found


def _expect_fit(
    path: Path,
    experiment: Experiment,
    about: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
) -> None:
    shapes = [
        f"{name} is {list(given[name].shape)}, expected {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & given.keys())
        if given[name].shape != wanted[name].shape
    ]
    problems = {
        "missing": sorted(wanted.keys() - given.keys()),
        "of another shape": shapes,
        "not part of the network": sorted(given.keys() - own.keys()),
    }
    said = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
    if said:
        trained = about.get("experiment")
        model = trained.get("model") if isinstance(trained, dict) else about.get("model")
        hint = f"; the file says that it is a '{model}'" if model not in (None, experiment.model) else ""
        raise ConfigError(
            f"init (--init) {path}: its tensors do not fit model '{experiment.model}' ({said}); "
            f"choose the network that was trained, with --model and norm{hint}"
        )


def _listed(names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
