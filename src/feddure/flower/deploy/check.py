"""`feddure federate check`: a site's images, keys and certificates, and its way to the server, before it joins."""

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal, TypeVar

from cryptography import x509

from feddure.errors import FeddureError
from feddure.flower.app import description as descriptions
from feddure.flower.app import site_data
from feddure.flower.app.private_files import is_private
from feddure.flower.deploy import certificates
from feddure.flower.deploy.layout import Bundle, Connection, read_connection

T = TypeVar("T")
Level = Literal["ok", "note", "problem"]
_TIMEOUT_SECONDS = 10.0
_DARK = 64
"""Images whose values, of 255, are all below this look nearly black."""
_CLOCK_SECONDS = 5.0
"""A signature that is more than this ahead of the server's clock is refused; its answer has whole seconds."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; a problem would keep the site from training."""

    level: Level
    what: str
    text: str


@dataclass
class CheckResult:
    """All that was found at a site."""

    site: str
    findings: list[Finding] = field(default_factory=list)
    labelled: dict[str, int] = field(default_factory=dict)
    unlabelled: int = 0
    tests: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)


def check(
    bundle: Bundle, site: str, images: site_data.ImageFolder, connect: bool = True, cache: Path | None = None
) -> CheckResult:
    """Look at a site's images, keys and certificates, and at its way to the server; `cache` keeps pixels."""
    found = CheckResult(site)
    description = _attempt(found, "federation", lambda: descriptions.read(bundle.description))
    if description is not None:
        _attempt(found, "federation", lambda: description.client(site))
        if found.passed:
            text = f"{description.name}: {len(description.classes)} classes, {len(description.sites)} sites"
            found.findings.append(Finding("ok", "federation", text))
        _check_images(found, images, description, cache)
    connection = _attempt(found, "connection", lambda: read_connection(bundle))
    if connection is None:
        return found
    _attempt(found, "key", lambda: found.findings.append(_check_keys(bundle)))
    _attempt(found, "authority", lambda: found.findings.append(_check_authority(bundle)))
    if connect:
        found.findings += _check_connection(bundle, connection)
    return found


def _check_images(
    found: CheckResult, images: site_data.ImageFolder, description: descriptions.Description, cache: Path | None
) -> None:
    loaded = _attempt(found, "images", lambda: site_data.load(images, description, cache, progress=True))
    if loaded is None:
        return
    found.labelled, found.unlabelled = loaded.counts(), len(loaded.unlabelled)
    found.tests = len(loaded.dataset.test_images)
    found.unreadable = list(loaded.unreadable)
    labelled = sum(found.labelled.values())
    found.findings.append(Finding("ok", "images", f"{labelled:,} labelled, {found.unlabelled:,} unlabelled"))
    if found.unreadable:
        text = f"{len(found.unreadable):,} unreadable file(s) left out; they are named below"
        found.findings.append(Finding("note", "images", text))
    brightest = int(loaded.dataset.images.max(initial=0))
    if brightest < _DARK:
        text = (
            f"nearly black: none has a value above {brightest} of 255; if they are 12-bit images in 16-bit "
            f"files, give --data 'folder:{images.path}?depth=12'"
        )
        found.findings.append(Finding("note", "images", text))
    if not labelled:
        text = "no labelled image: this site can join; methods that learn from labels alone do not draw it"
        found.findings.append(Finding("note", "images", text))
    elif not found.unlabelled:
        found.findings.append(Finding("note", "images", "no unlabelled image: only labels are learned from here"))


def _check_keys(bundle: Bundle) -> Finding:
    private = certificates.read_private_key(bundle.key)
    if private.public_key() != certificates.read_public_key(bundle.public_key):
        text = f"{bundle.key} does not belong to {bundle.public_key}, the key that the server knows"
        return Finding("problem", "key", text)
    if not is_private(bundle.key):
        return Finding("problem", "key", f"{bundle.key}: others can read this private key: chmod 600 {bundle.key}")
    return Finding("ok", "key", f"{bundle.key.name} fits {bundle.public_key.name}, and only its owner can read it")


def _check_authority(bundle: Bundle) -> Finding:
    certificate = certificates.read_certificate(bundle.authority)
    invalid = certificates.validity_problem(certificate, str(bundle.authority))
    if invalid:
        return Finding("problem", "authority", invalid)
    return _ending(certificate, "authority", f"{bundle.authority.name} is valid")


