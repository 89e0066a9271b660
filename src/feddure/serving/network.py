"""The trained network of a run folder or of a safetensors file."""

import json
import shlex
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from feddure import nn as networks
from feddure.config import Experiment
from feddure.errors import RunError
from feddure.nn.network import Network
from feddure.serving.description import KEY, Description, read_description
from feddure.simulation import checkpoint, runs
from feddure.tracking import records


class Classifier(nn.Module):
    """A network behind its own normalisation: 8-bit pixels in, probabilities and logits out."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, description: Description):
        super().__init__()
        self.network = network
        for name, values in (("mean", description.mean), ("std", description.std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # Written so that TorchScript keeps the check: numbers of 0..1 would give confident nonsense.
        if images.dtype != torch.uint8:
            raise ValueError("expected uint8 images [N, channels, height, width] of 0 to 255")
        logits = self.network((images.to(torch.float32) / 255 - self.mean) / self.std)
        return logits.softmax(1), logits


def model_file(source: Path) -> Path:
    """The file with the model: that of a run folder, or the file that was given."""
    if source.is_file():
        return source
    if not source.exists():
        raise RunError(f"{source}: there is no such run folder or model file")
    path = source / runs.MODEL_FILE
    if path.is_file():
        return path
    if (source / records.CONFIG).exists():
        raise RunError(
            f"{source}: the run has not finished, its model comes with the last round; "
            f"go on with: feddure run --out {shlex.quote(str(source))} --resume"
        )
    inside = sorted(str(found.parent) for found in source.glob(f"*/{runs.MODEL_FILE}"))
    if inside:
        raise RunError(f"{source}: holds several runs; name one of them: {', '.join(inside)}")
    raise RunError(f"{source}: not a run folder, {runs.MODEL_FILE} is missing")


def read_bytes(path: Path) -> bytes:
    """The content of a model's file."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror})") from None


def read_network(source: Path, ema: bool = False) -> tuple[Description, nn.Module]:
    """The network of a run folder or safetensors file, ready to evaluate in single precision.

    With `ema` it is the averaged model, which a run with `server.ema` keeps in its last checkpoint.
    """
    path = model_file(source)
    description, tensors = parse_safetensors(read_bytes(path), path)
    module = _new_network(description)
    if ema:
        tensors = _averaged(source, path, module)
    _fill(module, tensors, path, description)
    return description, module.eval().requires_grad_(False)


def parse_safetensors(content: bytes, where: object) -> tuple[Description, dict[str, Tensor]]:
    """What is in a model's safetensors file."""
    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, ValueError) as problem:
        raise RunError(f"{where}: not a whole safetensors file ({problem})") from None
    return read_description(header.get("__metadata__", {}).get(KEY), where), tensors


def _new_network(description: Description) -> nn.Module:
    return networks.make(description.model, description.channels, len(description.classes), description.norm, seed=0)


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path, description: Description) -> None:
    """Put tensors into their places; only integers, the counters of batch norm, may be left out."""
    places: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    kept = module.state_dict().keys()
    wanted = {name for name, place in places.items() if name in kept and place.is_floating_point()}
    wrong = {name for name in places.keys() & tensors.keys() if places[name].shape != tensors[name].shape}
    wrong |= (wanted - tensors.keys()) | (tensors.keys() - places.keys() - kept)
    if wrong:
        raise RunError(
            f"{path}: its tensors are not those of model '{description.model}' ({', '.join(sorted(wrong)[:3])}); "
            "use the code of the network that was trained"
        )
    with torch.no_grad():
        for name in places.keys() & tensors.keys():
            places[name].copy_(tensors[name])


def _averaged(source: Path, path: Path, module: nn.Module) -> dict[str, Tensor]:
    if not source.is_dir():
        raise RunError(f"{source}: the averaged model lies in a run's folder; give that folder with --ema")
    experiment = _experiment(path)
    if experiment.server.ema is None:
        raise RunError(f"{source}: the run kept no averaged model; train with --set server.ema=0.9 to have one")
    if experiment.batch_norm == "static":
        raise RunError(
            f"{source}: the averaged model of a run with batch_norm: static has no statistics of its own; "
            "leave out --ema, or train with batch_norm: aggregate"
        )
    file = source / checkpoint.FILE
    try:
        with safe_open(file, framework="pt") as opened:
            header = checkpoint.read_header(opened.metadata())
            theta, statistics = (opened.get_tensor(f"averaged.{number}") for number in range(2))
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{file}: the averaged model cannot be read ({problem})") from None
    if header.get("experiment") != experiment.fingerprint() or header.get("round") != experiment.rounds:
        raise RunError(f"{file}: not the checkpoint that the finished run left")
    return Network(module, torch.device("cpu"), "fp32").state_dict(theta, statistics)


def _experiment(path: Path) -> Experiment:
    with safe_open(path, framework="pt") as file:
        return Experiment.model_validate(checkpoint.read_header(file.metadata())["experiment"])
