"""Whether a site reaches the server, and whether it is the right one."""

import http.client
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from feddure.flower.deploy.certificates import Validity
from feddure.flower.deploy.layout import Connection

_TIMEOUT_SECONDS = 10.0
_CLOCK_SECONDS = 5.0
"""A signature that is more than this ahead of the server's clock is refused; its answer has whole seconds."""


@dataclass(frozen=True)
class Reached:
    """What came of an attempt: `outcome` is ok, unreachable or untrusted."""

    outcome: str
    text: str
    certificate: Validity | None = None


def reach(connection: Connection, authority: Path, timeout: float = _TIMEOUT_SECONDS) -> Reached:
    """Open a connection to the server as the site's SuperNode would, and close it again."""
    where = connection.address
    try:
        with socket.create_connection((connection.host, connection.port), timeout=timeout) as plain:
            if not connection.secure:
                return Reached("ok", f"{where} answers; nothing is encrypted")
            context = ssl.create_default_context(cafile=authority)
            with context.wrap_socket(plain, server_hostname=connection.host) as encrypted:
                certificate = _validity(encrypted)
                return Reached("ok", f"{where} answers, {encrypted.version()}, its certificate is right", certificate)
    except ssl.SSLCertVerificationError as problem:
        return Reached("untrusted", f"{where}: {_why_untrusted(problem, connection.host)}")
    except ssl.SSLError as problem:
        reason = problem.reason or "no reason given"
        return Reached("untrusted", f"{where} does not speak TLS as this federation's server does ({reason.lower()})")
    except socket.gaierror:
        return Reached("unreachable", f"{connection.host}: this name has no address here; ask for the right one")
    except ConnectionRefusedError:
        return Reached("unreachable", f"{where} refuses: is the server started (`feddure federate server`)?")
    except TimeoutError:
        return Reached("unreachable", f"{where} does not answer: does a firewall block outgoing TCP to this port?")
    except OSError as problem:
        return Reached("unreachable", f"{where} cannot be reached ({problem.strerror or problem})")


def clock_problem(connection: Connection, authority: Path, timeout: float = _TIMEOUT_SECONDS) -> str:
    """How far this machine's clock is from the server's, where that is too far; nothing where nobody can say.

    Every answer of the server has its time, the refusal of an empty request too.
    """
    if not connection.secure:
        return ""
    asking = http.client.HTTPSConnection(
        connection.host, connection.port, timeout=timeout, context=ssl.create_default_context(cafile=authority)
    )
    try:
        asking.request("GET", "/")
        told = asking.getresponse().getheader("date")
        ahead = time.time() - parsedate_to_datetime(told).timestamp() if told else 0.0
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


def _validity(encrypted: ssl.SSLSocket) -> Validity | None:
    found = encrypted.getpeercert() or {}
    begins, ends = found.get("notBefore"), found.get("notAfter")
    if not isinstance(begins, str) or not isinstance(ends, str):
        return None
    moments = (datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC) for text in (begins, ends))
    return Validity(*moments)


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
