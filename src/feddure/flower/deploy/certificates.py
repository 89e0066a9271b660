"""A federation's own certificate authority, its server's certificate, and the key pairs of its sites.

Everything is made here, offline, with elliptic-curve keys: P-256 for TLS, P-384 for the sites' signatures. Private
keys are written for their owner alone (mode 0600).
"""

import base64
import ipaddress
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from feddure.errors import FeddureError
from feddure.files import write_whole
from feddure.flower.app.private_files import write_private_file

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
WARN_DAYS = 30
"""How long before its end `check` and `server` speak of a certificate's end."""

ALWAYS_NAMED = ("localhost", "127.0.0.1")
"""Names every server certificate carries: the server's own processes talk to each other on this machine."""

OLDEST_TLS = ssl.TLSVersion.TLSv1_2
"""Said wherever a connection is made or taken: else it is up to how Python and OpenSSL were built."""

_KIND = "expected an elliptic-curve key, as `ssh-keygen -t ecdsa -b 384 -f node.key -N ''` makes it"
Authority = tuple[EllipticCurvePrivateKey, x509.Certificate]


class CertificateError(FeddureError):
    """A certificate or a key is missing, damaged or does not fit."""


def days_left(certificate: x509.Certificate) -> int:
    """Whole days until a certificate's end; negative when it is past."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def validity_problem(certificate: x509.Certificate, what: str) -> str:
    """Why a certificate does not hold now, or nothing."""
    begins, ends, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    if now < begins:
        return f"{what} is valid from {begins:%Y-%m-%d %H:%M} UTC only: is this machine's clock right?"
    if now > ends:
        return f"{what} ended on {ends:%Y-%m-%d}: the server's operator runs `feddure federate renew`"
    return ""


def trusting(authority: Path) -> ssl.SSLContext:
    """How to connect to the federation's server: under its own authority, whose certificate is in this file."""
    context = ssl.create_default_context(cafile=authority)
    context.minimum_version = OLDEST_TLS
    return context


def make_authority(name: str) -> Authority:
    """A new certificate authority: its private key and its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key, _sign(f"{name} certificate authority", key, None, AUTHORITY_DAYS)


def make_server(host: str, authority: Authority) -> Authority:
    """A key and a certificate, signed by the authority, for the server that sites reach as `host`."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key, _sign(host, key, authority, SERVER_DAYS, (host, *ALWAYS_NAMED))


def make_node_key() -> EllipticCurvePrivateKey:
    """A site's private key, of the kind that Flower's node authentication takes."""
    return ec.generate_private_key(ec.SECP384R1())


def _sign(
    common_name: str, key: EllipticCurvePrivateKey, authority: Authority | None, days: int, hosts: Sequence[str] = ()
) -> x509.Certificate:
    """A certificate for a key: an authority's own, or a server's for `hosts`."""
    own = authority is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    issuer_key, issuer = (key, subject) if authority is None else (authority[0], authority[1].subject)
    begins = datetime.now(UTC) - timedelta(minutes=5)  # sites' clocks may be a little behind
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=own, path_length=0 if own else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not own,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=own,
                crl_sign=own,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not own:
        names = [_alternative_name(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


# --- files --------------------------------------------------------------------------------------------
def write_private_key(path: Path, key: EllipticCurvePrivateKey, ssh: bool = False) -> None:
    """Write a private key for its owner alone; `ssh` in the format that node authentication reads."""
    form = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    write_private_file(path, content, CertificateError)


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write a certificate as PEM."""
    write_whole(path, certificate.public_bytes(serialization.Encoding.PEM), CertificateError)


def public_line(key: EllipticCurvePublicKey, comment: str) -> bytes:
    """A public key as one line in the format of OpenSSH."""
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line + b" " + comment.encode() + b"\n"


def fingerprint(key: EllipticCurvePublicKey) -> str:
    """A public key's hash, as `ssh-keygen -l` shows it; people compare it over the telephone."""
    digest = serialization.ssh_key_fingerprint(key, hashes.SHA256())
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def public_pem(key: EllipticCurvePublicKey) -> bytes:
    """A public key as Flower's nodes present it."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file."""
    try:
        return x509.load_pem_x509_certificate(_content(path))
    except ValueError:
        raise CertificateError(f"{path}: is not a certificate in PEM format") from None


def read_private_key(path: Path) -> EllipticCurvePrivateKey:
    """The private key in a file, as this module or `ssh-keygen -t ecdsa` writes it."""
    content = _content(path)
    load = serialization.load_ssh_private_key if b"OPENSSH" in content[:60] else serialization.load_pem_private_key
    try:
        key = load(content, password=None)
    except (ValueError, TypeError) as problem:
        raise CertificateError(f"{path}: is not a private key without a passphrase ({problem})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: {_KIND}")
    return key


def read_public_key(path: Path) -> EllipticCurvePublicKey:
    """The public key in a file of one line, as `ssh-keygen -t ecdsa` writes it."""
    content = _content(path)
    if b"PRIVATE KEY" in content:
        raise CertificateError(f"{path}: this is a PRIVATE key, which nobody else may see; give the .pub file")
    try:
        key = serialization.load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError(f"{path}: is not a public key; {_KIND}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError(f"{path}: {_KIND}")
    return key


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CertificateError(f"{path}: cannot be read ({problem.strerror})") from None
