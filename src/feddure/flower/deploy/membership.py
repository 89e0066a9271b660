"""`feddure federate sites`: sites are added, get another key or are shut out, while the server runs or not."""

from pathlib import Path

from feddure.errors import ConfigError, RunError
from feddure.files import write_whole
from feddure.flower.app import description as descriptions
from feddure.flower.app.audit import AuditLog
from feddure.flower.app.registry import Registry
from feddure.flower.deploy import certificates
from feddure.flower.deploy.control import Control, Show
from feddure.flower.deploy.init import write_bundle
from feddure.flower.deploy.layout import ServerFolder, read_settings
from feddure.flower.deploy.processes import is_listening


def add(folder: ServerFolder, site: str, public_key: Path | None, show: Show) -> None:
    """A new site, last in the list; it takes part from the next run on, and the others need nothing new."""
    before = folder.read()
    if site in before.sites:
        raise ConfigError(f"site '{site}': is there already; `federate sites rotate` gives it another key")
    after = descriptions.parse(before.model_copy(update={"sites": (*before.sites, site)}).to_yaml(), f"site {site}")
    _give_key(folder, after, site, public_key)
    write_whole(folder.description, after.to_yaml().encode(), RunError, durable=True)
    _done(folder, after, "site added", site, show)


def rotate(folder: ServerFolder, site: str, public_key: Path | None, show: Show) -> None:
    """Another key for a site; the one before is no longer let in. Also lets a site in again that was revoked."""
    description = folder.read()
    description.client(site)
    _give_key(folder, description, site, public_key)
    _done(folder, description, "key replaced", site, show)


def revoke(folder: ServerFolder, site: str, show: Show) -> None:
    """Shut a site out, at once; what it said of its images is forgotten."""
    description = folder.read()
    description.client(site)
    if not folder.public_key(site).exists():
        raise ConfigError(f"site '{site}': has no key that is let in")
    folder.public_key(site).unlink()
    try:
        _done(folder, description, "site revoked", site, show)
    finally:
        Registry(folder.server).forget(site)  # also what a run heard of it until now


def _give_key(folder: ServerFolder, description: descriptions.Description, site: str, public_key: Path | None) -> None:
    public = certificates.read_public_key(public_key) if public_key is not None else None
    folder.bundle(site).root.mkdir(parents=True, exist_ok=True)
    folder.bundle(site).key.unlink(missing_ok=True)
    write_bundle(folder, description, site, public)


def _done(folder: ServerFolder, description: descriptions.Description, event: str, site: str, show: Show) -> None:
    key = folder.public_key(site)
    known = {"key": certificates.fingerprint(certificates.read_public_key(key))} if key.exists() else {}
    AuditLog(folder.server).write(event, site=site, **known)
    if is_listening(read_settings(folder).control_port):
        Control(folder, show).register(description.sites)
