"""Methods by name; a researcher's own by registration or import path."""

from feddure import plugins
from feddure.config import Experiment
from feddure.errors import ConfigError
from feddure.methods.ablations import AvgCReg, AvgFReg, BaselineMAML, CReg, FReg
from feddure.methods.base import Client, Method, Options, OptionsClass
from feddure.methods.fedavg import FedAvg, FedAvgMatched, FedAvgSL, FedProxSL
from feddure.methods.feddure import FedDure
from feddure.methods.fedmatch import FedMatch
from feddure.methods.fedtutor import FedTutor
from feddure.methods.fixmatch import FedAvgFixMatch, FedProxFixMatch
from feddure.methods.local import Local
from feddure.methods.proxyfl import ProxyFL
from feddure.methods.sage import SAGE
from feddure.methods.uda import FedAvgUDA, FedProxUDA
from feddure.methods.validation import check_method

# Neighbours that extend each other share a colour in figures; a new family comes last.
_BUILT_IN: tuple[type[Method], ...] = (
    *(FedAvg, FedAvgMatched, FedAvgSL, FedProxSL),
    *(FedAvgUDA, FedProxUDA, FedAvgFixMatch, FedProxFixMatch, FedMatch, FedDure),
    *(BaselineMAML, FReg, AvgFReg, CReg, AvgCReg),
    *(FedTutor, SAGE, Local, ProxyFL),
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _BUILT_IN}


def sections() -> dict[str, OptionsClass]:
    """The sections of the configuration that known methods read, by name; `options` is for a user's own."""
    found = {name: model for method in METHODS.values() for name, model in method.sections().items()}
    found.pop("options", None)
    return found


def title(name: str) -> str:
    """A method as tables and figures write it."""
    found = METHODS.get(name)
    return (found and found.title) or name


def exchanges(name: str) -> bool:
    """Whether clients of this method send anything, so that there is a common model."""
    found = METHODS.get(name)
    return found is None or found.exchanges


def register(name: str, method: type[Method]) -> None:
    """Make `method: name` mean this class."""
    METHODS[name] = _checked_class(method, name)
    plugins.allow(name)


def make(experiment: Experiment) -> Method:
    """The method an experiment names."""
    found = METHODS.get(experiment.method) or plugins.find(experiment.method, "method", METHODS, ConfigError)
    return check_method(_checked_class(found, experiment.method)(experiment), experiment.method)


def _checked_class(found: object, name: str) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"method: '{name}' is not a subclass of feddure.Method")
    return found


__all__ = ["METHODS", "Client", "Method", "Options", "make", "register", "sections", "title"]
