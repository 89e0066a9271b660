"""Methods by name; a researcher's own by registration or import path."""

from feddure import plugins
from feddure.config import Experiment
from feddure.errors import ConfigError
from feddure.methods.ablations import AvgCReg, AvgFReg, BaselineMAML, CReg, FReg
from feddure.methods.base import Client, Method
from feddure.methods.fedavg import FedAvg, FedAvgMatched, FedAvgSL, FedProxSL
from feddure.methods.feddure import FedDure
from feddure.methods.fedmatch import FedMatch
from feddure.methods.fixmatch import FedAvgFixMatch, FedProxFixMatch
from feddure.methods.uda import FedAvgUDA, FedProxUDA
from feddure.methods.validation import check_method

_BUILT_IN: tuple[type[Method], ...] = (
    *(FedAvg, FedAvgMatched, FedAvgSL, FedProxSL),
    *(FedAvgUDA, FedProxUDA, FedAvgFixMatch, FedProxFixMatch, FedMatch, FedDure),
    *(BaselineMAML, FReg, AvgFReg, CReg, AvgCReg),
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _BUILT_IN}


def register(name: str, method: type[Method]) -> None:
    """Make `method: name` mean this class."""
    METHODS[name] = method


def make(experiment: Experiment) -> Method:
    """The method an experiment names."""
    found = METHODS.get(experiment.method) or plugins.find(experiment.method, "method", METHODS, ConfigError)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"method: '{experiment.method}' is not a subclass of feddure.Method")
    return check_method(found(experiment), experiment.method)


__all__ = ["METHODS", "Client", "Method", "make", "register"]
