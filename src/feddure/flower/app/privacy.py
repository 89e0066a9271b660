"""Clipping and local differential privacy of a site's updates, at the site.

An update is the difference between the parameters that a client sends and those it received, over all of them
together. `clip-norm` C bounds its Euclidean norm; `dp-noise` z also adds N(0, (z C)²) to every parameter. The run
or the node may ask for either, and the stricter value counts, so a server cannot weaken what the site wants.

*The unit is the site*: two worlds are neighbours where the site has any other images in place of all its own. That
moves a clipped update by at most 2 C, so the accountant's noise multiplier is z / 2. The site takes part whenever it is
asked, and its server knows, so no privacy by sampling is claimed. A server that chooses each round by what it saw in
the last ones gains nothing: the cost of Gaussian noise is one number, Σ 1/z², and a limit on it holds for adaptive
choices too (Feldman and Zrnic, 2021). A site that asks for noise itself keeps a `ledger` of what all runs cost
together, and with `dp-budget` stops there; without `dp-noise` the noise is such that the rounds of a run fit into it.

Batch-norm statistics are no part of the update. Under clipping alone they are sent as they are. Noise would make
variances negative, and without noise nothing would be private, so differential privacy refuses networks that have
them (use `--set norm=group`); it also withholds losses, accuracies and times. Numbers of images are told as they are.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from feddure.errors import ConfigError
from feddure.files import parse_yaml
from feddure.flower.app.ledger import Ledger
from feddure.flower.app.limits import allowed_download
from feddure.flower.app.messages import (
    ANSWER,
    PARAMETERS,
    STATISTICS,
    TASK,
    array_bytes,
    pack,
    random_bytes,
    to_arrays,
)
from feddure.flower.app.private_files import state_folder
from feddure.flower.app.sanitize import disclosed, log, one_line
from feddure.simulation import dp

_PUBLIC = ("site", "client", "round", "memory")
_NODE_KEYS = ("dp-noise", "dp-budget", "dp-delta")
_ROUNDING = 1.01  # of a clipped update that is added to parameters of the network's own precision
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Protection:
    """What is done to an update before it leaves the site; 0 means off."""

    clip_norm: float = 0.0
    noise: float = 0.0
    budget: float = 0.0
    delta: float = dp.DELTA

    def __post_init__(self) -> None:
        # Far beyond these, squares of numbers are no longer numbers, and bounds no longer bounds.
        _expect("clip-norm", self.clip_norm, 1e-9, 1e9)
        _expect("dp-noise", self.noise, 1e-3, 1e6)
        _expect("dp-budget", self.budget, 1e-3, 1e3)
        if (self.noise or self.budget) and not self.clip_norm:
            raise disclosed(ConfigError("dp-noise or dp-budget was given without clip-norm: noise needs a bound"))
        if not 0 < self.delta < 1:
            raise disclosed(ConfigError(f"dp-delta: {self.delta} was given, expected a number between 0 and 1"))

    @staticmethod
    def of_node(node: Mapping[str, Any]) -> "Protection":
        """What the site itself wants."""
        unknown = [key for key in node if key.startswith("dp-") and key not in _NODE_KEYS]
        if unknown:
            raise disclosed(ConfigError(f"{unknown[0]}: not an option of a site; there are {', '.join(_NODE_KEYS)}"))
        norm, noise, budget = (_number(node, key) for key in ("clip-norm", "dp-noise", "dp-budget"))
        return Protection(norm, noise, budget, _number(node, "dp-delta") if "dp-delta" in node else dp.DELTA)

    @staticmethod
    def of(asked: Mapping[str, Any], node: Mapping[str, Any]) -> "Protection":
        """The stricter of what the run asks and what the node wants; budget and δ are the node's."""
        norms = [value for value in (_number(asked, "clip_norm"), _number(node, "clip-norm")) if value]
        wanted = Protection.of_node({**node, "clip-norm": min(norms, default=0.0)})
        noise = wanted.noise
        if wanted.budget and not noise:
            noise = 2 * dp.noise_for(wanted.budget, wanted.delta, _rounds(asked))
        noise = max(noise, _number(asked, "dp_noise"))
        return Protection(wanted.clip_norm, noise, wanted.budget, wanted.delta)


