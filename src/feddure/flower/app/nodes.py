"""The nodes of a federation: messages to them, and which site each of them is.

Every node is asked who it is, and again when it restarts or was refused a while ago.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from feddure.errors import RunError
from feddure.flower.app.audit import AuditLog
from feddure.flower.app.messages import ANSWER, QUERY, TASK, pack
from feddure.flower.app.policy import MOST_IMAGES
from feddure.flower.app.registry import Registry
from feddure.flower.app.sanitize import log, one_line
from feddure.simulation.server import ImageCounts
from feddure.version import VERSION

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_FETCH_SECONDS = 1.0  # that answers which are there are waited for; one that takes longer comes with a later look
_UPDATE_SECONDS = 0.5
_REMIND_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 60.0
_NAME = 60  # characters of a name that is shown
_REQUIRED = {"site", "client", "clients", "fingerprint", "labelled", "unlabelled", "unreadable"}
_MEANINGS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.NODE_UNAVAILABLE: "the connection was lost before an answer came",
}


class PendingMessages:
    """Messages under way, each under a name of the caller's choice.

    Each answer is fetched by itself, in a thread: one that cannot be put together, or whose arrays do not come, is no
    reason to wait with the others or to lose them.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        self._waiting: dict[str, tuple[int, float]] = {}  # message id → name, deadline
        self._fetching: dict[str, Future[list[Message]]] = {}

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
        for number in [number for number in self._waiting if number not in self._fetching]:
            self._fetching[number] = self._fetch(number)
        wait(self._fetching.values(), timeout=_FETCH_SECONDS)
        for number, fetching in list(self._fetching.items()):
            if number not in self._waiting:
                del self._fetching[number]
            elif fetching.done():
                del self._fetching[number]
                for reply in fetching.result():
                    found[self._waiting.pop(number)[0]] = reply
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

    def _fetch(self, number: str) -> "Future[list[Message]]":
        """The answer to one message, if there is one yet."""
        fetched: Future[list[Message]] = Future()

        def fetch() -> None:
            try:
                fetched.set_result(list(self._grid.pull_messages([number]))[:1])
            except (httpx.TransportError, OSError) as problem:  # it is the SuperLink that does not answer
                fetched.set_exception(problem)
            except Exception as problem:  # whatever a site sends must not end the run, at the SuperLink neither
                reason = f"a message that cannot be put together ({type(problem).__name__}: {one_line(problem, 80)})"
                fetched.set_result([_error(reason)])

        threading.Thread(target=fetch, name="fetch", daemon=True).start()  # one that still waits ends with the process
        return fetched

    def __contains__(self, name: int) -> bool:
        return any(name == other for other, _ in self._waiting.values())


def _error(reason: str) -> Message:
    """In place of a site's answer."""
    question = Message(RecordDict(), dst_node_id=1, message_type=QUERY)
    return Message(Error(code=ErrorCode.UNKNOWN, reason=reason), reply_to=question)


def read_reply(reply: Message | None) -> tuple[dict, str]:
    """What a node answered, or why it did not."""
    if reply is None:
        return {}, "no answer in time"
    if reply.has_error():
        if reply.error.code in _MEANINGS:
            return {}, _MEANINGS[reply.error.code]
        lines = (reply.error.reason or "").strip().splitlines()
        return {}, f"error {reply.error.code}: {one_line(lines[-1]) if lines else 'no reason given'}"
    answer = dict(reply.content.config_records.get(ANSWER, {}))
    if not answer:
        return {}, "the answer holds nothing: is this node's app another one?"
    return answer, one_line(answer.get("problem", ""))


@dataclass(frozen=True)
class ConnectedSite:
    """A site that a node speaks for, and what it said of itself."""

    name: str
    node: int
    claimed: ImageCounts
    counts: ImageCounts  # that are believed
    unreadable: int

    @property
    def notice(self) -> str:
        """What the site is told where it is not believed."""
        if self.claimed == self.counts:
            return ""
        return (
            f"says {_images(self.claimed)}, and counts as one with {_images(self.counts)} until the server's operator "
            f"approves: feddure federate sites approve DIR {self.name}"
        )


