"""feddure: federated semi-supervised learning, exact, fast and measured.

    import feddure
    run = feddure.run("aaai24", dataset="cifar10", setting="dir-dir", method="feddure")
    run.summary, run.metrics, run.model, run.report()
"""

from feddure.api import Run, run
from feddure.config import Experiment
from feddure.data import Dataset
from feddure.data import load as load_dataset
from feddure.data.batches import Batch, Needs
from feddure.errors import FeddureError
from feddure.methods import register as register_method
from feddure.methods.base import Client, Method, cross_entropy, mean
from feddure.nn import register as register_network
from feddure.version import VERSION as __version__

__all__ = [
    "Batch",
    "Client",
    "Dataset",
    "Experiment",
    "FeddureError",
    "Method",
    "Needs",
    "Run",
    "__version__",
    "cross_entropy",
    "load_dataset",
    "mean",
    "register_method",
    "register_network",
    "run",
]
