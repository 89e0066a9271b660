"""`feddure federate server`: the SuperLink on the loopback address, the sites' keys, and the proxy in front."""

import ipaddress
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from feddure.errors import FeddureError, RunError
from feddure.flower.app.audit import AuditLog
from feddure.flower.app.private_files import is_private
from feddure.flower.deploy import certificates
from feddure.flower.deploy.control import (
    LOOPBACK,
    OWN_SUPEREXEC,
    Control,
    Show,
    program,
    shown,
    superexec_command,
    timed,
)
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings
from feddure.flower.deploy.processes import (
    POLL_SECONDS,
    Process,
    expect_free,
    is_listening,
    pidfile,
    wait_until,
    write_pidfile,
)
from feddure.flower.deploy.proxy import NOT_ITS_OWN, FleetProxy, Listener, ProxyServer, Request, Uploads
from feddure.version import VERSION

_QUIET_SECONDS = 60.0
"""Whoever is turned away tries again and again: once in this time is enough to know."""
_REMEMBERED_ADDRESSES = 1000
_MOST_MOVES = 20  # of a site, in and out, that are told in that time
_RESTARTS = 5
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""For what outlives a killed server: an orderly end would wait a minute for others, and the database needs none."""
_SHORT_LIFE_SECONDS = 60.0
"""A SuperExec that lived longer did its work: its end does not count together with earlier ones."""


class SuperExec:
    """Flower's SuperExec, which starts the program of each run, started again when it ends.

    A SuperLink starts one by itself, but does not look whether it still lives, and without one every run waits for
    ever. What the SuperLink holds for it is not lost.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, show: Show):
        self._arguments = command, environment, log
        self._show = show
        self._short_lives = 0
        self._start()

    @property
    def ended(self) -> bool:
        return self._process.ended

    def shorten_log(self) -> None:
        self._process.shorten_log()

    def restart(self) -> None:
        """Start it again after its end, the later the more often that was needed; an error where it is of no use."""
        lived = time.monotonic() - self._began
        self._short_lives = self._short_lives + 1 if lived < _SHORT_LIFE_SECONDS else 1
        code = self._process.code
        if self._short_lives > _RESTARTS:
            log = self._arguments[2]
            raise RunError(
                f"flower-superexec ended {self._short_lives} times in a row (exit code {code}), and no run begins "
                f"without it: the server ends too. Is this machine out of memory, or overloaded? Where it is not, the "
                f"reason is at the end of {log}:\n{self._process.log_tail()}"
            )
        self._process.stop()
        pause = 2.0 ** (self._short_lives - 1)
        self._show(
            f"flower-superexec ended (exit code {code}); again in {pause:.0f} s. "
            f"A run that was going on is over: go on with --resume"
        )
        time.sleep(pause)
        self._start()

    def _start(self) -> None:
        self._process = Process(*self._arguments, parent_killed=_KILL)
        self._began = time.monotonic()

    def __enter__(self) -> "SuperExec":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()


@contextmanager
def serving(folder: ServerFolder, host: str | None, show: Show) -> Iterator[tuple[Process, SuperExec, "SiteKeys"]]:
    """A running server's SuperLink, SuperExec and keys: everything it started is ended with the block."""
    description = folder.read()
    settings = read_settings(folder)
    host = _bind_address(host or settings.bind)
    port = description.server.port
    _expect_certificates(folder, show)
    with ExitStack() as ending:
        ending.enter_context(pidfile(folder.pidfile, f"the server of {folder.root}"))
        expect_free(LOOPBACK, settings.control_port, "is another server running, or was one killed?")
        there = "is it in use, or not this machine's address? `--host ADDRESS` names the address to bind"
        expect_free(host, port, there)
        control = Control(folder, show)
        command = superlink_command(folder, settings.control_port)
        show("$ " + shown(command))
        superlink = ending.enter_context(Process(command, control.environment, folder.log, parent_killed=_KILL))
        write_pidfile(folder.pidfile, superlink)  # its SuperExec ends with it
        wait_until(lambda: is_listening(settings.control_port), superlink, "flower-superlink")
        for state in control.runs():
            if state.going_on and state.begun:  # its program ended with the server before this one
                control.stop(state.run)
                show(f"run {state.run} was going on when the server ended, and is over: go on with --resume")
        control.register(description.sites)
        sites = _sites_by_key(folder, description.sites)
        inside = join_address(LOOPBACK, settings.control_port)
        command = superexec_command(settings.control_port, superlink.popen.pid, folder.authority)
        show("$ " + shown(command))
        superexec = ending.enter_context(SuperExec(command, control.environment, folder.superexec_log, timed(show)))
        audit = AuditLog(folder.server)
        observed = RequestLog(sites, timed(show), audit)
        listener = Listener(observe=observed.flooded)
        proxy = FleetProxy(inside, folder.authority, observed, sites, Uploads(folder.server), listener)
        ending.enter_context(ProxyServer(proxy, host, port, folder.certificate, folder.key, listener))
        show(f"sites     {join_address(host, port)}   Fleet API, TLS, keys of sites only")
        show(f"operator  {inside}   Control API, from this machine only")
        audit.write("server starts", address=join_address(host, port), version=VERSION)
        try:
            yield superlink, superexec, SiteKeys(folder, sites, timed(show))
        finally:
            show("ending the server")
            audit.write("server ends")


