"""feddure: federated semi-supervised learning, exact, fast and measured.

import feddure
run = feddure.run("aaai24", dataset="cifar10", setting="dir-dir", method="feddure")
run.summary, run.metrics, run.model, run.report()
feddure.predict(run.folder, "photos/"), feddure.export(run.folder, "model.onnx")
feddure.compare("demo", methods=["fedavg-matched", "fedtutor"]).table, feddure.partition("cifar10", "iid-dir").table
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from feddure.version import VERSION as __version__

# Before PyTorch is imported: its threads spin while they wait for each other, and where other programs keep the cores
# busy, they spin away the time of the one they wait for (a round of the demo then took five times as long).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from feddure.api import Comparison, PartitionView, Run, Sweep, compare, load_dataset, partition, run, sweep
    from feddure.config import Experiment
    from feddure.data.batches import Batch, Needs
    from feddure.data.dataset import Dataset
    from feddure.data.sources import register as register_dataset
    from feddure.errors import FeddureError
    from feddure.methods import register as register_method
    from feddure.methods.base import Client, Method, Options, cross_entropy, mean, record
    from feddure.nn import register as register_network
    from feddure.serving.export import export
    from feddure.serving.load import load_model
    from feddure.serving.predict import predict
    from feddure.tracking.observer import Observer

__all__ = [
    "Batch",
    "Client",
    "Comparison",
    "Dataset",
    "Experiment",
    "FeddureError",
    "Method",
    "Needs",
    "Observer",
    "Options",
    "PartitionView",
    "Run",
    "Sweep",
    "__version__",
    "compare",
    "cross_entropy",
    "export",
    "load_dataset",
    "load_model",
    "mean",
    "partition",
    "predict",
    "record",
    "register_dataset",
    "register_method",
    "register_network",
    "run",
    "sweep",
]

# Torch takes seconds to import, and `feddure --help` should not: names are found when they are first used.
_FOUND_IN = {
    "Batch": "data.batches",
    "Client": "methods.base",
    "Dataset": "data.dataset",
    "Experiment": "config",
    "FeddureError": "errors",
    "Method": "methods.base",
    "Needs": "data.batches",
    "Options": "methods.base",
    "Observer": "tracking.observer",
    **dict.fromkeys(("Comparison", "PartitionView", "Run", "Sweep", "compare", "partition", "run", "sweep"), "api"),
    "cross_entropy": "methods.base",
    "export": "serving.export",
    "load_dataset": "api",
    "load_model": "serving.load",
    "mean": "methods.base",
    "predict": "serving.predict",
    "record": "methods.base",
}
_REGISTERS = {"register_dataset": "data.sources", "register_method": "methods", "register_network": "nn"}


def __getattr__(name: str) -> Any:
    if name in _FOUND_IN:
        return getattr(import_module(f"feddure.{_FOUND_IN[name]}"), name)
    if name in _REGISTERS:
        return import_module(f"feddure.{_REGISTERS[name]}").register
    raise AttributeError(f"module 'feddure' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
