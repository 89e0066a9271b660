"""What must be true of a method that somebody else wrote.

Each mistake is said in words, at the first moment that shows it: when the method or a lane is made, when the server
starts, or at the first step.
"""

import difflib
import inspect
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from feddure.data.batches import Needs
from feddure.errors import ConfigError, FeddureWarning
from feddure.methods.base import Client, Method, State


def check_method(method: Method, name: str) -> Method:
    """The method itself if what its class says can be used."""
    if getattr(method.step, "__func__", None) is Method.step:
        raise ConfigError(f"method '{name}' has no step; write `def step(self, client, batch)`, which every method has")
    _check_hooks(method, name)
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


def _check_hooks(method: Method, name: str) -> None:
    """Refuse functions that cannot take what they are called with; note those that are nearly called as one."""
    hooks = {hook: base for hook, base in vars(Method).items() if hook[0] != "_" and inspect.isfunction(base)}
    for own_name, function in vars(type(method)).items():
        close = difflib.get_close_matches(own_name, hooks, n=1, cutoff=0.88)
        if inspect.isfunction(function) and own_name not in vars(Method) and close:
            warnings.warn(
                f"method '{name}': nothing calls {own_name}; did you mean {close[0]}?", FeddureWarning, stacklevel=2
            )
    for hook, base in hooks.items():
        wanted = [*inspect.signature(base).parameters][1:]
        own = inspect.signature(getattr(method, hook))
        try:
            own.bind(*wanted)
        except TypeError:
            raise ConfigError(
                f"method '{name}': {hook} takes ({', '.join(own.parameters)}), expected ({', '.join(wanted)}); write "
                f"`def {hook}(self, {', '.join(wanted)})`"
            ) from None


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


def check_heads(heads: Any, name: str) -> dict[str, Module]:
    """A method's heads if the network can carry them."""
    if not isinstance(heads, Mapping) or not all(isinstance(head, Module) for head in heads.values()):
        raise ConfigError(f"method '{name}': heads returned {heads!r}, expected torch.nn.Modules by name")
    for head_name, head in heads.items():
        if "." in head_name or any(buffer.is_floating_point() for buffer in head.buffers()):
            raise ConfigError(
                f"method '{name}': head '{head_name}' has statistics of its own or a dot in its name, and only "
                "parameters travel with the model; use group norm or layer norm in place of batch norm"
            )
    return dict(heads)


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


@contextmanager
def watching_step(method: Method, name: str, network_draws: bool) -> Iterator[None]:
    """Note a step that changes its method, which all clients share, or that draws from streams that nobody seeds."""
    before, streams = _kept(method), _streams()
    yield
    nothing = (None, -1)
    for key, (value, mark) in _kept(method).items():
        old, old_mark = before.get(key, nothing)
        if value is old and mark == old_mark:
            continue
        warnings.warn(
            f"method '{name}': its step changes self.{key}, which all clients share and which a captured step on a GPU "
            "changes once; keep it in client.state, which allocate makes",
            FeddureWarning,
            stacklevel=3,
        )
    if not network_draws and _streams() != streams:
        warnings.warn(
            f"method '{name}': its step draws random numbers that the seed does not decide: a run cannot be repeated "
            "or resumed to the same numbers; draw in start_round, with feddure.rng and client.key",
            FeddureWarning,
            stacklevel=3,
        )


def _kept(method: Method) -> dict[str, tuple[Any, int]]:
    """What a method keeps, each with a mark that changes when it is changed in place."""

    def mark(value: Any) -> int:
        if isinstance(value, Tensor):
            return value._version
        return len(value) if isinstance(value, list | dict | set) else 0

    return {key: (value, mark(value)) for key, value in vars(method).items()}


def _streams() -> list[Any]:
    """The states of the streams of random numbers that a step could draw from."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    return [*(bytes(state.numpy()) for state in states), random.getstate(), repr(np.random.get_state(legacy=False))]


def _listed(names: State) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "nothing"
