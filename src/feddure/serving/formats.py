"""Three kinds of model files, each written to bytes and run from bytes.

All take uint8 images [N, channels, size, size] of 0 to 255 and give probabilities and logits [N, classes]; the
normalisation is part of the model. The description is one JSON text: the metadata `feddure` of a safetensors
file, the metadata property `feddure` of an ONNX file, the extra file `feddure.json` of a TorchScript file.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from feddure.errors import ConfigError, RunError
from feddure.serving.description import KEY, Description, read_description
from feddure.serving.network import Classifier

OPSET = 18
"""ONNX operators are those of this version: what every runtime of the last years knows."""
INPUT, OUTPUTS = "images", ("probabilities", "logits")
EXTRA_FILE = f"{KEY}.json"

Program = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""uint8 images [N, channels, size, size] to probabilities and logits."""


def write_safetensors(network: nn.Module, description: Description) -> bytes:
    """The network's whole state in single precision, for `load_state_dict`."""
    tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in network.state_dict().items()}
    return safetensors.torch.save(tensors, {KEY: description.to_json()})


def write_onnx(network: nn.Module, description: Description) -> bytes:
    """An ONNX graph with a free batch size."""
    onnx = _optional("onnx")
    for name in ("onnxscript", "onnxruntime"):  # for PyTorch's exporter, and to compare what it made
        _optional(name)
    example = torch.zeros(2, *description.input_shape, dtype=torch.uint8)
    with _quiet():
        program = torch.onnx.export(
            Classifier(network, description).eval(),
            (example,),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_shapes={INPUT: {0: torch.export.Dim("batch")}},
            external_data=False,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _forget_origin(model.graph)
    model.metadata_props.add(key=KEY, value=description.to_json())
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def write_torchscript(network: nn.Module, description: Description) -> bytes:
    """A TorchScript program: the network as traced, behind a scripted check and normalisation."""
    buffer = io.BytesIO()
    with _quiet(), torch.no_grad():
        traced = torch.jit.trace(network, torch.zeros(2, *description.input_shape), check_trace=False)
        scripted = torch.jit.script(Classifier(traced, description).eval())
        torch.jit.save(scripted, buffer, _extra_files={EXTRA_FILE: description.to_json().encode()})
    return buffer.getvalue()


def run_module(module: Callable[..., tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Program:
    """The program of a `Classifier`, or of what TorchScript made of one."""

    def program(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            probabilities, logits = module(torch.from_numpy(images).to(device))
        return probabilities.cpu().numpy(), logits.cpu().numpy()

    return program


def run_torchscript(content: bytes, where: object, device: torch.device) -> tuple[Description, Program]:
    """The program in a TorchScript file."""
    extra = {EXTRA_FILE: ""}
    try:
        with _quiet():
            module = torch.jit.load(io.BytesIO(content), map_location=device, _extra_files=extra)
    except RuntimeError:
        raise RunError(f"{where}: not a whole TorchScript file") from None
    text: str | bytes = extra[EXTRA_FILE]
    return read_description(text.decode() if isinstance(text, bytes) else text, where), run_module(module, device)


def run_onnx(content: bytes, where: object, device: torch.device) -> tuple[Description, Program]:
    """The program in an ONNX file, run by onnxruntime."""
    runtime = _optional("onnxruntime")
    providers = ["CPUExecutionProvider"]
    if device.type == "cuda":
        if "CUDAExecutionProvider" not in runtime.get_available_providers():
            raise ConfigError("this onnxruntime has no CUDA; use --device cpu, or install onnxruntime-gpu in its place")
        providers.insert(0, "CUDAExecutionProvider")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    try:
        session = runtime.InferenceSession(content, options, providers=providers)
    except Exception as problem:  # onnxruntime's own errors have no common class that it exports
        raise RunError(f"{where}: not an ONNX file that onnxruntime can read ({_first_line(problem)})") from None
    description = read_description(session.get_modelmeta().custom_metadata_map.get(KEY), where)

    def program(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        probabilities, logits = session.run(list(OUTPUTS), {INPUT: images})
        return probabilities, logits

    return description, program


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as problem:
        raise ConfigError(f"ONNX files need {name} ({problem}): pip install 'feddure[onnx]'") from None


def _forget_origin(graph: Any) -> None:
    """Drop the exporter's notes: they repeat the source code, with the paths of the machine it lay on."""
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn about packages that are not needed and about their own future."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0] or type(problem).__name__
