"""Clipping and local differential privacy of a site's updates, by Flower's own mods.

Both are off unless the run or the node asks for them; where both do, the stricter value counts, so a site can
protect itself whatever the server asks. An update is the difference between the parameters that a client sends and
those it received, over all of them together. `clipping-norm` bounds its Euclidean norm. `dp-epsilon` also adds Gaussian
noise to every parameter, so that what one round reveals of the site's images is (epsilon, delta)-differentially
private; rounds add up, and numbers of images are told as they are.

Batch-norm statistics are no part of the update. Under clipping alone they are sent as they are. Noise would make
variances negative, and without noise nothing would be private, so differential privacy refuses networks that have
them (use `norm=group`); it also withholds the round's losses and other means, which no noise covers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable

from feddure.errors import ConfigError
from feddure.flower.app.messages import ANSWER, PARAMETERS, STATISTICS, TASK, pack_answer
from feddure.flower.app.sanitize import log

_NORM_KEY = "clipping_norm"  # where Flower's mod looks for the norm
_PUBLIC = ("site", "client", "round", "pid", "seconds", "memory")


@dataclass(frozen=True)
class Protection:
    """What is done to an update before it leaves the site; 0 means off."""

    clipping_norm: float = 0.0
    epsilon: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in (("clipping norm", self.clipping_norm), ("dp-epsilon", self.epsilon)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}: {value} was given, expected a number above 0, or 0 for off")
        if self.epsilon and not self.clipping_norm:
            raise ConfigError("dp-epsilon was given without a clipping norm: noise needs a bound on the update")
        if self.epsilon > 1:
            raise ConfigError(f"dp-epsilon: {self.epsilon} was given, expected at most 1, where its formula holds")
        if self.epsilon and not 0 < self.delta < 1:
            raise ConfigError(f"dp-delta: {self.delta} was given, expected a number between 0 and 1")

    @staticmethod
    def of(asked: Mapping[str, Any], node: Mapping[str, Any]) -> "Protection":
        """The stricter of what the run asks and what the node wants."""
        delta = [float(value) for value in (asked.get("dp_delta", 0), node.get("dp-delta", 0)) if float(value) > 0]
        return Protection(
            _stricter(asked.get("clipping_norm", 0), node.get("clipping-norm", 0)),
            _stricter(asked.get("dp_epsilon", 0), node.get("dp-epsilon", 0)),
            min(delta, default=1e-5),
        )


def protect(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod around the client's training: applies Flower's clipping or local-DP mod to what it uploads.

    Flower's mods expect one array record on both ways, with the same names; ours also carry statistics, and FedMatch's
    helpers on the way down. So they are shown the uploaded names alone.
    """
    try:
        protection = Protection.of(message.content.config_records[TASK], context.node_config)
    except ConfigError as error:
        return _refuse(message, str(error))  # it names options and numbers, nothing of the site
    except (TypeError, ValueError) as error:
        return _refuse(message, "the site's options of privacy are not numbers", str(error))
    reply = call_next(message, context)
    if not protection.clipping_norm or reply.has_error() or PARAMETERS not in reply.content.array_records:
        return reply
    sent, received = reply.content.array_records[PARAMETERS], message.content.array_records[PARAMETERS]
    problem = _problem(protection, sent, received, reply.content.array_records.get(STATISTICS, {}))
    if problem:
        return _refuse(message, problem)
    shown = RecordDict(
        {
            PARAMETERS: ArrayRecord({name: received[name] for name in sent}),
            TASK: ConfigRecord({_NORM_KEY: protection.clipping_norm}),
        }
    )
    upload = Message(RecordDict({PARAMETERS: sent}), reply_to=message)
    done = _mod(protection)(Message(shown, reply_to=message), context, lambda *_: upload)
    if done.has_error():
        return done
    reply.content[PARAMETERS] = done.content.array_records[PARAMETERS]
    if protection.epsilon:
        answer = reply.content.config_records[ANSWER]
        reply.content[ANSWER] = ConfigRecord({name: answer[name] for name in _PUBLIC if name in answer})
    return reply


def _refuse(message: Message, problem: str, private: str = "") -> Message:
    log(f"problem: {problem} {private}")
    return Message(RecordDict({ANSWER: pack_answer({"problem": problem})}), reply_to=message)


def _mod(protection: Protection) -> Any:
    if not protection.epsilon:
        return fixedclipping_mod
    # Two updates that are clipped to a norm differ by at most twice that norm.
    return LocalDpMod(protection.clipping_norm, 2 * protection.clipping_norm, protection.epsilon, protection.delta)


def _problem(protection: Protection, sent: Mapping, received: Mapping, statistics: Mapping) -> str:
    unknown = [name for name in sent if name not in received]
    if unknown:
        return f"the update of '{unknown[0]}' cannot be clipped: the server did not send it"
    if protection.epsilon and any(array.numpy().size for array in statistics.values()):
        return "differential privacy does not cover batch-norm statistics: use a network without them (norm=group)"
    if all(array.data == received[name].data for name, array in sent.items()):
        return "the update is zero and cannot be clipped"
    return ""


def _stricter(*values: Any) -> float:
    return min((float(value) for value in values if float(value) > 0), default=0.0)
