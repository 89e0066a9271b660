"""Certificates and keys as a stranger's software would judge them."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from feddure.flower.app.private_files import is_private
from feddure.flower.deploy import certificates
from feddure.flower.deploy.certificates import CertificateError, Validity

AUTHORITY = certificates.make_authority("trees")


def server_certificate(host: str) -> x509.Certificate:
    return certificates.make_server(host, AUTHORITY)[1]


def verify(certificate: x509.Certificate, name: x509.GeneralName, root: x509.Certificate = AUTHORITY[1]) -> None:
    PolicyBuilder().store(Store([root])).build_server_verifier(name).verify(certificate, [])


@pytest.mark.parametrize("host", ["fed.example.org", "10.0.0.7", "2001:db8::7"])
def test_the_server_is_named_as_sites_reach_it_and_on_its_own_machine(host: str) -> None:
    names = server_certificate(host).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [host, "localhost", "127.0.0.1"]


def test_a_strict_verifier_follows_the_chain_for_the_right_name_only() -> None:
    certificate = server_certificate("fed.example.org")
    verify(certificate, x509.DNSName("fed.example.org"))
    with pytest.raises(VerificationError):
        verify(certificate, x509.DNSName("other.example.org"))
    with pytest.raises(VerificationError):
        verify(certificate, x509.DNSName("fed.example.org"), certificates.make_authority("trees")[1])


def test_an_address_is_named_as_an_address() -> None:
    found = server_certificate("10.0.0.7").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in found.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1"]


def test_the_authority_signs_and_the_server_serves() -> None:
    def usage(certificate: x509.Certificate) -> tuple[bool, bool, bool]:
        extensions = certificate.extensions
        key = extensions.get_extension_for_class(x509.KeyUsage).value
        basic = extensions.get_extension_for_class(x509.BasicConstraints).value
        return basic.ca, key.key_cert_sign, key.digital_signature

    server = server_certificate("fed.example.org")
    assert usage(AUTHORITY[1]) == (True, True, False)
    assert usage(server) == (False, False, True)
    extended = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(extended) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_lifetimes_are_as_stated() -> None:
    for certificate, days in ((AUTHORITY[1], 3650), (server_certificate("a"), 397)):
        validity = certificates.validity(certificate)
        assert validity.ends - validity.begins == timedelta(days=days)


def test_a_certificate_says_when_it_does_not_hold() -> None:
    now = datetime.now(UTC)
    validity = Validity(now, now + timedelta(days=10, hours=1))
    assert validity.days_left(now) == 10
    assert validity.problem("it", now + timedelta(days=1)) is None
    assert "clock" in (validity.problem("it", now - timedelta(days=1)) or "")
    assert "renew" in (validity.problem("it", now + timedelta(days=11)) or "")


@pytest.mark.parametrize("ssh", [True, False])
def test_private_keys_are_for_their_owner_alone(tmp_path: Path, ssh: bool) -> None:
    key, path = certificates.make_node_key(), tmp_path / "node.key"
    certificates.write_private_key(path, key, ssh)
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_private(path)
    assert certificates.read_private_key(path).public_key() == key.public_key()
    path.chmod(0o644)
    assert not is_private(path)


def test_a_public_key_survives_its_line(tmp_path: Path) -> None:
    key, path = certificates.make_node_key(), tmp_path / "node.pub"
    path.write_bytes(certificates.public_line(key, "north"))
    assert path.read_text().endswith(" north\n")
    assert certificates.read_public_key(path) == key.public_key()
    assert certificates.read_public_key(path) != (certificates.make_node_key().public_key())


def test_a_private_key_given_as_a_public_one_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pub"
    certificates.write_private_key(path, certificates.make_node_key(), ssh=True)
    with pytest.raises(CertificateError, match=r"a\.pub: this is a PRIVATE key"):
        certificates.read_public_key(path)


def test_other_kinds_of_keys_are_refused_with_the_command_that_makes_the_right_one(tmp_path: Path) -> None:
    line = ed25519.Ed25519PrivateKey.generate().public_key()
    path = tmp_path / "a.pub"
    path.write_bytes(line.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH))
    with pytest.raises(CertificateError, match="ssh-keygen -t ecdsa"):
        certificates.read_public_key(path)


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    path = tmp_path / "node.key"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match="without a passphrase"):
        certificates.read_private_key(path)


def test_python_serves_with_the_written_files(tmp_path: Path) -> None:
    key, certificate = certificates.make_server("fed.example.org", AUTHORITY)
    certificates.write_private_key(tmp_path / "server.key", key)
    certificates.write_certificate(tmp_path / "server.crt", certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    certificates.write_private_key(tmp_path / "server.key", certificates.make_node_key())
    with pytest.raises(ssl.SSLError):
        context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    line = (
        "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBJOUsLXHRHHjzvumJf"
        "qgVg9f+jQpI24RP46XrMpaVmoYwzGeK/xDSjJqo4K3/eeSr0cHYUCeXfzHlG17tZxXrG0d/1w+ZEzF5OXpSnQMVKpxdT2mKzx+VDefNc3EgkaRWQ=="
    )
    (tmp_path / "node.pub").write_text(f"{line} north\n")
    key = certificates.read_public_key(tmp_path / "node.pub")
    assert certificates.fingerprint(key) == "SHA256:5rZ+tiFAA2vQXQ+m9QFdWYpgVRE50HY4+BVSYsdoJnk"
