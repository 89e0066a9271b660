"""A trained model as one file for other programs, compared with the original before it is put in place."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from feddure import rng as draws
from feddure.errors import ConfigError, FeddureError, RunError
from feddure.files import write_whole
from feddure.serving import formats
from feddure.serving.description import Description
from feddure.serving.load import detect
from feddure.serving.network import Classifier, model_file, parse_safetensors, read_bytes, read_network

WRITERS: dict[str, Callable[[nn.Module, Description], bytes]] = {
    "safetensors": formats.write_safetensors,
    "onnx": formats.write_onnx,
    "torchscript": formats.write_torchscript,
}
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torchscript": ".pt"}
TOLERANCE = 1e-4
"""The largest difference between the original's outputs and the exported model's."""


def export(
    source: Path | str,
    out: Path | str | None = None,
    *,
    format: str | None = None,
    ema: bool = False,
    force: bool = False,
) -> Path:
    """Write the model of a run (or of a safetensors file) as safetensors, ONNX or TorchScript; returns the file.

    Without `out` the file lies in the run's folder, or beside the given file, and has its name; without `format` the
    ending of `out` decides.
    """
    source = Path(source)
    kind = _format(format, None if out is None else Path(out))
    path = model_file(source)
    target = _default_target(source, kind) if out is None else Path(out)
    _check_target(target, path, force)
    if detect(read_bytes(path)) in ("onnx", "torchscript"):
        raise RunError(f"{path}: is an exported file, which cannot be exported again; give the run's folder")
    description, network = read_network(source, ema)
    try:
        content = WRITERS[kind](network, description)
    except FeddureError:
        raise
    except Exception as problem:  # a user's own network may do what an exporter cannot follow
        reason = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        raise RunError(f"{source}: model '{description.model}' cannot be written as {kind} ({reason})") from problem
    _compare(content, kind, network, description, source)
    write_whole(target, content, RunError)
    return target


def _format(given: str | None, out: Path | None) -> str:
    names = ", ".join(WRITERS)
    if given is None:
        found = [kind for kind, suffix in SUFFIXES.items() if out is not None and out.suffix == suffix]
        if not found:
            raise ConfigError(
                f"no format: give --format ({names}), or an --out that ends in {', '.join(SUFFIXES.values())}"
            )
        return found[0]
    if given not in WRITERS:
        raise ConfigError(f"format '{given}': expected one of {names}")
    other = next((kind for kind, suffix in SUFFIXES.items() if out is not None and out.suffix.lower() == suffix), given)
    if other != given:
        raise ConfigError(
            f"{out}: the ending means {other}, but --format {given} was given; end it in {SUFFIXES[given]}, "
            "or leave out --format"
        )
    return given


def _default_target(source: Path, kind: str) -> Path:
    """Named after the run, so that files of several runs can lie side by side."""
    stem = source / source.resolve().name if source.is_dir() else source.with_suffix("")
    return stem.with_name(stem.name + SUFFIXES[kind])


def _check_target(target: Path, source: Path, force: bool) -> None:
    if target.resolve() == source.resolve():
        raise RunError(f"{target}: is the model to export; choose another --out")
    if target.is_dir():
        raise RunError(f"{target}: is a folder; give --out the name of a file")
    if target.exists() and not force:
        raise RunError(f"{target}: is there already; add --force to replace it, or choose another --out")
    if not target.parent.is_dir():
        raise RunError(f"{target.parent}: there is no such folder; make it, or choose another --out")


def _compare(content: bytes, kind: str, network: nn.Module, description: Description, source: Path) -> None:
    """Read the exported model back and try it on noise, one image and several."""
    device = torch.device("cpu")
    original = formats.run_module(Classifier(network, description).eval(), device)
    if kind == "safetensors":
        read, tensors = parse_safetensors(content, source)
        same = read == description and all(
            torch.equal(tensor, tensors[name]) for name, tensor in network.state_dict().items()
        )
    else:
        run = formats.run_onnx if kind == "onnx" else formats.run_torchscript
        read, exported = run(content, source, device)
        same = read == description and all(_agree(original, exported, count, description) for count in (1, 3))
    if not same:
        raise RunError(
            f"{source}: model '{description.model}' computes something else as {kind}, so nothing was written; "
            "its forward may depend on values or on the number of images in a way that the format cannot hold"
        )


def _agree(original: formats.Program, exported: formats.Program, count: int, description: Description) -> bool:
    images = draws.integers(256, count * math.prod(description.input_shape), "export", count)
    batch = images.astype(np.uint8).reshape(count, *description.input_shape)
    try:
        pairs = zip(original(batch), exported(batch), strict=True)
        return all(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for a, b in pairs)
    except Exception:  # a batch size that the exported program does not take
        return False
