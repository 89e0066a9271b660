"""`feddure federate init`: all that server and sites need, made once on the server operator's machine."""

import io
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from feddure.errors import ConfigError, RunError
from feddure.files import write_whole
from feddure.flower.app.description import Description
from feddure.flower.deploy import certificates, instructions
from feddure.flower.deploy.layout import Bundle, Connection, ServerFolder, Settings, write_settings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

PORT, CONTROL_PORT = 9092, 9093
"""Where the gate listens for sites, and where the SuperLink listens on the server's loopback address."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+")


def initialise(
    root: Path,
    description: Description,
    public_keys: Mapping[str, Path] | None = None,
    secure: bool = True,
    control_port: int = CONTROL_PORT,
) -> ServerFolder:
    """Make the folder of a federation; sites in `public_keys` keep their private key to themselves."""
    _expect_empty(root)
    _expect_host(description.server.host)
    if control_port == description.server.port:
        raise ConfigError(f"--control-port {control_port}: sites reach the server on this port; choose another")
    given = _read_public_keys(description, public_keys or {})
    if given and not secure:
        raise ConfigError("--public-key was given with --insecure, which uses no keys: leave one of them out")
    aside = None
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=_made(root.absolute().parent)))
        _fill(ServerFolder(aside), description, given, Settings(description.server.host, control_port, secure))
        aside.chmod(0o755)
        aside.replace(root)  # all of it or nothing
    except OSError as problem:
        raise RunError(f"{root}: the federation's folder cannot be made ({problem.strerror})") from None
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    return ServerFolder(root)


def _fill(
    folder: ServerFolder,
    description: Description,
    public_keys: "Mapping[str, EllipticCurvePublicKey]",
    settings: Settings,
) -> None:
    from feddure.flower.app.app_folder import write_app

    _make_folders(folder, description)
    write_whole(folder.description, description.to_yaml().encode(), RunError)
    write_settings(folder, settings)
    if settings.secure:
        authority = certificates.make_authority(description.name)
        certificates.write_private_key(folder.authority_key, authority[0])
        certificates.write_certificate(folder.authority, authority[1])
        _write_server_certificate(folder, description.server.host, authority)
    for site in description.sites:
        _write_bundle(folder, description, site, public_keys.get(site), settings.secure)
    write_app(folder.app, description, {})
    write_whole(folder.readme, instructions.for_server(description, settings.secure).encode(), RunError)


def renew(folder: ServerFolder, authority_key: Path | None = None) -> certificates.Validity:
    """Make a new key and certificate for the server, signed by the same authority: sites need nothing new."""
    description = folder.read()
    key_path = authority_key or folder.authority_key
    if not key_path.exists():
        raise certificates.CertificateError(
            f"{key_path}: the authority's private key is not there; name its place with --authority-key FILE"
        )
    key, certificate = certificates.read_private_key(key_path), certificates.read_certificate(folder.authority)
    if not certificates.same_key(key.public_key(), certificate.public_key()):  # type: ignore[arg-type]
        raise certificates.CertificateError(f"{key_path}: is not the key of the authority {folder.authority}")
    _write_server_certificate(folder, description.server.host, (key, certificate))
    return certificates.validity(certificates.read_certificate(folder.certificate))


def _write_server_certificate(folder: ServerFolder, host: str, authority: tuple) -> None:
    key, certificate = certificates.make_server(host, authority)
    certificates.write_private_key(folder.key, key)
    certificates.write_certificate(folder.certificate, certificate)


def _write_bundle(
    folder: ServerFolder, description: Description, site: str, public: "EllipticCurvePublicKey | None", secure: bool
) -> None:
    bundle = folder.bundle(site)
    connection = Connection(site, description.server.host, description.server.port, secure)
    write_whole(bundle.description, description.to_yaml().encode(), RunError)
    write_whole(bundle.connection, connection.to_yaml().encode(), RunError)
    write_whole(
        bundle.readme, instructions.for_site(description, connection, own_key=public is not None).encode(), RunError
    )
    if secure:
        write_whole(bundle.authority, folder.authority.read_bytes(), RunError)
        if public is None:
            key = certificates.make_node_key()
            certificates.write_private_key(bundle.key, key, ssh=True)
            public = key.public_key()
        line = certificates.public_line(public, site)
        write_whole(bundle.public_key, line, RunError)
        write_whole(folder.public_key(site), line, RunError)
    _write_archive(folder.archive(site), bundle, site)


def _write_archive(path: Path, bundle: Bundle, site: str) -> None:
    """The bundle as one file to hand over; it may hold the site's private key, so only its owner can read it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(bundle.root.iterdir()):
            entry = zipfile.ZipInfo(f"{site}/{file.name}", date_time=(2024, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100600 if file == bundle.key else 0o100644) << 16
            archive.writestr(entry, file.read_bytes())
    with certificates.for_owner_alone():
        write_whole(path, content.getvalue(), RunError)


def _make_folders(folder: ServerFolder, description: Description) -> None:
    for place in (folder.authority_key.parent, folder.server, folder.root / "sites"):
        place.mkdir(mode=0o700)
    folder.runs.mkdir()
    folder.public_key("any").parent.mkdir()
    for site in description.sites:
        folder.bundle(site).root.mkdir()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _expect_empty(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root}: a file is there; choose another folder")
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root}: the folder is not empty; choose a new one, so that no key is overwritten")


def _expect_host(host: str) -> None:
    if not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"--server-address {host}: expected the name or the IP address under which sites reach it")
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--server-address {host}: sites cannot reach this address; give the server's name or IP address here, "
            f"and `--host {host}` to `feddure federate server`"
        )


def _read_public_keys(description: Description, public_keys: Mapping[str, Path]) -> "dict[str, EllipticCurvePublicKey]":
    for site in public_keys:
        if site not in description.sites:
            raise ConfigError(f"--public-key {site}=...: no such site; there are: {', '.join(description.sites)}")
    return {site: certificates.read_public_key(path) for site, path in public_keys.items()}