def _check_connection(bundle: Bundle, connection: Connection) -> Iterator[Finding]:
    reached = reach(connection, bundle.authority)
    if reached.certificate is None:
        yield Finding("problem", "server", reached.text)
    else:
        yield _ending(reached.certificate, "server", reached.text)
        wrong_clock = clock_problem(connection, bundle.authority)
        if wrong_clock:
            yield Finding("problem", "clock", wrong_clock)


def _ending(certificate: x509.Certificate, what: str, text: str) -> Finding:
    left = certificates.days_left(certificate)
    level: Level = "note" if left <= certificates.WARN_DAYS else "ok"
    return Finding(level, what, f"{text} until {certificate.not_valid_after_utc:%Y-%m-%d} ({left:,} days)")


def _attempt(found: CheckResult, what: str, attempt: Callable[[], T]) -> T | None:
    """What an attempt gives; where it fails, its message is a problem of the site."""
    try:
        return attempt()
    except FeddureError as problem:
        found.findings.append(Finding("problem", what, str(problem)))
        return None


# --- the way to the server --------------------------------------------------------------------------
@dataclass(frozen=True)
class Reachability:
    """What came of an attempt: `outcome` is ok, unreachable or untrusted; the certificate is that of a right server."""

    outcome: str
    text: str
    certificate: x509.Certificate | None = None


def reach(connection: Connection, authority: Path, timeout: float = _TIMEOUT_SECONDS) -> Reachability:
    """Open a connection to the server as the site's SuperNode would, and close it again."""
    where = connection.address
    try:
        with socket.create_connection((connection.host, connection.port), timeout=timeout) as plain:
            context = certificates.trusting(authority)
            with context.wrap_socket(plain, server_hostname=connection.host) as encrypted:
                certificate = x509.load_der_x509_certificate(encrypted.getpeercert(binary_form=True) or b"")
                text = f"{where} answers, {encrypted.version()}, its certificate is right"
                return Reachability("ok", text, certificate)
    except ssl.SSLCertVerificationError as problem:
        return Reachability("untrusted", f"{where}: {_why_untrusted(problem, connection.host)}")
    except ssl.SSLError as problem:
        reason = problem.reason or "no reason given"
        return Reachability(
            "untrusted", f"{where} does not speak TLS as this federation's server does ({reason.lower()})"
        )
    except socket.gaierror:
        return Reachability("unreachable", f"{connection.host}: this name has no address here; ask for the right one")
    except ConnectionRefusedError:
        return Reachability("unreachable", f"{where} refuses: is the server started (`feddure federate server`)?")
    except TimeoutError:
        return Reachability("unreachable", f"{where} does not answer: does a firewall block outgoing TCP to this port?")
    except OSError as problem:
        return Reachability("unreachable", f"{where} cannot be reached ({problem.strerror or problem})")


def clock_problem(connection: Connection, authority: Path) -> str:
    """How far this machine's clock is from the server's, where that is too far; nothing where nobody can say.

    Every answer of the server has its time, the refusal of an empty request too.
    """
    asking = http.client.HTTPSConnection(
        connection.host, connection.port, timeout=_TIMEOUT_SECONDS, context=certificates.trusting(authority)
    )
    try:
        asking.request("GET", "/")
        date = asking.getresponse().getheader("date")
        ahead = time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return ""
    finally:
        asking.close()
    if abs(ahead) <= _CLOCK_SECONDS:
        return ""
    return (
        f"this machine's clock is {abs(ahead):,.0f} seconds {'ahead of' if ahead > 0 else 'behind'} the server's, and "
        f"signatures with a wrong time are refused: set the clocks (NTP) of both"
    )


def _why_untrusted(problem: ssl.SSLCertVerificationError, host: str) -> str:
    # Numbers of OpenSSL: 10 is an ended certificate, 9 one that has not begun, 62 and 64 a wrong name or address.
    if problem.verify_code in (62, 64):
        return f"the server's certificate is for another name than {host}: was init given the right --server-address?"
    if problem.verify_code == 10:
        return "the server's certificate has ended: its operator runs `feddure federate renew`"
    if problem.verify_code == 9:
        return "the server's certificate is not valid yet: is this machine's clock right?"
    return (
        f"not the server of this federation: its certificate is not signed by ca.crt ({problem.verify_message}). "
        f"Nothing was sent. Use the ca.crt of the bundle that the server's operator handed over; where it is that one, "
        f"another server or an inspecting proxy answers, and TLS must go through untouched"
    )
