"""Sites that come, change their key and go while the server runs."""

import pytest

from feddure.errors import ConfigError
from feddure.flower.app import audit
from feddure.flower.app.registry import Registry
from feddure.flower.deploy import certificates, membership
from feddure.flower.deploy.control import Control
from feddure.flower.deploy.server import SiteKeys, _sites_by_key
from feddure.simulation.server import ImageCounts


@pytest.fixture
def registered(monkeypatch):
    """What a running SuperLink would be told."""
    told = []
    monkeypatch.setattr(membership, "is_listening", lambda *_: True)
    monkeypatch.setattr(Control, "register", lambda self, sites: told.append(tuple(sites)))
    return told


def test_the_proxy_follows_without_a_restart(own, registered):
    sites = _sites_by_key(own, own.read().sites)
    shown = []
    keys = SiteKeys(own, sites, shown.append)
    before, fingerprint = set(sites), own.read().fingerprint()

    def names():
        keys.update()
        return sorted(sites.values())

    membership.add(own, "west", None, shown.append)
    assert names() == ["north", "south", "west"]
    assert own.archive("west").exists()
    assert own.read().sites == ("north", "south", "west")
    assert own.read().fingerprint() == fingerprint  # the copies at the other sites are still right
    membership.rotate(own, "north", None, shown.append)
    assert names() == ["north", "south", "west"]
    assert len(before & set(sites)) == 1
    private = certificates.read_private_key(own.bundle("north").key)
    assert sites[certificates.public_pem(private.public_key())] == "north"
    membership.revoke(own, "south", shown.append)
    assert names() == ["north", "west"]
    assert registered == [("north", "south", "west")] * 3
    events = [entry["event"] for entry in audit.read(own.server / audit.FILE).entries]
    assert events == ["site added", "key replaced", "site revoked"]


def test_what_a_site_says_while_it_is_revoked_is_forgotten_too(own, monkeypatch):
    """A run may hear its answer before the SuperLink knows: whoever stole the key would have the last word."""
    registry = Registry(own.server)
    monkeypatch.setattr(membership, "is_listening", lambda *_: True)
    monkeypatch.setattr(Control, "register", lambda self, sites: registry.counts("south", ImageCounts(1, 0)))
    registry.counts("south", ImageCounts(50, 200))
    membership.revoke(own, "south", print)
    assert "south" not in registry.read()


def test_another_sites_damaged_file_does_not_keep_a_revoked_one_in(own, registered):
    membership.add(own, "west", None, print)
    sites = _sites_by_key(own, own.read().sites)
    keys, shown = SiteKeys(own, sites, [].append), []
    own.public_key("west").write_text("half a ke")
    membership.revoke(own, "south", shown.append)
    keys.update()
    assert sorted(sites.values()) == ["north"]
    own.description.write_text("half a descri")
    own.public_key("north").unlink()
    keys.update()
    assert sites == {}


def test_a_sites_own_key(own, tmp_path, registered):
    key = certificates.make_node_key()
    (tmp_path / "west.pub").write_bytes(certificates.public_line(key.public_key(), "west"))
    membership.add(own, "west", tmp_path / "west.pub", print)
    assert not own.bundle("west").key.exists()
    assert certificates.read_public_key(own.public_key("west")) == key.public_key()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda own: membership.add(own, "north", None, print), "is there already"),
        (lambda own: membership.add(own, "a/b", None, print), "expected letters"),
        (lambda own: membership.rotate(own, "nroth", None, print), "no such site"),
        (lambda own: membership.revoke(own, "east", print), "no such site"),
    ],
)
def test_what_cannot_be_changed(own, change, problem, registered):
    before = own.description.read_text()
    with pytest.raises(ConfigError, match=problem):
        change(own)
    assert own.description.read_text() == before
    assert registered == []
