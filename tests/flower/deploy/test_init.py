"""What `init` makes, for whom, and what it refuses."""

import zipfile

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from feddure.errors import ConfigError
from feddure.flower.app import description as descriptions
from feddure.flower.app.description import ServerAddress
from feddure.flower.app.policy import LEAVES
from feddure.flower.deploy import certificates, layout
from feddure.flower.deploy.certificates import CertificateError
from feddure.flower.deploy.init import initialise, renew


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def private_parts(path):
    """The lines of a private key."""
    return {line for line in path.read_bytes().splitlines()[1:-1] if len(line) > 20}


def reachable_as(agreed, host):
    return agreed.model_copy(update={"server": ServerAddress(host=host, port=9092)})


def test_private_keys_and_archives_are_for_the_operator_alone(made):
    private = [path for path in files(made.root) if b"PRIVATE KEY" in path.read_bytes()]
    assert {path.relative_to(made.root).as_posix() for path in private} == {
        "authority/ca.key",
        "server/server.key",
        "sites/north/node.key",
        "sites/south/node.key",
    }
    for path in [*private, made.archive("north"), made.archive("south")]:
        assert path.stat().st_mode & 0o777 == 0o600, path
    for folder in ("authority", "server", "sites"):
        assert (made.root / folder).stat().st_mode & 0o777 == 0o700


def test_a_bundle_holds_its_own_secret_and_nobody_elses(made):
    secrets = {
        path: private_parts(path)
        for path in (made.authority_key, made.key, made.bundle("north").key, made.bundle("south").key)
    }
    everything = b"\n".join(path.read_bytes() for path in files(made.bundle("north").root))
    held = {path for path, parts in secrets.items() if all(part in everything for part in parts)}
    assert held == {made.bundle("north").key}


def test_an_archive_is_the_bundle(made, tmp_path):
    with zipfile.ZipFile(made.archive("north")) as archive:
        archive.extractall(tmp_path)
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    bundle = made.bundle("north").root
    assert {name: (tmp_path / name).read_bytes() for name in modes} == {
        f"north/{path.name}": path.read_bytes() for path in files(bundle)
    }
    assert modes["north/node.key"] == 0o600


def test_sites_and_server_agree(made, agreed):
    assert made.read() == agreed
    for site in agreed.sites:
        bundle = made.bundle(site)
        assert descriptions.read(bundle.description) == agreed
        assert layout.read_connection(bundle) == layout.Connection(site, "127.0.0.1", 9092)
        assert bundle.authority.read_bytes() == made.authority.read_bytes()
        known = certificates.read_public_key(made.public_key(site))
        assert certificates.read_private_key(bundle.key).public_key() == known


def test_a_site_may_keep_its_private_key(tmp_path, agreed):
    key = ec.generate_private_key(ec.SECP384R1())
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "north.pub").write_bytes(line + b" someone@somewhere\n")
    made = initialise(tmp_path / "fed", agreed, {"north": tmp_path / "north.pub"})
    assert not made.bundle("north").key.exists()
    assert certificates.read_public_key(made.public_key("north")) == key.public_key()
    assert "made its own key" in made.bundle("north").readme.read_text()
    assert made.bundle("south").key.exists()


def test_a_site_reads_of_all_that_leaves_it(made):
    said = made.bundle("north").readme.read_text()
    assert [each for each in LEAVES if f"- {each}\n" not in said] == []


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path, agreed):
    (tmp_path / "fed").mkdir()
    (tmp_path / "fed" / "precious").write_text("keep me")
    with pytest.raises(ConfigError, match="not empty"):
        initialise(tmp_path / "fed", agreed)
    assert [path.name for path in files(tmp_path)] == ["precious"]
    with pytest.raises(ConfigError, match="a file is there"):
        initialise(tmp_path / "fed" / "precious", agreed)


def test_nothing_is_left_of_an_init_that_fails(tmp_path, agreed, monkeypatch):
    def fail(*_):
        raise ConfigError("no bundle today")

    monkeypatch.setattr("feddure.flower.deploy.init.write_bundle", fail)
    with pytest.raises(ConfigError, match="no bundle today"):
        initialise(tmp_path / "fed", agreed)
    assert list(tmp_path.iterdir()) == []


def test_renew_replaces_the_servers_certificate_under_the_same_authority(own):
    before = certificates.read_certificate(own.certificate)
    authority = own.authority.read_bytes()
    offline = own.root.parent / "offline.key"
    own.authority_key.rename(offline)
    with pytest.raises(CertificateError, match="--authority-key FILE"):
        renew(own)
    after = renew(own, offline)
    assert after == certificates.read_certificate(own.certificate)
    assert after.serial_number != before.serial_number
    after.verify_directly_issued_by(certificates.read_certificate(own.authority))
    assert certificates.read_private_key(own.key).public_key() == after.public_key()
    assert own.authority.read_bytes() == authority
    assert own.key.stat().st_mode & 0o777 == 0o600


def test_renew_refuses_another_authoritys_key(own):
    certificates.write_private_key(own.authority_key, certificates.make_authority("other")[0])
    with pytest.raises(CertificateError, match="is not the key of the authority"):
        renew(own)


@pytest.mark.parametrize(
    ("host", "key", "control_port", "problem"),
    [
        ("0.0.0.0", None, 9093, "sites cannot reach this address"),
        ("::", None, 9093, "sites cannot reach this address"),
        ("a", "west", 9093, r"--public-key west=.*north, south"),
        ("a", "north", 9093, r"nowhere\.pub: cannot be read"),
        ("a", None, 9092, "--control-port 9092"),
    ],
)
def test_what_init_refuses(tmp_path, agreed, host, key, control_port, problem):
    keys = {key: tmp_path / "nowhere.pub"} if key else {}
    with pytest.raises((ConfigError, CertificateError), match=problem):
        initialise(tmp_path / "fed", reachable_as(agreed, host), keys, control_port=control_port)
    assert list(tmp_path.iterdir()) == []
