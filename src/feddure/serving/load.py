"""A trained model from wherever it lies: a run folder, or an exported file of any format.

Every file holds a description of its model as one JSON text: the metadata `feddure` of a safetensors file, the
metadata property `feddure` of an ONNX file, the extra file `feddure.json` of a TorchScript file. Exported programs
take uint8 images [N, channels, size, size] of 0 to 255 and give probabilities and logits [N, classes]; the
normalisation is part of the model.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from feddure import experiments, methods, plugins, pretrained
from feddure import nn as networks
from feddure.data.sources.images import FULL_DEPTH, LEAST_DEPTH
from feddure.data.sources.own import options_of
from feddure.errors import ConfigError, DataError, RunError, first_line
from feddure.nn.network import Network
from feddure.pretrained import MOST_BYTES
from feddure.simulation import checkpoint, runs
from feddure.tracking import records
from feddure.version import VERSION

KEY = "feddure"
"""The name under which a file keeps its description."""
EXTRA_FILE = f"{KEY}.json"
INPUT, OUTPUTS = "images", ("probabilities", "logits")

MOST_SIZE, MOST_CLASSES = 4096, 2**16
"""A file can ask for images of no more pixels a side, and for no more outputs."""

Program = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""uint8 images [N, channels, size, size] to probabilities and logits."""


class Description(BaseModel):
    """What has to be known to use a model: its network, its classes in the order of its outputs, its images."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    model: str
    norm: str
    classes: tuple[str, ...] = Field(min_length=1, max_length=MOST_CLASSES)
    mean: tuple[float, ...]  # per channel, of pixels / 255
    std: tuple[float, ...]
    size: int = Field(ge=1, le=MOST_SIZE)  # images are size × size pixels
    channels: Literal[1, 3]
    depth: int = Field(FULL_DEPTH, ge=LEAST_DEPTH, le=FULL_DEPTH)  # bits of the grey values in 16-bit files

    @model_validator(mode="after")
    def _whole(self) -> "Description":
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError("a mean and a std for each channel")
        if re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(self.classes)):
            raise ValueError("signs that a terminal would take for commands")
        return self

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return self.channels, self.size, self.size

    def to_json(self) -> str:
        """The description as text, with the version that wrote it."""
        return json.dumps({"version": VERSION, **self.model_dump()}, ensure_ascii=False)

    @staticmethod
    def from_json(text: str | bytes | None, where: object) -> "Description":
        """The description in a file: an exported one, or the longer header of a run's own model."""
        try:
            header: dict[str, Any] = json.loads(text or "{}")
            if "experiment" in header:
                side, _, channels = header["shape"]
                depth = options_of(header["experiment"]["dataset"]).depth
                header |= {"model": header["experiment"]["model"], "size": side, "channels": channels, "depth": depth}
            return Description.model_validate(header)
        except (DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _not_ours(where) from None


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
        expected = len(images), len(self.classes)
        if probabilities.dtype.kind != "f" or probabilities.shape != expected:
            given = f"{probabilities.dtype} {list(probabilities.shape)}"
            raise RunError(f"{self.source}: the model gives {given}, expected probabilities {list(expected)}")
        if not np.isfinite(probabilities).all():
            raise RunError(f"{self.source}: the model's output is not finite; it cannot be used (training diverged)")
        return probabilities


MODELS = ("auto", "averaged", "last")
"""Which model of a run: its average over rounds where there is one, or the one or the other."""


def load_model(source: Path | str, *, device: str = "auto", model: str = "auto", allow_modules: bool = False) -> Model:
    """The model of a finished run, or in a safetensors or ONNX file.

    `device` is auto, cpu or cuda. Of a run, `model` is "averaged" (over rounds), "last" (of the last round), or
    "auto": the averaged one where the run has it. A network of the user's own is imported from the module that the file
    names with `allow_modules` alone.
    """
    source = Path(source)
    target = _device(device)
    path, content = read_file(source, model)
    kind = detect(content)
    if kind is None:
        raise _not_ours(path)
    if kind == "safetensors":
        description, network = read_network(source, model, allow_modules)
        return Model(source, description, run_module(Classifier(network, description).eval().to(target), target))
    if kind == "torchscript":
        raise RunError(
            f"{path}: a file of PyTorch (TorchScript or pickle) is a program that may do anything, so it is not run "
            "here; give the run's folder, or a safetensors or ONNX file that `feddure export` made of it"
        )
    if device == "auto":
        target = torch.device("cpu")  # the common onnxruntime has no CUDA
    return Model(source, *run_onnx(content, path, target))


def read_file(source: Path, model: str = "auto") -> tuple[Path, bytes]:
    """The file with the model, that of a run folder or the one that was given, and what is in it."""
    if model not in MODELS:
        raise ConfigError(f"model '{model}': expected one of {', '.join(MODELS)}")
    if model != "auto" and source.is_file():
        raise RunError(f"{source}: a file holds one model; '{model}' can be asked of a run's folder")
    path = source / runs.MODEL_FILE if source.is_dir() else source
    if model != "last" and path.exists() and (source / runs.AVERAGED_FILE).exists():  # a run without both goes on
        path = source / runs.AVERAGED_FILE
    if not source.exists():
        raise RunError(f"{source}: there is no such run folder or model file")
    if not path.is_file():
        if (source / records.CONFIG).exists():
            raise RunError(
                f"{source}: the run has not finished, its model comes with the last round; "
                f"go on with: {runs.how_to_resume(source, experiments.load(file=source / records.CONFIG))}"
            )
        inside = sorted(str(found.parent) for found in source.glob(f"*/{runs.MODEL_FILE}"))
        if inside:
            raise RunError(f"{source}: holds several runs; name one of them: {', '.join(inside)}")
        raise RunError(f"{source}: not a run folder, {runs.MODEL_FILE} is missing")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RunError(f"{path}: is larger than {MOST_BYTES // 2**30} GiB, the most that a model file may have")
        return path, path.read_bytes()
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror})") from None