def serve(folder: ServerFolder, host: str | None, show: Show) -> None:
    """Run a server until it is told to end."""
    with serving(folder, host, show) as (superlink, superexec, keys):
        show(f"log       {folder.log}")
        show("ready: sites can join; Ctrl-C ends the server, and what it knows stays on disk")
        while not superlink.ended:
            if superexec.ended:
                superexec.restart()
            keys.update()
            superlink.shorten_log()
            superexec.shorten_log()
            time.sleep(POLL_SECONDS)
        raise RunError(f"flower-superlink ended by itself (exit code {superlink.code}):\n{superlink.log_tail()}")


class SiteKeys:
    """The keys that the proxy lets in, as they lie in the folder now; `federate sites` tells the SuperLink itself."""

    def __init__(self, folder: ServerFolder, sites: dict[bytes, str], show: Show):
        self._folder = folder
        self._sites = sites
        self._show = show
        self._seen = self._state()

    def update(self) -> None:
        """Let sites in that were added, and none that was revoked."""
        if (state := self._state()) == self._seen:
            return
        self._seen = state
        try:
            names: Iterable[str] = self._folder.read().sites
        except FeddureError as problem:  # half written, perhaps; whose key is there is known all the same
            self._show(f"note: {problem}")
            names = tuple(self._sites.values())
        found = _sites_by_key(self._folder, names, self._show)
        for key in self._sites.keys() - found.keys():
            self._show(f"{self._sites.pop(key)}: its key is no longer let in")
        for key in found.keys() - self._sites.keys():
            self._show(f"{found[key]}: its key is let in")
            self._sites[key] = found[key]

    def _state(self) -> list[tuple[str, int, int]]:
        paths = [self._folder.description, *sorted(self._folder.public_keys.glob("*.pub"))]
        about = [(path.name, path.stat()) for path in paths if path.exists()]
        return [(name, found.st_mtime_ns, found.st_size) for name, found in about]


