"""Certificates and keys as a stranger's software would judge them."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
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


def test_a_private_key_that_others_can_read_is_told(tmp_path):
    certificates.write_private_key(tmp_path / "node.key", certificates.make_node_key(), ssh=True)
    assert is_private(tmp_path / "node.key")
    (tmp_path / "node.key").chmod(0o644)
    assert not is_private(tmp_path / "node.key")


PEM, OPENSSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
LOCKED = certificates.make_node_key().private_bytes(
    PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
)
ED25519 = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)


@pytest.mark.parametrize(
    ("read", "content", "problem"),
    [
        (certificates.read_public_key, LOCKED.replace(b"ENCRYPTED ", b""), r"a\.pub: this is a PRIVATE key"),
        (certificates.read_public_key, ED25519, "ssh-keygen -t ecdsa"),
        (certificates.read_private_key, LOCKED, "without a passphrase"),
    ],
    ids=["private", "other kind", "locked"],
)
def test_keys_that_are_of_no_use_are_refused(tmp_path, read, content, problem):
    (tmp_path / "a.pub").write_bytes(content)
    with pytest.raises(CertificateError, match=problem):
        read(tmp_path / "a.pub")


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    line = (
        "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBJOUsLXHRHHjzvumJf"
        "qgVg9f+jQpI24RP46XrMpaVmoYwzGeK/xDSjJqo4K3/eeSr0cHYUCeXfzHlG17tZxXrG0d/1w+ZEzF5OXpSnQMVKpxdT2mKzx+VDefNc3EgkaRWQ=="
    )
    (tmp_path / "node.pub").write_text(f"{line} north\n")
    key = certificates.read_public_key(tmp_path / "node.pub")
    assert certificates.fingerprint(key) == "SHA256:5rZ+tiFAA2vQXQ+m9QFdWYpgVRE50HY4+BVSYsdoJnk"