class ConnectedSites:
    """The sites that answered, by client number; who is refused is named with the reason."""

    def __init__(
        self,
        grid: Grid,
        sites: tuple[str, ...],
        fingerprint: str,
        experiment: str,
        timeout: float,
        registry: Registry | None = None,
        audit: AuditLog | None = None,
    ):
        """`sites` and `fingerprint` are the description's."""
        self.by_client: dict[int, ConnectedSite] = {}
        self.refused: dict[int, str] = {}  # node → why
        self._grid = grid
        self._sites = sites
        self._fingerprint = fingerprint
        self._experiment = experiment
        self._timeout = timeout
        self._registry = registry or Registry(None)
        self._audit = audit or AuditLog(None)
        self._pending = PendingMessages(grid)
        self._asked: dict[int, str] = {}  # node → when it was last started, for those that were asked
        self._refused_at: dict[int, float] = {}
        self._objections: dict[int, str] = {}  # node → the server's own reason to refuse it, which it has not heard yet
        self._names: dict[int, str] = {}  # node → the name its key was registered under

    def update(self) -> None:
        """Ask new nodes, hear their answers, and forget nodes that are gone; waits for nobody."""
        nodes = {info.node_id: info for info in self._grid.get_nodes()}
        self._names = {node: info.name for node, info in nodes.items() if info.name}
        for client, site in list(self.by_client.items()):
            if site.node not in nodes:
                del self.by_client[client]
                log(f"site '{site.name}' is no longer connected")
        old = {node for node, when in self._refused_at.items() if time.monotonic() - when > _ASK_AGAIN_SECONDS}
        self._asked = {node: since for node, since in self._asked.items() if node in nodes and node not in old}
        self.refused = {node: why for node, why in self.refused.items() if node in nodes}
        started = {node: info.last_activated_at for node, info in nodes.items()}
        new = [node for node in started if self._asked.get(node) != started[node] or node in self._objections]
        contents = {node: (node, self._question(node)) for node in new if node not in self._pending}
        failed = self._pending.send(contents, QUERY, self._timeout)
        asked = [node for node in contents if node not in failed]
        self._asked |= {node: started[node] for node in asked}
        self._objections = {node: why for node, why in self._objections.items() if node in nodes and node not in asked}
        for node, reply in self._pending.collect().items():
            answer, problem = read_reply(reply)
            if reply is None or reply.has_error():
                self._asked.pop(node, None)  # it may be on its way up: ask again
            if node in nodes:
                self._admit(node, answer, problem)
        registered = self._registry.read()
        for client, site in self.by_client.items():  # the operator may have approved a claim meanwhile
            if site.name in registered:  # or have revoked the site, whose claim must not become its first one here
                self.by_client[client] = replace(site, counts=registered[site.name].limit(site.claimed))

    def wait(self, wanted: int, seconds: float) -> None:
        """Until so many sites are connected, for a limited time."""
        deadline, reminder = time.monotonic() + seconds, 0.0
        while True:
            self.update()
            if len(self.by_client) >= wanted:
                return
            now = time.monotonic()
            state = f"{len(self.by_client)} of {wanted} sites are connected{self._absent()}"
            if now > reminder:
                log(f"waiting for sites: {state}")
                reminder = now + _REMIND_SECONDS
            if now > deadline:
                raise RunError(f"waited {seconds:g} seconds, but {state}; start the others, then go on with --resume")
            time.sleep(_UPDATE_SECONDS)

    def wait_for_any(self, clients: Sequence[int], seconds: float) -> bool:
        """Until one of these is connected, for a limited time; whether there was any need to wait.

        Without it a run would use up its rounds, in no time, while those whom it draws are away.
        """
        deadline, waited = time.monotonic() + seconds, False
        while not any(client in self.by_client for client in clients) and time.monotonic() < deadline:
            if not waited:
                log(f"waiting for a site of this round: {', '.join(map(self.name, clients))}")
            waited = True
            time.sleep(_UPDATE_SECONDS)
            self.update()
        return waited

    def name(self, client: int) -> str:
        """A client's site."""
        return self._sites[client]

    def describe(self) -> list[dict[str, Any]]:
        """What the connected sites said of themselves, for the run's folder."""
        return [
            {
                "site": site.name,
                "client": client,
                "node": str(site.node),
                "labelled": site.counts.labelled,
                "unlabelled": site.counts.unlabelled,
                "unreadable": site.unreadable,
            }
            for client, site in sorted(self.by_client.items())
        ]

    def _question(self, node: int) -> RecordDict:
        """Who a node is; one that the server refused hears why, for the person who started it."""
        refused = {"refused": self._objections[node]} if node in self._objections else {}
        return RecordDict({TASK: pack({"experiment": self._experiment, **refused})})

    def _admit(self, node: int, answer: dict[str, Any], problem: str) -> None:
        objection = "" if problem else self._objection(node, answer)
        problem = problem or objection
        if problem:
            # The operator chose the registered name; what a node calls itself may be anything.
            who = one_line(self._names.get(node) or answer.get("site", ""), _NAME) or f"node {node}"
            reason = f"site '{who}': {problem}"
            if self.refused.get(node) != reason:
                log(f"refused (node {node}): {reason}")
                self._audit.write("site refused", site=who, node=str(node), why=problem)
                if objection:  # a problem of the site's own is in its log already
                    self._objections[node] = reason
            self.refused[node], self._refused_at[node] = reason, time.monotonic()
            self.by_client = {client: site for client, site in self.by_client.items() if site.node != node}
            return
        self.refused.pop(node, None)
        self._refused_at.pop(node, None)
        client, claimed = answer["client"], ImageCounts(answer["labelled"], answer["unlabelled"])
        counts = self._registry.counts(self.name(client), claimed)
        site = ConnectedSite(self.name(client), node, claimed, counts, answer["unreadable"])
        self.by_client[client] = site
        unreadable = f", {site.unreadable} unreadable files left out" if site.unreadable else ""
        log(f"site '{site.name}' is connected (node {node}): {_images(counts)}{unreadable}")
        self._audit.write(
            "site takes part", site=site.name, node=str(node), images=asdict(counts), says=asdict(claimed)
        )
        if site.notice:
            log(f"note: site '{site.name}' {site.notice}")
        if answer.get("version") != VERSION:
            version = one_line(answer.get("version"), _NAME)
            log(f"note: site '{site.name}' runs feddure {version}, the server {VERSION}")

    def _objection(self, node: int, answer: dict[str, Any]) -> str:
        if not answer.keys() >= _REQUIRED:
            return "its answer lacks what a site says of itself; install the same version of feddure everywhere"
        site, client = answer["site"], answer["client"]
        if answer["fingerprint"] != self._fingerprint:
            return "it goes by another description of the federation; give it the server's federation.yaml"
        if site not in self._sites or client != self._sites.index(site):
            return f"the federation has no such site; there are: {', '.join(self._sites)}"
        # Also where the run knows nothing of the registered site, which was added since.
        if self._names.get(node, site) != site:
            return f"its key is that of this site, but it says that it is '{site}'"
        for kind in ("client", "clients", "labelled", "unlabelled", "unreadable"):
            if not isinstance(answer[kind], int) or not 0 <= answer[kind] <= MOST_IMAGES:
                return f"it says that its number of '{kind}' is {one_line(repr(answer[kind]), _NAME)}"
        if client >= answer["clients"]:
            return f"it says that it is client {client} of {answer['clients']}, expected a number from 0"
        present = self.by_client.get(client)
        if present is not None and present.node != node:
            return f"a node that says it is this site is connected already (node {present.node})"
        return ""

    def _absent(self) -> str:
        absent = [site for client, site in enumerate(self._sites) if client not in self.by_client]
        reasons = "".join(f"; {why}" for why in self.refused.values())
        return (f" (not {', '.join(absent)})" if absent else "") + reasons


def _images(counts: ImageCounts) -> str:
    return f"{counts.labelled} labelled and {counts.unlabelled} unlabelled images"
