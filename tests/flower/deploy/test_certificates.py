"""Certificates and keys as a stranger's software would judge them."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from feddure.flower.app.private_files import is_private
from feddure.flower.deploy import certificates
from feddure.flower.deploy.certificates import CertificateError

AUTHORITY = certificates.make_authority("trees")


def server_certificate(host):
    return certificates.make_server(host, AUTHORITY)[1]


def verify(certificate, name, root=AUTHORITY[1]):
    PolicyBuilder().store(Store([root])).build_server_verifier(name).verify(certificate, [])


@pytest.mark.parametrize("host", ["fed.example.org", "10.0.0.7", "2001:db8::7"])
def test_the_server_is_named_as_sites_reach_it_and_on_its_own_machine(host):
    names = server_certificate(host).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [host, "localhost", "127.0.0.1"]


def test_a_strict_verifier_follows_the_chain_for_the_right_name_only():
    certificate = server_certificate("fed.example.org")
    verify(certificate, x509.DNSName("fed.example.org"))
    with pytest.raises(VerificationError):
        verify(certificate, x509.DNSName("other.example.org"))
    with pytest.raises(VerificationError):
        verify(certificate, x509.DNSName("fed.example.org"), certificates.make_authority("trees")[1])


def test_a_certificate_says_when_it_does_not_hold():
    def problem(begins, ends):
        moments = (datetime.now(UTC) + timedelta(days=days) for days in (begins, ends))
        return certificates.validity_problem(
            SimpleNamespace(**dict(zip(("not_valid_before_utc", "not_valid_after_utc"), moments, strict=True))), "it"
        )

    assert certificates.days_left(server_certificate("a")) == certificates.SERVER_DAYS - 1
    assert problem(-1, 9) == ""
    assert "clock" in problem(1, 10)
    assert "renew" in problem(-11, -1)


@pytest.mark.parametrize("ssh", [True, False])
def test_private_keys_are_for_their_owner_alone(tmp_path, ssh):
    key, path = certificates.make_node_key(), tmp_path / "node.key"
    certificates.write_private_key(path, key, ssh)
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_private(path)
    assert certificates.read_private_key(path).public_key() == key.public_key()
    path.chmod(0o644)
    assert not is_private(path)


def test_a_public_key_survives_its_line(tmp_path):
    key, path = certificates.make_node_key(), tmp_path / "node.pub"
    path.write_bytes(certificates.public_line(key.public_key(), "north"))
    assert path.read_text().endswith(" north\n")
    assert certificates.read_public_key(path) == key.public_key()
    assert certificates.read_public_key(path) != (certificates.make_node_key().public_key())


def test_a_private_key_given_as_a_public_one_is_refused_by_name(tmp_path):
    path = tmp_path / "a.pub"
    certificates.write_private_key(path, certificates.make_node_key(), ssh=True)
    with pytest.raises(CertificateError, match=r"a\.pub: this is a PRIVATE key"):
        certificates.read_public_key(path)


def test_other_kinds_of_keys_are_refused_with_the_command_that_makes_the_right_one(tmp_path):
    line = ed25519.Ed25519PrivateKey.generate().public_key()
    path = tmp_path / "a.pub"
    path.write_bytes(line.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH))
    with pytest.raises(CertificateError, match="ssh-keygen -t ecdsa"):
        certificates.read_public_key(path)


def test_a_key_with_a_passphrase_is_refused(tmp_path):
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    path = tmp_path / "node.key"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match="without a passphrase"):
        certificates.read_private_key(path)


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    line = (
        "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBJOUsLXHRHHjzvumJf"
        "qgVg9f+jQpI24RP46XrMpaVmoYwzGeK/xDSjJqo4K3/eeSr0cHYUCeXfzHlG17tZxXrG0d/1w+ZEzF5OXpSnQMVKpxdT2mKzx+VDefNc3EgkaRWQ=="
    )
    (tmp_path / "node.pub").write_text(f"{line} north\n")
    key = certificates.read_public_key(tmp_path / "node.pub")
    assert certificates.fingerprint(key) == "SHA256:5rZ+tiFAA2vQXQ+m9QFdWYpgVRE50HY4+BVSYsdoJnk"
