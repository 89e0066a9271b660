"""Which sites are connected: every node is asked who it is, and again when it restarts or was refused a while ago."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from feddure.errors import RunError
from feddure.flower.app.exchange import Exchange, read_reply
from feddure.flower.app.messages import QUERY, TASK
from feddure.flower.app.sanitize import plain
from feddure.simulation.server import ImageCounts
from feddure.version import VERSION

_PAUSE = 0.5
_REMIND_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 60.0
_MOST = 10**8  # images or clients; a larger number is a mistake, and would spoil the batches of all
_NAME = 60  # characters of a name that is shown

_TOLD = {"site", "client", "clients", "fingerprint", "labelled", "unlabelled", "unreadable"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """A connected site."""

    site: str
    client: int
    node: int
    clients: int
    holding: ImageCounts
    unreadable: int


class Roster:
    """The sites that answered, by client number; who is refused is named with the reason."""

    def __init__(self, grid: Grid, sites: tuple[str, ...], fingerprint: str, experiment: str, timeout: float, say: Say):
        """`sites` and `fingerprint` are the description's; without them any client of a simulation is welcome."""
        self.members: dict[int, Member] = {}
        self.refused: dict[int, str] = {}  # node → why
        self._grid = grid
        self._sites = sites
        self._fingerprint = fingerprint
        self._experiment = experiment
        self._timeout = timeout
        self._say = say
        self._exchange = Exchange(grid)
        self._known: dict[int, str] = {}  # node → when it was last started, for those that were asked
        self._refused_at: dict[int, float] = {}
        self._untold: dict[int, str] = {}  # node → the server's own reason to refuse it, which it has not heard yet
        self._names: dict[int, str] = {}  # node → the name its key was registered under

    def update(self) -> None:
        """Ask new nodes, hear their answers, and forget nodes that are gone; waits for nobody."""
        nodes = {info.node_id: info for info in self._grid.get_nodes()}
        self._names = {node: plain(info.name, _NAME) for node, info in nodes.items() if info.name}
        for client, member in list(self.members.items()):
            if member.node not in nodes:
                del self.members[client]
                self._say(f"site '{member.site}' is no longer connected")
        old = {node for node, when in self._refused_at.items() if time.monotonic() - when > _ASK_AGAIN_SECONDS}
        self._known = {node: since for node, since in self._known.items() if node in nodes and node not in old}
        self.refused = {node: why for node, why in self.refused.items() if node in nodes}
        started = {node: info.last_activated_at for node, info in nodes.items()}
        new = [node for node in started if self._known.get(node) != started[node] or node in self._untold]
        contents = {node: (node, self._question(node)) for node in new if not self._exchange.waits_for(node)}
        failed = self._exchange.send(contents, QUERY, self._timeout)
        asked = [node for node in contents if node not in failed]
        self._known |= {node: started[node] for node in asked}
        self._untold = {node: why for node, why in self._untold.items() if node in nodes and node not in asked}
        for node, reply in self._exchange.collect().items():
            answer, problem = read_reply(reply)
            if reply is None or reply.has_error():
                self._known.pop(node, None)  # it may be on its way up: ask again
            if node in nodes:
                self._admit(node, answer, problem)

    def wait(self, wanted: int, seconds: float) -> None:
        """Until so many sites are connected, for a limited time."""
        deadline, reminder = time.monotonic() + seconds, 0.0
        while True:
            self.update()
            if len(self.members) >= wanted:
                return
            now = time.monotonic()
            state = f"{len(self.members)} of {wanted} sites are connected{self._absent()}"
            if now > reminder:
                self._say(f"waiting for sites: {state}")
                reminder = now + _REMIND_SECONDS
            if now > deadline:
                raise RunError(
                    f"waited {seconds:g} seconds, but {state}; start the others, then go on with resume=true"
                )
            time.sleep(_PAUSE)

    def wait_for_simulation(self, seconds: float) -> int:
        """Until all clients of Flower's simulation have answered; returns their number."""
        self.wait(1, seconds)
        clients = max(member.clients for member in self.members.values())
        self.wait(clients, seconds)
        return clients

    def name(self, client: int) -> str:
        """A client's site."""
        return self._sites[client] if self._sites else f"client-{client}"

    def _question(self, node: int) -> RecordDict:
        """Who a node is; one that the server refused hears why, for the person who started it."""
        refused = {"refused": self._untold[node]} if node in self._untold else {}
        return RecordDict({TASK: ConfigRecord({"experiment": self._experiment, **refused})})

    def _admit(self, node: int, answer: dict[str, Any], problem: str) -> None:
        objection = "" if problem else self._objection(node, answer)
        problem = problem or objection
        if problem:
            # The operator chose the registered name; what a node calls itself may be anything.
            who = self._names.get(node) or plain(answer.get("site", ""), _NAME) or f"node {node}"
            told = f"site '{who}': {problem}"
            if self.refused.get(node) != told:
                self._say(f"refused (node {node}): {told}")
                if objection:  # a problem of the site's own is in its log already
                    self._untold[node] = told
            self.refused[node], self._refused_at[node] = told, time.monotonic()
            for client, member in list(self.members.items()):
                if member.node == node:
                    del self.members[client]
            return
        self.refused.pop(node, None)
        self._refused_at.pop(node, None)
        holding = ImageCounts(answer["labelled"], answer["unlabelled"])
        client = answer["client"]
        member = Member(self.name(client), client, node, answer["clients"], holding, answer["unreadable"])
        self.members[client] = member
        unreadable = f", {member.unreadable} unreadable files left out" if member.unreadable else ""
        self._say(
            f"site '{member.site}' is connected (node {node}): {holding.labelled} labelled and "
            f"{holding.unlabelled} unlabelled images{unreadable}"
        )
        if answer.get("version") != VERSION:
            version = plain(answer.get("version"), _NAME)
            self._say(f"note: site '{member.site}' runs feddure {version}, the server {VERSION}")

    def _objection(self, node: int, answer: dict[str, Any]) -> str:
        if not answer.keys() >= _TOLD:
            return "its answer lacks what a site says of itself; install the same version of feddure everywhere"
        site, client = answer["site"], answer["client"]
        if self._sites:
            if answer["fingerprint"] != self._fingerprint:
                return "it goes by another description of the federation; give it the server's federation.yaml"
            if site not in self._sites or client != self._sites.index(site):
                return f"the federation has no such site; there are: {', '.join(self._sites)}"
            registered = self._names.get(node)
            if registered in self._sites and registered != site:
                return f"its key is that of this site, but it says that it is '{site}'"
        for kind in ("client", "clients", "labelled", "unlabelled", "unreadable"):
            if not isinstance(answer[kind], int) or not 0 <= answer[kind] <= _MOST:
                return f"it says that its number of '{kind}' is {plain(repr(answer[kind]), _NAME)}"
        if client >= answer["clients"]:
            return f"it says that it is client {client} of {answer['clients']}, expected a number from 0"
        present = self.members.get(client)
        if present is not None and present.node != node:
            return f"a node that says it is this site is connected already (node {present.node})"
        return ""

    def _absent(self) -> str:
        absent = [site for client, site in enumerate(self._sites) if client not in self.members]
        reasons = "".join(f"; {why}" for why in self.refused.values())
        return (f" (not {', '.join(absent)})" if absent else "") + reasons
