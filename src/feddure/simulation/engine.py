"""The engine: device, arithmetic, lanes, and what one run after the other shares."""

import json
import warnings
from collections.abc import Callable
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from feddure import methods
from feddure.config import EngineOptions, Experiment
from feddure.data.batches import DeviceImages
from feddure.data.dataset import Dataset
from feddure.environment import computes_bf16, give_back_freed_memory, keep_freed_memory
from feddure.errors import ConfigError, FeddureWarning
from feddure.nn.network import Network
from feddure.simulation import compiler
from feddure.simulation import program as programs
from feddure.simulation.lanes import Lanes, Result, Task
from feddure.simulation.program import Program

Found = TypeVar("Found")


class Engine:
    """Trains tasks; keeps one copy of each data set, network and program."""

    def __init__(self, options: EngineOptions):
        self.options = options
        self.device = _device(options.device)
        cuda = self.device.type == "cuda"
        self.precision = ("bf16" if cuda else "fp32") if options.precision == "auto" else options.precision
        if self.precision == "bf16" and not cuda and not computes_bf16():
            raise ConfigError("engine.precision: bf16 was given, but this CPU has no AVX-512 BF16; use auto or fp32")
        self.dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(self.precision, torch.float32)
        self.compiles = cuda and not options.deterministic if options.compile == "auto" else options.compile
        self.captures = cuda
        self.lanes = Lanes(self.device, options.lanes)
        self._aside: torch.cuda.Stream | None = None  # made when it is used: who checks options takes no GPU's memory
        self._images: dict[int, tuple[Dataset, DeviceImages]] = {}  # the data set too, or its id could go to another
        self._networks: dict[str, Network] = {}
        self._programs: dict[str, Program] = {}
        if cuda:
            tf32 = self.precision in ("tf32", "bf16")
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
            torch.backends.cudnn.benchmark = not options.deterministic
            torch.backends.cudnn.deterministic = options.deterministic
        else:
            keep_freed_memory()

    def images(self, dataset: Dataset) -> DeviceImages:
        """The data set on the device."""
        if id(dataset) not in self._images:
            self._images[id(dataset)] = dataset, DeviceImages(dataset, self.device, self.dtype)
        return self._images[id(dataset)][1]

    def program(self, experiment: Experiment, dataset: Dataset) -> Program:
        """The program of this experiment, shared with all that can share it."""
        key = programs.key(experiment, dataset)
        if key not in self._programs:
            network = self._network(experiment, dataset)
            self._programs[key] = Program(experiment, network, len(dataset.classes), self.captures)
        return self._programs[key]

    def run(self, tasks: list[Task], meanwhile: Callable[[], None] = lambda: None) -> list[Result]:
        """Train all tasks; with fewer lanes if the memory does not suffice. On a GPU, `meanwhile` is called then."""
        return self._in_memory(lambda: self.lanes.run(tasks, meanwhile))

    def aside(self, work: Callable[[], Found]) -> tuple[Found, torch.cuda.Event | None]:
        """Do what nothing on the device waits for, on a stream of its own; and what tells when it is done there."""
        if self.device.type != "cuda":
            return work(), None
        if self._aside is None:
            self._aside = torch.cuda.Stream()
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            return self._in_memory(work), torch.cuda.current_stream().record_event()

    def later(self, found: Tensor) -> Callable[[], Tensor]:
        """A small tensor on the host, for which nobody waits before it is asked for."""
        if self.device.type != "cuda":
            return lambda: found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait

    def finish(self) -> None:
        """Wait for all that the device has been told to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def prepare(self, tasks: list[Task]) -> None:
        """Compile and capture what these tasks will need, before any clock runs."""
        self._in_memory(lambda: self.lanes.prepare(tasks))

    def free_memory(self) -> int:
        """Bytes that more tensors on the device may take."""
        if self.device.type != "cuda":
            give_back_freed_memory()
            return psutil.virtual_memory().available
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def release(self) -> None:
        """Give the memory of all programs and data sets back; what was compiled stays."""
        self._programs.clear()
        self._images.clear()
        self.lanes.release()

    def _in_memory(self, work: Callable[[], Found]) -> Found:
        while True:
            try:
                return work()
            except torch.cuda.OutOfMemoryError:
                if not self.lanes.fewer():
                    raise

    def _network(self, experiment: Experiment, dataset: Dataset) -> Network:
        method = methods.make(experiment)
        with_heads = programs.fields(experiment) if method.has_heads else ""
        key = json.dumps([experiment.model, method.norm, dataset.shape, len(dataset.classes), with_heads])
        if key not in self._networks:
            if self.compiles:
                compiler.start(self.device, self.dtype)
            self._networks[key] = programs.make_network(
                experiment, dataset, self.device, self.precision, bool(self.compiles)
            )
        return self._networks[key]


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: cuda was given but no CUDA device is available; use auto or cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.get_device_capability()[0] < 8:
        warnings.warn("this GPU has no fast bf16: consider engine.precision=fp32", FeddureWarning, stacklevel=3)
    return torch.device("cuda")