def protect(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod around the client's training: what comes in is finite, and what leaves is protected or does not leave.

    An error goes to the mod around this one, which answers without an update.
    """
    node, asked = context.node_config, message.content.config_records[TASK]
    protection = Protection.of(asked, node)
    ledger = open_ledger(node, protection)
    received = _read_arrays(message.content, allowed_download(state_folder(node), context.run_id))
    if ledger is not None:  # no use in training for an update that may not leave
        ledger.account(protection.delta, protection.budget, protection.noise)
    reply = call_next(message, context)
    if reply.has_error() or PARAMETERS not in reply.content.array_records:
        return reply
    content = _protected(protection, received, reply.content)
    if ledger is not None:
        about = {"clip_norm": protection.clip_norm, "run": one_line(asked["run_name"], 60), "round": asked["round"]}
        log(f"privacy: {ledger.spend(protection.delta, protection.budget, protection.noise, **about)}")
    return Message(content, reply_to=message)


def open_ledger(node: Mapping[str, Any], protection: Protection) -> Ledger | None:
    """The ledger of a site that asks for noise itself; where there is one, nothing leaves without noise."""
    own = Protection.of_node({**node, "clip-norm": protection.clip_norm})
    ledger = Ledger(state_folder(node))
    if not (own.noise or own.budget or ledger.exists):
        return None
    if not protection.noise:
        raise disclosed(
            ConfigError(
                "this site keeps a privacy ledger, but neither the site nor the run asks for noise: start the site "
                "with --dp-noise or --dp-budget"
            ),
            "this site sends no update without noise",
        )
    return ledger


def _read_arrays(content: RecordDict, most: int) -> Arrays:
    """Everything that the server sent, which may be anything, such as one array under any number of names."""
    if (size := array_bytes(content)) > most:
        raise disclosed(ConfigError(f"the server sent {size:,} bytes of arrays, expected at most {most:,}"))
    found: Arrays = {}
    for group, record in content.array_records.items():
        for name, array in record.items():
            shown = one_line(name, 60)
            if name in found or (group == STATISTICS) != (name == STATISTICS):
                raise disclosed(ConfigError(f"the server sent '{shown}' twice or in the wrong place"))
            try:
                found[name] = array.numpy()
                is_finite = bool(np.isfinite(found[name]).all())
            except (TypeError, ValueError, EOFError):
                raise disclosed(ConfigError(f"the server sent '{shown}', which is no array of numbers")) from None
            if not is_finite:
                raise disclosed(ConfigError(f"the server sent '{shown}' with values that are not finite"))
    return found


def _protected(protection: Protection, received: Arrays, content: RecordDict) -> RecordDict:
    """What leaves the site in place of an answer."""
    sent = {name: array.numpy() for name, array in content.array_records[PARAMETERS].items()}
    statistics = {STATISTICS: content.array_records[STATISTICS]} if STATISTICS in content.array_records else {}
    others = [array.numpy() for record in statistics.values() for array in record.values()]
    if not protection.noise:
        for values in (*sent.values(), *others):
            if not np.isfinite(values).all():
                raise disclosed(ConfigError("the update is not finite"))
    elif any(values.size for values in others):
        raise disclosed(
            ConfigError(
                "differential privacy does not cover batch-norm statistics: start the run with --set norm=group"
            )
        )
    if not protection.clip_norm:
        return content
    for name, values in sent.items():
        if name not in received or (received[name].shape, received[name].dtype) != (values.shape, values.dtype):
            raise disclosed(ConfigError(f"the update of '{name}' cannot be clipped: the server did not send its like"))
    before = _joined(received[name] for name in sent)
    update = clip(_joined(sent.values()) - before, protection)
    if protection.noise:
        update = add_noise(update, protection)
    with np.errstate(over="ignore"):
        made = _split(before + update, sent)
    if not all(np.isfinite(values).all() for values in made.values()):
        raise disclosed(ConfigError("the update is not finite"))
    if not protection.noise and not np.linalg.norm(_joined(made.values()) - before) <= (
        _ROUNDING * protection.clip_norm
    ):
        raise disclosed(ConfigError("the parameters are too large to hold an update of this clip-norm"))
    answer = content.config_records[ANSWER]
    if protection.noise:
        answer = pack({name: answer[name] for name in _PUBLIC if name in answer})
    parameters = to_arrays({name: torch.from_numpy(values) for name, values in made.items()}, random_bytes())
    return RecordDict({PARAMETERS: parameters, **statistics, ANSWER: answer})


def clip(update: np.ndarray, protection: Protection) -> np.ndarray:
    """An update in float64, shortened to the norm.

    One that is not finite is an error; under noise it counts as none at all, because an error would tell, outside
    the account, that these images make this model diverge.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(update))
    if not np.isfinite(norm):
        if not protection.noise:
            raise disclosed(ConfigError("the update is not finite"))
        log("warning: the update is not finite; noise alone is sent in its place")
        return np.zeros_like(update)
    return update * min(1.0, protection.clip_norm / norm) if norm else update


def add_noise(update: np.ndarray, protection: Protection) -> np.ndarray:
    """A clipped update with noise from the system's own source of randomness, which nobody can guess.

    It ends on a grid that does not depend on the update: the last bits of a sum of floats would (Mironov, 2012).
    """
    deviation = protection.noise * protection.clip_norm
    bits = np.frombuffer(os.urandom(8 * update.size), dtype=np.uint64)
    grid = 2.0 ** (np.floor(np.log2(deviation)) - 20)
    return np.round((update + deviation * dp.gaussian(bits)) / grid) * grid


def _joined(arrays: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(values.astype(np.float64).ravel() for values in arrays)])


def _split(joined: np.ndarray, like: Arrays) -> Arrays:
    ends = np.cumsum([values.size for values in like.values()])
    parts = np.split(joined, ends[:-1])
    return {
        name: part.reshape(like[name].shape).astype(like[name].dtype) for name, part in zip(like, parts, strict=True)
    }


def _rounds(asked: Mapping[str, Any]) -> int:
    """How many rounds the run is to have, as the server says; with a wrong number the budget ends sooner."""
    tree = parse_yaml(str(asked.get("experiment")))
    rounds = tree.get("rounds") if isinstance(tree, dict) else None
    if not isinstance(rounds, int) or not 1 <= rounds <= 10**6:
        raise disclosed(ConfigError("dp-budget needs the number of rounds, which the server does not tell"))
    return rounds


def _number(options: Mapping[str, Any], key: str) -> float:
    try:
        return float(options.get(key, 0))
    except (TypeError, ValueError):
        raise disclosed(
            ConfigError(f"{key}: {options[key]!r} was given, expected a number"),
            f"the option of privacy '{key}' is not a number",
        ) from None


def _expect(name: str, value: float, least: float, most: float) -> None:
    if value != 0 and not least <= value <= most:
        raise disclosed(
            ConfigError(f"{name}: {value} was given, expected a number from {least:g} to {most:g}, or 0 for off")
        )
