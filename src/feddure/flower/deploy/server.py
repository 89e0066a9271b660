"""`feddure federate server`: the SuperLink on the loopback address, the sites' keys, and the gate in front."""

import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from feddure.errors import RunError
from feddure.flower.app.description import Description
from feddure.flower.deploy import certificates, commands
from feddure.flower.deploy.control import Control, Show
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings
from feddure.flower.deploy.pidfile import alone, note
from feddure.flower.deploy.processes import POLL_SECONDS, Process, expect_free, is_listening, wait_until
from feddure.flower.deploy.proxy import Gate, RunningGate, Visit, visitor
from feddure.flower.deploy.superexec import SuperExec

_QUIET_SECONDS = 60.0
"""Whoever is turned away tries again and again: once in this time is enough to know."""
_REMEMBERED_ADDRESSES = 1000
_CONNECTIONS_PER_SITE, _MORE_CONNECTIONS = 20, 50


@dataclass(frozen=True)
class Running:
    """The processes of a server."""

    superlink: Process
    superexec: SuperExec


@contextmanager
def serving(folder: ServerFolder, host: str | None, show: Show) -> Iterator[Running]:
    """A running server: everything it started is ended with the block."""
    description = folder.read()
    settings = read_settings(folder)
    host = _bind_address(host or settings.bind)
    port = description.server.port
    if settings.secure:
        _expect_certificates(folder, show)
    with ExitStack() as ending:
        ending.enter_context(alone(folder.running, f"the server of {folder.root}"))
        expect_free(commands.LOOPBACK, settings.control_port, "is another server running, or was one killed?")
        there = "is it in use, or not this machine's address? `--host ADDRESS` names the address to bind"
        expect_free(host, port, there)
        control = Control(folder, show)
        command = commands.superlink(folder, settings.control_port, settings.secure)
        show("$ " + commands.shown(command))
        superlink = ending.enter_context(Process(command, control.environment, folder.log))
        note(folder.running, superlink)  # its SuperExec ends with it
        wait_until(lambda: is_listening(commands.LOOPBACK, settings.control_port), superlink, "flower-superlink")
        if settings.secure:
            control.register(description.sites)
        sites = _sites_by_key(folder, description) if settings.secure else {}
        inside = join_address(commands.LOOPBACK, settings.control_port)
        authority = folder.authority if settings.secure else None
        command = commands.superexec(settings.control_port, superlink.popen.pid, authority)
        show("$ " + commands.shown(command))
        superexec = ending.enter_context(SuperExec(command, control.environment, folder.superexec_log, show))
        gate = Gate(inside, authority, Visits(sites, show), set(sites) if settings.secure else None)
        certificate, key = (folder.certificate, folder.key) if settings.secure else (None, None)
        connections = _CONNECTIONS_PER_SITE * len(description.sites) + _MORE_CONNECTIONS
        ending.enter_context(RunningGate(gate, host, port, certificate, key, connections))
        protection = "TLS, keys of sites only" if settings.secure else "NOT ENCRYPTED, anybody can join"
        show(f"sites     {join_address(host, port)}   Fleet API, {protection}")
        show(f"operator  {inside}   Control API, from this machine only")
        try:
            yield Running(superlink, superexec)
        finally:
            show("ending the server")


def serve(folder: ServerFolder, host: str | None, show: Show) -> None:
    """Run a server until it is told to end."""
    with serving(folder, host, show) as running:
        show(f"log       {folder.log}")
        show("ready: sites can join; Ctrl-C ends the server, and what it knows stays on disk")
        superlink = running.superlink
        while not superlink.ended:
            if running.superexec.ended:
                running.superexec.start_again()
            time.sleep(POLL_SECONDS)
        raise RunError(f"flower-superlink ended by itself (exit code {superlink.code}):\n{superlink.last_words()}")


@dataclass
class Visits:
    """Tells the operator when a site joins, leaves, or is turned away; the gate calls it for each request."""

    sites: dict[bytes, str]
    show: Show
    _refused: dict[str, float] = field(default_factory=dict)

    def __call__(self, visit: Visit) -> None:
        site = visitor(visit, self.sites) or ("a site" if not self.sites else None)
        if visit.status == 401 or (site is None and visit.status >= 400):
            self._tell_refused(visit, site)
        elif site is not None and visit.status == 200:
            if visit.action == "activate-node":
                self._say(f"{site} joined from {visit.address}")
            elif visit.action == "deactivate-node":
                self._say(f"{site} left")

    def _tell_refused(self, visit: Visit, site: str | None) -> None:
        now = time.monotonic()
        self._refused = {address: at for address, at in self._refused.items() if now - at < _QUIET_SECONDS}
        if visit.address not in self._refused and len(self._refused) < _REMEMBERED_ADDRESSES:
            self._refused[visit.address] = now
            reason = f"{site}: is its clock right?" if site else "a key that is not registered"
            self._say(f"turned away: {visit.address} ({reason})")

    def _say(self, text: str) -> None:
        self.show(f"{time.strftime('%H:%M:%S')}  {text}")


def _bind_address(host: str) -> str:
    """The address to listen on: a name is looked up, so that an error can say what it stands for."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as problem:
        raise RunError(
            f"{host}: this name has no address here ({problem}); `--host ADDRESS` names the address to bind"
        ) from None
    # Many systems give their own name such an address; the server would be ready, and out of reach of every site.
    if host != "localhost" and not _is_address(host) and ipaddress.ip_address(address).is_loopback:
        raise RunError(
            f"{host}: stands for {address} on this machine, which no site can reach; "
            f"say `--host` and the machine's address in the network, or `--host 0.0.0.0` for all of its addresses"
        )
    return address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _expect_certificates(folder: ServerFolder, show: Show) -> None:
    certificate = certificates.validity(certificates.read_certificate(folder.certificate))
    problem = certificate.problem(str(folder.certificate))
    if problem is not None:
        raise certificates.CertificateError(problem)
    if certificate.days_left() <= certificates.WARN_DAYS:
        left = certificate.days_left()
        show(f"note: the server's certificate ends in {left} days: feddure federate renew {folder.root}")
    if folder.authority_key.exists():
        show(f"note: {folder.authority_key} is still here; it belongs off line (see {folder.readme.name})")
    for path in (folder.key, folder.authority_key):
        if path.exists() and not certificates.is_private(path):
            raise certificates.CertificateError(f"{path}: others can read this private key: chmod 600 {path}")


def _sites_by_key(folder: ServerFolder, description: Description) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for site in description.sites:
        path: Path = folder.public_key(site)
        if path.exists():
            found[certificates.public_pem(certificates.read_public_key(path))] = site
    return found
