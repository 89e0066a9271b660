"""`feddure federate init`: all that server and sites need, made once on the server operator's machine."""

import io
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from feddure.errors import ConfigError, RunError
from feddure.files import expect_free, write_whole
from feddure.flower.app.description import Description
from feddure.flower.app.policy import LEAVES
from feddure.flower.app.private_files import write_private_file
from feddure.flower.deploy import certificates
from feddure.flower.deploy.certificates import AUTHORITY_DAYS, SERVER_DAYS
from feddure.flower.deploy.layout import Bundle, Connection, ServerFolder, Settings, write_settings

PORT, CONTROL_PORT = 9092, 9093
"""Where the proxy listens for sites, and where the SuperLink listens on the server's loopback address."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+")


def initialise(
    root: Path,
    description: Description,
    public_keys: Mapping[str, Path] | None = None,
    control_port: int = CONTROL_PORT,
) -> ServerFolder:
    """Make the folder of a federation; sites in `public_keys` keep their private key to themselves."""
    expect_free(root, ConfigError, "; choose a new one, so that no key is overwritten", hidden=True)
    _expect_host(description.server.host)
    if control_port == description.server.port:
        raise ConfigError(f"--control-port {control_port}: sites reach the server on this port; choose another")
    given = _read_public_keys(description, public_keys or {})
    aside = None
    try:
        root.absolute().parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.absolute().parent))
        _fill(ServerFolder(aside), description, given, Settings(description.server.host, control_port))
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
    public_keys: Mapping[str, EllipticCurvePublicKey],
    settings: Settings,
) -> None:
    for place in (folder.authority_key.parent, folder.server, folder.sites):
        place.mkdir(mode=0o700)
    for place in (folder.runs, folder.public_keys, *(folder.bundle(site).root for site in description.sites)):
        place.mkdir()
    write_whole(folder.description, description.to_yaml().encode(), RunError)
    write_settings(folder, settings)
    authority = certificates.make_authority(description.name)
    certificates.write_private_key(folder.authority_key, authority[0])
    certificates.write_certificate(folder.authority, authority[1])
    _write_server_certificate(folder, description.server.host, authority)
    for site in description.sites:
        write_bundle(folder, description, site, public_keys.get(site))
    write_whole(folder.readme, _server_readme(description).encode(), RunError)


def renew(folder: ServerFolder, authority_key: Path | None = None) -> x509.Certificate:
    """Make a new key and certificate for the server, signed by the same authority: sites need nothing new."""
    description = folder.read()
    key_path = authority_key or folder.authority_key
    if not key_path.exists():
        raise certificates.CertificateError(
            f"{key_path}: the authority's private key is not there; name its place with --authority-key FILE"
        )
    key, certificate = certificates.read_private_key(key_path), certificates.read_certificate(folder.authority)
    if key.public_key() != certificate.public_key():
        raise certificates.CertificateError(f"{key_path}: is not the key of the authority {folder.authority}")
    return _write_server_certificate(folder, description.server.host, (key, certificate))


def _write_server_certificate(folder: ServerFolder, host: str, authority: certificates.Authority) -> x509.Certificate:
    key, certificate = certificates.make_server(host, authority)
    certificates.write_private_key(folder.key, key)
    certificates.write_certificate(folder.certificate, certificate)
    return certificate


def write_bundle(
    folder: ServerFolder, description: Description, site: str, public: EllipticCurvePublicKey | None
) -> None:
    """What a site gets, with a new key or under its own public key, and the public key for the server."""
    bundle = folder.bundle(site)
    connection = Connection(site, description.server.host, description.server.port)
    write_whole(bundle.description, description.to_yaml().encode(), RunError)
    write_whole(bundle.connection, connection.to_yaml().encode(), RunError)
    write_whole(bundle.readme, _site_readme(description, connection, own_key=public is not None).encode(), RunError)
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
    write_private_file(path, content.getvalue(), RunError)


def _expect_host(host: str) -> None:
    if not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"--server-address {host}: expected the name or the IP address under which sites reach it")
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--server-address {host}: sites cannot reach this address; give the server's name or IP address here, "
            f"and `--host {host}` to `feddure federate server`"
        )


def _read_public_keys(description: Description, public_keys: Mapping[str, Path]) -> dict[str, EllipticCurvePublicKey]:
    for site in public_keys:
        if site not in description.sites:
            raise ConfigError(f"--public-key {site}=...: no such site; there are: {', '.join(description.sites)}")
    return {site: certificates.read_public_key(path) for site, path in public_keys.items()}


# --- READMEs -----------------------------------------------------------------------------------------
def _server_readme(description: Description) -> str:
    """What the server's operator does with the folder."""
    sites = "\n".join(f"| {site} | `sites/{site}.zip` |" for site in description.sites)
    return f"""# {description.name}: the server

Sites reach this server at **{description.server.host}, TCP port {description.server.port}**. Open that port, and
only that one.

1. Hand each site its bundle over a channel you trust (it may hold the site's private key):

   | site | bundle |
   |---|---|
{_indented(sites)}

2. Start the server, and leave it running: `feddure federate server .`
3. Start a run, on this machine: `feddure federate run . --rounds 50`
4. Look: `feddure federate status .`

{_AUTHORITY}
`federation.yaml` says what all sites agree on (classes, image size, normalisation). After a change of those every site
needs the new file: make a new folder with `feddure federate init` and hand out new bundles. Sites come and go with
`feddure federate sites add|rotate|revoke . NAME`, while the server runs.

All of it is explained in docs/federation.md and docs/security.md of feddure.
"""


