"""What must be true of a method that somebody else wrote.

Each mistake is said in words, at the first moment that shows it: when the method or a lane is made, when the server
starts, or at the first step.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from feddure.data.batches import Needs
from feddure.errors import ConfigError
from feddure.methods.base import Client, Method, State


def check_method(method: Method, name: str) -> Method:
    """The method itself if what its class says can be used."""
    if getattr(method.step, "__func__", None) is Method.step:
        raise ConfigError(f"method '{name}' has no step; write `def step(self, client, batch)`, which every method has")
    if not isinstance(method.needs, Needs):
        raise ConfigError(
            f"method '{name}': needs is {method.needs!r}, expected a feddure.Needs; "
            "write, say, needs = feddure.Needs(weak=True)"
        )
    memory: Any = method.memory
    if not isinstance(memory, tuple | list) or not all(isinstance(entry, str) for entry in memory):
        example = f'("{memory}",)' if isinstance(memory, str) else '("name",)'
        raise ConfigError(
            f"method '{name}': memory is {memory!r}, expected a tuple of names in client.state; "
            f"write memory = {example}"
        )
    return method


def check_memory(method: Method, client: Client, name: str) -> None:
    """Refuse a memory of something that `allocate` did not make."""
    for entry in method.memory:
        if entry not in client.state:
            raise ConfigError(
                f"method '{name}': memory names '{entry}', but allocate made {_listed(client.state)} in client.state; "
                f'make client.state["{entry}"] there, or take the name out of memory'
            )


def check_state(state: Any, name: str, hook: str) -> State:
    """The server's state if the server can go on with it; `hook` is the function that made it."""
    if not isinstance(state, dict):
        raise ConfigError(f"method '{name}': {hook} returned {_kind(state)}, expected a dictionary of tensors by name")
    if "theta" not in state:
        raise ConfigError(
            f"method '{name}': {hook} returned {_listed(state)}, expected also 'theta', the global model's parameters, "
            "on which the server's optimiser acts; put them in under this name"
        )
    return state


def check_records(records: Any, name: str) -> State:
    """What a step returned, as tensors by name."""
    if records is None:
        return {}
    if not isinstance(records, Mapping):
        raise ConfigError(
            f"method '{name}': step returned {_kind(records)}, expected a dictionary of tensors by name, or nothing; "
            'write, say, return {"loss": loss.detach()}'
        )
    for entry, value in records.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"method '{name}': step returned '{entry}' as {_kind(value)}, expected a tensor; "
                "return loss.detach(), say, where you have loss.item()"
            )
    return dict(records)


def _listed(names: State) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "nothing"
