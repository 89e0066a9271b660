"""Where things lie in the server operator's folder and in a site's bundle."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from feddure.errors import ConfigError, RunError
from feddure.files import write_json
from feddure.flower.app import audit, description
from feddure.flower.app.description import FILE_NAME, Description

CONNECTION_FILE = "connection.yaml"


class _Below:
    """A path below a folder's root."""

    def __init__(self, *parts: str):
        self._parts = parts

    def __get__(self, folder: "ServerFolder | Bundle", owner: type) -> Path:
        return folder.root.joinpath(*self._parts)


@dataclass(frozen=True)
class ServerFolder:
    """The folder that `feddure federate init` makes; it stays with the server's operator."""

    root: Path

    description = _Below(FILE_NAME)
    readme = _Below("README.md")
    app = _Below("app")
    runs = _Below("runs")
    sites = _Below("sites")
    authority_key = _Below("authority", "ca.key")
    server = _Below("server")
    authority = _Below("server", "ca.crt")
    certificate = _Below("server", "server.crt")
    key = _Below("server", "server.key")
    public_keys = _Below("server", "nodes")
    database = _Below("server", "superlink.db")
    log = _Below("server", "superlink.log")
    superexec_log = _Below("server", "superexec.log")
    settings = _Below("server", "settings.json")
    flower_home = _Below("server", "flower")
    registered = _Below("server", "registered.json")  # which of Flower's nodes is which site
    run_index = _Below("server", "runs.json")  # which of Flower's runs lies in which run folder
    pidfile = _Below("server", "running.json")

    def public_key(self, site: str) -> Path:
        return self.public_keys / f"{site}.pub"

    def bundle(self, site: str) -> "Bundle":
        return Bundle(self.sites / site)

    def archive(self, site: str) -> Path:
        return self.sites / f"{site}.zip"

    def read(self) -> Description:
        """The description of the federation; an error where this is not such a folder."""
        if not self.server.is_dir() or not self.description.exists():
            raise ConfigError(
                f"{self.root}: not a federation's folder; `feddure federate init {self.root} ...` makes one"
            )
        read_settings(self)  # refuses a federation without keys
        return description.read(self.description)


@dataclass(frozen=True)
class Bundle:
    """What a site gets: the folder that `init` made for it, or where the site unpacked it."""

    root: Path

    description = _Below(FILE_NAME)
    connection = _Below(CONNECTION_FILE)
    readme = _Below("README.md")
    authority = _Below("ca.crt")
    key = _Below("node.key")
    public_key = _Below("node.pub")
    flower_home = _Below("flower")
    programs = _Below("flower", "programs")  # what the SuperNode finds in place of Flower's programs
    state = _Below("state")  # what the site keeps between rounds and restarts; it never leaves the site
    cache = _Below("state", "cache")  # pixels
    pidfile = _Below("state", "running.json")
    supernode_log = _Below("state", "supernode.log")  # may name files of the site, as the next one does
    superexec_log = _Below("state", "superexec.log")


@dataclass(frozen=True)
class Connection:
    """How a site reaches the server."""

    site: str
    host: str
    port: int

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self) | {"secure": True}, sort_keys=False)


def read_connection(bundle: Bundle) -> Connection:
    """How the site of a bundle reaches the server."""
    try:
        tree: Any = yaml.safe_load(bundle.connection.read_text(encoding="utf-8"))
        _expect_secure(tree, bundle.connection)
        return Connection(str(tree["site"]), str(tree["host"]), int(tree["port"]))
    except OSError as problem:
        raise ConfigError(f"{bundle.connection}: cannot be read ({problem.strerror})") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{bundle.connection}: expected site, host, port and secure; take the file from the bundle again"
        ) from None


@dataclass(frozen=True)
class Settings:
    """How the server runs, as `init` wrote it."""

    bind: str
    control_port: int


def read_settings(folder: ServerFolder) -> Settings:
    """How the server of a federation runs."""
    try:
        tree = json.loads(folder.settings.read_text())
        _expect_secure(tree, folder.settings)
        return Settings(str(tree["bind"]), int(tree["control_port"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{folder.settings}: cannot be read; expected bind, control_port and secure") from None


def write_settings(folder: ServerFolder, settings: Settings) -> None:
    """Keep how the server runs."""
    write_json(folder.settings, asdict(settings) | {"secure": True}, RunError)


def _expect_secure(tree: Any, path: Path) -> None:
    """Refuse what an earlier version made with `--insecure`; those versions read the field, so it is still written."""
    if tree["secure"] is False:
        raise ConfigError(
            f"{path}: this federation was made with --insecure, without encryption and keys, which is no longer "
            "possible; make it anew with `feddure federate init`"
        )


def find_bundle(folder: Path, site: str) -> Bundle:
    """The bundle of a site in the whole folder or in an unpacked bundle, whichever `folder` is."""
    if (folder / "sites" / site).is_dir():
        return ServerFolder(folder).bundle(site)
    bundle = Bundle(folder)
    if not bundle.connection.exists():
        raise ConfigError(
            f"{folder}: neither the bundle of site '{site}' nor a federation's folder with that site; "
            f"unpack {site}.zip and name the folder with {CONNECTION_FILE} in it"
        )
    owner = read_connection(bundle).site
    if owner != site:
        raise ConfigError(f"{folder}: this is the bundle of site '{owner}', but '{site}' was given")
    return bundle


def find_audit_log(place: Path) -> Path:
    """The audit log of a federation's folder or of a site's bundle; a file is itself one."""
    server, bundle = ServerFolder(place), Bundle(place)
    logs = {"server": server.server / audit.FILE, "site": bundle.state / audit.FILE}
    for found in logs.values():
        if found.exists():
            return found
    if not place.is_dir():
        return place
    owner = "server" if server.settings.exists() else "site" if bundle.connection.exists() else ""
    if not owner:
        raise ConfigError(f"{place}: neither a federation's folder nor a site's bundle, and no audit.jsonl")
    raise RunError(f"{logs[owner]}: no audit log yet: the {owner} has not run")


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """The host and the port of HOST, HOST:PORT or [IPV6]:PORT."""
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    host = host.strip()
    if not host or "/" in host or (port and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535)):
        raise ConfigError(f"--server-address {text}: expected HOST or HOST:PORT, such as fed.org:{default_port}")
    return host, int(port) if port else default_port
