"""A trained model from wherever it lies: a run folder, or an exported file of any format."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from feddure.errors import ConfigError, DataError, RunError
from feddure.serving.description import Description
from feddure.serving.formats import Program, run_module, run_onnx, run_torchscript
from feddure.serving.network import Classifier, model_file, read_bytes, read_network


class Model:
    """A trained model that takes 8-bit images and gives the probability of each class."""

    def __init__(self, source: Path, description: Description, program: Program):
        self.source = source
        self.description = description
        self._program = program

    @property
    def classes(self) -> Sequence[str]:
        return self.description.classes

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Probabilities [N, classes] of uint8 images [N, size, size, channels]."""
        size, channels = self.description.size, self.description.channels
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, channels):
            raise DataError(
                f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, {size}, {size}, {channels}]"
            )
        probabilities, _ = self._program(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        if not np.isfinite(probabilities).all():
            raise RunError(f"{self.source}: the model's output is not finite; it cannot be used (training diverged)")
        return probabilities

    def __repr__(self) -> str:
        about = self.description
        shape = f"{about.size} × {about.size} × {about.channels}"
        return f"<feddure model {self.source}: {about.model}, {shape} pixels, {len(about.classes)} classes>"


def load_model(source: Path | str, *, device: str = "auto", ema: bool = False) -> Model:
    """The model of a finished run, or in an exported file.

    `device` is auto, cpu or cuda; `ema` asks for a run's averaged model instead of the global one.
    """
    source = Path(source)
    place = _device(device)
    path = model_file(source)
    content = read_bytes(path)
    kind = detect(content)
    if kind is None:
        raise RunError(f"{path}: not a model that feddure wrote; give a run folder or an exported file")
    if kind == "safetensors":
        description, network = read_network(source, ema)
        return Model(source, description, run_module(Classifier(network, description).eval().to(place), place))
    if ema:
        raise RunError(f"{source}: the averaged model lies in a run's folder; give that folder with --ema")
    if kind == "onnx" and device == "auto":
        place = torch.device("cpu")  # the common onnxruntime has no CUDA
    description, program = (run_onnx if kind == "onnx" else run_torchscript)(content, path, place)
    return Model(source, description, program)


def detect(content: bytes) -> str | None:
    """The format of a file by its first bytes, whatever its name."""
    if content.startswith(b"PK\x03\x04"):
        return "torchscript"
    if content[8:9] == b"{":
        return "safetensors"
    return "onnx" if content.startswith(b"\x08") else None  # the field that comes first: the format's version


def _device(wanted: str) -> torch.device:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device '{wanted}': expected auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was given but no CUDA device is available; use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
