"""A trained model as one file for other programs, compared with the original before it is put in place."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from feddure import rng
from feddure.errors import ConfigError, FeddureError, RunError, first_line
from feddure.files import write_whole
from feddure.serving import load
from feddure.serving.load import Classifier, Description, Program

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torchscript": ".pt"}
OPSET = 18
"""ONNX operators are those of this version: what every runtime of the last years knows."""
TOLERANCE = 1e-4
"""The largest difference between the original's outputs and the exported model's."""


def export(
    source: Path | str,
    out: Path | str | None = None,
    *,
    format: str | None = None,
    model: str = "auto",
    force: bool = False,
    allow_modules: bool = False,
) -> Path:
    """Write the model of a run (or of a safetensors file) as safetensors, ONNX or TorchScript; returns the file.

    `model` is "averaged", "last" or "auto", as in `load_model`. Without `out` the file lies in the run's folder, or
    beside the given file, and has its name; without `format` the ending of `out` decides, and without both it is ONNX.
    `allow_modules` is as in `load_model`.
    """
    source = Path(source)
    kind = _format(format, None if out is None else Path(out))
    path, content = load.read_file(source, model)
    target = _default_target(source, kind) if out is None else Path(out)
    _check_target(target, path, force)
    if load.detect(content) in ("onnx", "torchscript"):
        raise RunError(f"{path}: is an exported file, which cannot be exported again; give the run's folder")
    description, network = load.read_network(source, model, allow_modules)
    try:
        written = _WRITERS[kind](network, description)
    except FeddureError:
        raise
    except Exception as problem:  # a user's own network may do what an exporter cannot follow
        reason = first_line(problem)
        raise RunError(f"{source}: model '{description.model}' cannot be written as {kind} ({reason})") from problem
    if not _is_same(written, kind, network, description):
        raise RunError(
            f"{source}: model '{description.model}' computes something else as {kind}, so nothing was written; "
            "its forward may depend on values or on the number of images in a way that the format cannot hold"
        )
    write_whole(target, written, RunError)
    return target


def write_safetensors(network: nn.Module, description: Description) -> bytes:
    """The network's whole state in single precision, for `load_state_dict`."""
    tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in network.state_dict().items()}
    return safetensors.torch.save(tensors, {load.KEY: description.to_json()})


def write_onnx(network: nn.Module, description: Description) -> bytes:
    """An ONNX graph with a free batch size."""
    onnx = load.import_extra("onnx")
    for name in ("onnxscript", "onnxruntime"):  # for PyTorch's exporter, and to compare what it made
        load.import_extra(name)
    example = torch.zeros(2, *description.input_shape, dtype=torch.uint8)
    with load.quiet():
        program = torch.onnx.export(
            Classifier(network, description).eval(),
            (example,),
            dynamo=True,
            opset_version=OPSET,
            input_names=[load.INPUT],
            output_names=list(load.OUTPUTS),
            dynamic_shapes={load.INPUT: {0: torch.export.Dim("batch")}},
            external_data=False,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _forget_origin(model.graph)
    model.metadata_props.add(key=load.KEY, value=description.to_json())
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def write_torchscript(network: nn.Module, description: Description) -> bytes:
    """A TorchScript program: the network as traced, behind a scripted check and normalisation."""
    buffer = io.BytesIO()
    with load.quiet(), torch.no_grad():
        traced = torch.jit.trace(network, torch.zeros(2, *description.input_shape), check_trace=False)
        scripted = torch.jit.script(Classifier(traced, description).eval())
        torch.jit.save(scripted, buffer, _extra_files={load.EXTRA_FILE: description.to_json().encode()})
    return buffer.getvalue()


_WRITERS: dict[str, Callable[[nn.Module, Description], bytes]] = {
    "safetensors": write_safetensors,
    "onnx": write_onnx,
    "torchscript": write_torchscript,
}


def _forget_origin(graph: Any) -> None:
    """Drop the exporter's notes: they repeat the source code, with the paths of the machine it lay on."""
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _format(given: str | None, out: Path | None) -> str:
    names = ", ".join(SUFFIXES)
    meant = next((kind for kind, suffix in SUFFIXES.items() if out is not None and out.suffix.lower() == suffix), None)
    if given is None and meant is None and out is not None:
        raise ConfigError(
            f"no format: give --format ({names}), or an --out that ends in {', '.join(SUFFIXES.values())}"
        )
    if given is not None and given not in SUFFIXES:
        raise ConfigError(f"format '{given}': expected one of {names}")
    if given and meant and given != meant:
        raise ConfigError(
            f"{out}: the ending means {meant}, but --format {given} was given; end it in {SUFFIXES[given]}, "
            "or leave out --format"
        )
    return given or meant or "onnx"


def _default_target(source: Path, kind: str) -> Path:
    """Named after the run, so that files of several runs can lie side by side."""
    stem = source / source.resolve().name if source.is_dir() else source.with_suffix("")
    return stem.with_name(stem.name + SUFFIXES[kind])


def _check_target(target: Path, source: Path, force: bool) -> None:
    if target.resolve() == source.resolve():
        raise RunError(f"{target}: is the model to export; choose another --out")
    if target.exists() and not force:
        raise RunError(f"{target}: is there already; add --force to replace it, or choose another --out")


def _is_same(content: bytes, kind: str, network: nn.Module, description: Description) -> bool:
    """Read the exported model back and try it on noise, one image and several."""
    if kind == "safetensors":
        read, tensors = load.parse_safetensors(content, kind)
        return read == description and all(
            torch.equal(tensor, tensors[name]) for name, tensor in network.state_dict().items()
        )
    device = torch.device("cpu")
    original = load.run_module(Classifier(network, description).eval(), device)
    read, exported = load.run_onnx(content, kind, device) if kind == "onnx" else _run_torchscript(content)
    return read == description and all(_agree(original, exported, count, description) for count in (1, 3))


def _run_torchscript(content: bytes) -> tuple[Description, Program]:
    """The program that was written a moment ago; a file of somebody else's is never run."""
    extra: dict[str, Any] = {load.EXTRA_FILE: ""}
    with load.quiet():
        module = torch.jit.load(io.BytesIO(content), map_location="cpu", _extra_files=extra)
    return Description.from_json(extra[load.EXTRA_FILE], "torchscript"), load.run_module(module, torch.device("cpu"))


def _agree(original: Program, exported: Program, count: int, description: Description) -> bool:
    images = rng.integers(256, count * math.prod(description.input_shape), "export", count)
    batch = images.astype(np.uint8).reshape(count, *description.input_shape)
    try:
        pairs = zip(original(batch), exported(batch), strict=True)
        return all(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for a, b in pairs)
    except Exception:  # a batch size that the exported program does not take
        return False