def detect(content: bytes) -> str | None:
    """The format of a file by its first bytes, whatever its name."""
    if content.startswith(b"PK\x03\x04"):
        return "torchscript"
    if content[8:9] == b"{":
        return "safetensors"
    return "onnx" if content.startswith(b"\x08") else None  # the field that comes first: the format's version


def read_network(source: Path, model: str = "auto", allow_modules: bool = False) -> tuple[Description, nn.Module]:
    """The network of a run folder or safetensors file, ready to evaluate in single precision."""
    path, content = read_file(source, model)
    experiment = runs.read_config(source) if source.is_dir() else None
    if experiment is not None and not methods.exchanges(experiment.method):
        raise RunError(f"{source}: its clients trained alone (method '{experiment.method}'); there is no common model")
    about, tensors = parse_safetensors(content, path)
    if allow_modules:
        plugins.allow(about.model)
    module = networks.make(about.model, about.channels, len(about.classes), about.norm, seed=0)
    if model == "averaged" and path.name != runs.AVERAGED_FILE:
        tensors = _averaged_of_0_1(source, module)
    _fill(module, tensors, path, about)
    return about, module.eval().requires_grad_(False)


def parse_safetensors(content: bytes, where: object) -> tuple[Description, dict[str, Tensor]]:
    """What is in a model's safetensors file."""
    try:
        tensors, text = pretrained.parse(content)
    except ValueError as problem:
        raise RunError(f"{where}: not a whole safetensors file ({problem})") from None
    return Description.from_json(text, where), tensors


def run_module(module: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> Program:
    """The program of a `Classifier`, or of what TorchScript has made of one."""

    def program(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            probabilities, logits = module(torch.from_numpy(images).to(device))
        return probabilities.cpu().numpy(), logits.cpu().numpy()

    return program


def run_onnx(content: bytes, where: object, device: torch.device) -> tuple[Description, Program]:
    """The program in an ONNX file, run by onnxruntime."""
    runtime = import_extra("onnxruntime")
    content = _without_files(content, where)
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
        raise RunError(f"{where}: not an ONNX file that onnxruntime can read ({first_line(problem)})") from None

    def program(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        try:
            probabilities, logits = session.run(list(OUTPUTS), {INPUT: images})
        except Exception as problem:
            raise RunError(f"{where}: onnxruntime cannot run this model ({first_line(problem)})") from None
        return np.asarray(probabilities), np.asarray(logits)

    return Description.from_json(session.get_modelmeta().custom_metadata_map.get(KEY), where), program


def _without_files(content: bytes, where: object) -> bytes:
    """The model, and nothing that was not looked at; one whose tensors lie in other files is refused.

    onnxruntime would read such files, wherever they are, also for a model that it is given as bytes.
    """
    onnx = import_extra("onnx")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as problem:  # protobuf's own errors
        raise RunError(f"{where}: not a whole ONNX file ({first_line(problem)})") from None
    left = [model]
    while left:
        message = left.pop()
        if isinstance(message, onnx.TensorProto):
            if message.external_data or message.data_location == onnx.TensorProto.EXTERNAL:
                raise RunError(f"{where}: keeps tensors in other files, which are not read; export it as one file")
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                left += value if isinstance(value, Sequence) else [value]
    model.DiscardUnknownFields()
    return model.SerializeToString()


def import_extra(name: str) -> Any:
    """A package that only ONNX files need."""
    try:
        return import_module(name)
    except ImportError as problem:
        raise ConfigError(f"ONNX files need {name} ({problem}): pip install 'feddure[onnx]'") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn about packages that are not needed and about their own future."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path, description: Description) -> None:
    """Put tensors into their places; only integers, the counters of batch norm, may be left out."""
    own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    kept = module.state_dict().keys()
    wanted = {name for name, tensor in own.items() if name in kept and tensor.is_floating_point()}
    wrong = {name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape}
    wrong |= (wanted - tensors.keys()) | (tensors.keys() - own.keys() - kept)
    if wrong:
        raise RunError(
            f"{path}: its tensors are not those of model '{description.model}' ({', '.join(sorted(wrong)[:3])}); "
            "use the code of the network that was trained"
        )
    with torch.no_grad():
        for name in own.keys() & tensors.keys():
            own[name].copy_(tensors[name])


def _averaged_of_0_1(source: Path, module: nn.Module) -> dict[str, Tensor]:
    """The average in the last checkpoint of a run of 0.1, which wrote no file of its own for it."""
    experiment = runs.read_config(source)
    if experiment is None or experiment.server.ema is None or experiment.batch_norm == "static":
        raise RunError(f"{source}: the run kept no averaged model; train with --set server.ema=0.9 to have one")
    file = source / checkpoint.FILE
    try:
        with safe_open(file, framework="pt") as opened:
            header = checkpoint.read_header(opened.metadata())
            theta, statistics = (opened.get_tensor(f"averaged.{number}") for number in range(2))
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{file}: the averaged model cannot be read ({problem})") from None
    if header.get("round") != experiment.rounds:
        raise RunError(f"{file}: not the checkpoint that the finished run left")
    return Network(module, torch.device("cpu"), "fp32").state_dict(theta, statistics)


def _device(wanted: str) -> torch.device:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device '{wanted}': expected auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was given but no CUDA device is available; use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _not_ours(where: object) -> RunError:
    return RunError(f"{where}: not a model that feddure wrote; give a run folder or an exported file")
