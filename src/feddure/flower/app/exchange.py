"""Messages to nodes, and their answers within a time limit."""

import time
from collections.abc import Mapping

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from feddure.flower.app.messages import ANSWER
from feddure.flower.app.sanitize import plain

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_MEANINGS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.NODE_UNAVAILABLE: "the connection was lost before an answer came",
}


class Exchange:
    """Messages under way, each under a name of the caller's choice."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._waiting: dict[str, tuple[int, float]] = {}  # message id → name, deadline

    def send(self, contents: Mapping[int, tuple[int, RecordDict]], kind: str, timeout: float) -> list[int]:
        """Send to nodes: name → (node, content); returns the names that could not be sent."""
        messages = [
            Message(content, dst_node_id=node, message_type=kind, ttl=timeout) for node, content in contents.values()
        ]
        ids = list(self._grid.push_messages(messages)) if messages else []
        ids += [""] * (len(messages) - len(ids))
        deadline = time.monotonic() + timeout
        failed = []
        for name, number in zip(contents, ids, strict=True):
            if number:
                self._waiting[number] = name, deadline
            else:
                failed.append(name)
        return failed

    def collect(self) -> dict[int, Message | None]:
        """The answers that have come since, and None for those whose time is up."""
        found: dict[int, Message | None] = {}
        if self._waiting:
            for reply in self._grid.pull_messages(list(self._waiting)):
                waiting = self._waiting.pop(reply.metadata.reply_to_message_id, None)
                if waiting is not None:
                    found[waiting[0]] = reply
        for number, (name, deadline) in list(self._waiting.items()):
            if time.monotonic() > deadline:
                del self._waiting[number]
                found[name] = None
        return found

    def collect_all(self) -> dict[int, Message | None]:
        """Wait until every message has an answer or its time is up."""
        found: dict[int, Message | None] = {}
        pause = _FIRST_PAUSE
        while self._waiting:
            found |= self.collect()
            if self._waiting:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        return found

    def waits_for(self, name: int) -> bool:
        """Whether a message of this name is under way."""
        return any(name == other for other, _ in self._waiting.values())


def read_reply(reply: Message | None) -> tuple[dict, str]:
    """What a node answered, or why it did not."""
    if reply is None:
        return {}, "no answer in time"
    if reply.has_error():
        if reply.error.code in _MEANINGS:
            return {}, _MEANINGS[reply.error.code]
        lines = (reply.error.reason or "").strip().splitlines()
        return {}, f"error {reply.error.code}: {plain(lines[-1]) if lines else 'no reason given'}"
    answer = dict(reply.content.config_records.get(ANSWER, {}))
    if not answer:
        return {}, "the answer holds nothing: is this node's app another one?"
    return answer, plain(answer.get("problem", ""))