@dataclass
class RequestLog:
    """Tells the operator when a site joins, leaves, or is turned away; the proxy calls it for each request."""

    sites: dict[bytes, str]
    show: Show
    audit: AuditLog = field(default_factory=lambda: AuditLog(None))
    _moves: dict[str, list[float]] = field(default_factory=dict)  # site → when it joined or left
    _refused: dict[str, float] = field(default_factory=dict)  # kind, and site or address → when it was last told

    def __call__(self, request: Request) -> None:
        site = self.sites.get(request.public_key)
        if request.status == 401 or (site is None and request.status >= 400):
            reason = f"{site}: is its clock right?" if site else "a key that is not registered"
            self._warn("refused", request.address, f"turned away: {request.address} ({reason})", site)
        elif request.status == 413:
            text = f"{site} sends more than a round's update has; what is too much is refused (413)"
            self._warn("too large", request.address, text, site)
        elif site is not None and request.status == 200:
            if request.action in ("activate-node", "deactivate-node") and not self._is_restless(site, request.address):
                joined = request.action == "activate-node"
                self.show(f"{site} joined from {request.address}" if joined else f"{site} left")
                address = {"address": request.address} if joined else {}
                self.audit.write("site joined" if joined else "site left", site=site, **address)
        elif request.status == NOT_ITS_OWN:
            text = f"{site} sent a message that is no answer of its own; it is refused ({NOT_ITS_OWN})"
            self._warn("not its own", request.address, text, site)

    def _is_restless(self, site: str, address: str) -> bool:
        """Whether a site comes and goes so often that it would fill the log; that is told once a minute."""
        now = time.monotonic()
        moves = self._moves[site] = [*(at for at in self._moves.get(site, ()) if now - at < _QUIET_SECONDS), now]
        del moves[: -_MOST_MOVES - 1]
        if len(moves) <= _MOST_MOVES:
            return False
        self._warn("restless", site, f"{site} joins and leaves again and again; no longer told each time", site)
        return True

    def flooded(self, address: str) -> None:
        """Connections of an address were let go."""
        self._warn("flood", address, f"{address} holds many connections and asks for nothing; the oldest are closed")

    def _warn(self, kind: str, address: str, text: str, site: str | None = None) -> None:
        if self._is_new(f"{kind} {site or address}", always=site is not None):
            self.show(text)
            # Strangers must not fill the audit log: what they do is there once a minute, whoever it is.
            if site is not None or self._is_new(kind):
                self.audit.write("limit acted", kind=kind, address=address, **({"site": site} if site else {}))

    def _is_new(self, about: str, always: bool = False) -> bool:
        """Whether this was not told lately; strangers at any number of addresses must not keep what sites do untold."""
        now = time.monotonic()
        self._refused = {told: at for told, at in self._refused.items() if now - at < _QUIET_SECONDS}
        if about in self._refused or (len(self._refused) >= _REMEMBERED_ADDRESSES and not always):
            return False
        self._refused[about] = now
        return True


def superlink_command(folder: ServerFolder, control_port: int) -> list[str]:
    """The SuperLink, on the loopback address only; sites reach it through the proxy."""
    return [
        program("flower-superlink"),
        *("--ssl-ca-certfile", str(folder.authority), "--ssl-certfile", str(folder.certificate)),
        *("--ssl-keyfile", str(folder.key), "--enable-supernode-auth"),
        *("--host", LOOPBACK, "--port", str(control_port)),
        *("--database", str(folder.database)),
        *OWN_SUPEREXEC,
        "--disable-runtime-dependency-installation",
    ]


def _bind_address(host: str) -> str:
    """The address to listen on: a name is looked up, so that an error can say what it stands for."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as problem:
        raise RunError(
            f"{host}: this name has no address here ({problem}); `--host ADDRESS` names the address to bind"
        ) from None
    # Many systems give their own name such an address; the server would be ready, and out of reach of every site.
    if host not in ("localhost", address) and ipaddress.ip_address(address).is_loopback:
        raise RunError(
            f"{host}: stands for {address} on this machine, which no site can reach; "
            f"say `--host` and the machine's address in the network, or `--host 0.0.0.0` for all of its addresses"
        )
    return address


def _expect_certificates(folder: ServerFolder, show: Show) -> None:
    certificate = certificates.read_certificate(folder.certificate)
    problem = certificates.validity_problem(certificate, str(folder.certificate))
    if problem:
        raise certificates.CertificateError(problem)
    left = certificates.days_left(certificate)
    if left <= certificates.WARN_DAYS:
        show(f"note: the server's certificate ends in {left} days: feddure federate renew {folder.root}")
    if folder.authority_key.exists():
        show(f"note: {folder.authority_key} is still here; it belongs off line (see {folder.readme.name})")
    for path in (folder.key, folder.authority_key):
        if path.exists() and not is_private(path):
            raise certificates.CertificateError(f"{path}: others can read this private key: chmod 600 {path}")


def _sites_by_key(folder: ServerFolder, names: Iterable[str], tell: Show | None = None) -> dict[bytes, str]:
    """The sites that are let in; one whose key cannot be read is not, and where nobody is told that is an error."""
    found = {}
    for site in names:
        path = folder.public_key(site)
        try:
            if path.exists():
                found[certificates.public_pem(certificates.read_public_key(path))] = site
        except certificates.CertificateError as problem:
            if tell is None:
                raise
            tell(f"note: {problem}; {site} is not let in until it is right")
    return found