def _site_readme(description: Description, connection: Connection, own_key: bool) -> str:
    """What a site's operator does with the bundle."""
    site = connection.site
    key = _OWN_KEY if own_key else _GIVEN_KEY
    classes = "\n".join(f"    IMAGES/labelled/{name}/*" for name in description.classes)
    leaves = "\n".join(f"- {each}" for each in LEAVES)
    return f"""# {description.name}: site {site}

This folder lets `{site}` join the federation at {connection.address}. The site needs outgoing TCP to that address
and no open port.

1. Install the feddure that the server's operator has, with its extra `flower` (Python 3.11 or newer).
2. Put the images in a folder of this shape; PNG, JPEG, TIFF, BMP, GIF or WebP, up to 67 million pixels:

{classes}
    IMAGES/unlabelled/*
    IMAGES/test/CLASS/*         (if you have some: they stay here, and the received model is tested on them)

   Folders of classes you have no images of may be missing; so may `unlabelled`. Where 16-bit files hold 12-bit
   greys, say `--data 'folder:IMAGES?depth=12'` below.
3. Check everything, with this folder as the current one: `feddure federate check . {site} --data IMAGES`
4. Join: `feddure federate site . {site} --data IMAGES --approve ask`, and leave it running; Ctrl-C leaves the
   federation. Each run asks first: answer `y` or `n` there, or with `feddure federate approve . {site}`. With
   `--approve always` the site takes part in all. The terminal has a line for each round, and says why where the site
   is refused; Flower's own logs lie in `state/`.

{key}
Images, file names and labels stay here. What leaves the site:

{leaves}

A method may send more, which the question before a run says. What all this tells: docs/security.md. The server chooses
what is trained and for how long, but cannot bring code of its own: this site runs the feddure that you installed. Use
an account that can read IMAGES and little else all the same.

`state/cache` keeps the images' pixels, not encrypted, for this account alone; remove it where images are to be deleted,
and it is made again of those that are there. Keep the rest of `state/`: the privacy ledger, approvals and audit log.
"""


def _indented(lines: str) -> str:
    return "\n".join("   " + line for line in lines.splitlines())


_AUTHORITY = f"""## Keys

- `authority/ca.key` signs the server's certificate ({SERVER_DAYS} days) and is needed again only to renew it.
  Whoever has it can pose as this server. Take it off line now: move it to a place that is not on a network, and
  bring it back for `feddure federate renew . --authority-key FILE`. The authority itself holds for
  {AUTHORITY_DAYS // 365} years.
- `server/server.key` must stay on this machine. `server/nodes/SITE.pub` are the public keys of the sites that may join.
- Once a site has its bundle, remove `sites/SITE/node.key` and `sites/SITE.zip` here: only the site needs them.

"""

_GIVEN_KEY = """`node.key` is this site's private key: whoever has it can join as this site. Keep it readable by one
user only, and ask the server's operator to remove the copy. `ca.crt` lets this site recognise the server.
"""

_OWN_KEY = """This site made its own key: put the private key here as `node.key`, readable by one user only. Nobody
else has it. `ca.crt` lets this site recognise the server.
"""
