"""Where things lie in the server operator's folder and in a site's bundle."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from feddure.errors import ConfigError, RunError
from feddure.files import write_whole
from feddure.flower.app import description
from feddure.flower.app.description import Description

CONNECTION_FILE = "connection.yaml"


@dataclass(frozen=True)
class ServerFolder:
    """The folder that `feddure federate init` makes; it stays with the server's operator."""

    root: Path

    @property
    def description(self) -> Path:
        return self.root / description.FILE_NAME

    @property
    def readme(self) -> Path:
        return self.root / "README.md"

    @property
    def app(self) -> Path:
        return self.root / "app"

    @property
    def authority_key(self) -> Path:
        return self.root / "authority" / "ca.key"

    @property
    def server(self) -> Path:
        return self.root / "server"

    @property
    def authority(self) -> Path:
        return self.server / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.server / "server.crt"

    @property
    def key(self) -> Path:
        return self.server / "server.key"

    @property
    def database(self) -> Path:
        return self.server / "superlink.db"

    @property
    def log(self) -> Path:
        return self.server / "superlink.log"

    @property
    def superexec_log(self) -> Path:
        return self.server / "superexec.log"

    @property
    def settings(self) -> Path:
        return self.server / "settings.json"

    @property
    def flower_home(self) -> Path:
        return self.server / "flower"

    @property
    def registered(self) -> Path:
        """Which of Flower's nodes is which site."""
        return self.server / "registered.json"

    @property
    def ledger(self) -> Path:
        """Which of Flower's runs lies in which run folder, and what it was asked for."""
        return self.server / "runs.json"

    @property
    def running(self) -> Path:
        """Which processes are at work as this server."""
        return self.server / "running.json"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def public_key(self, site: str) -> Path:
        return self.server / "nodes" / f"{site}.pub"

    def bundle(self, site: str) -> "Bundle":
        return Bundle(self.root / "sites" / site)

    def archive(self, site: str) -> Path:
        return self.root / "sites" / f"{site}.zip"

    def read(self) -> Description:
        """The description of the federation; an error where this is not such a folder."""
        if not self.server.is_dir() or not self.description.exists():
            raise ConfigError(
                f"{self.root}: not a federation's folder; `feddure federate init {self.root} ...` makes one"
            )
        return description.read(self.description)


@dataclass(frozen=True)
class Bundle:
    """What a site gets: the folder that `init` made for it, or where the site unpacked it."""

    root: Path

    @property
    def description(self) -> Path:
        return self.root / description.FILE_NAME

    @property
    def connection(self) -> Path:
        return self.root / CONNECTION_FILE

    @property
    def readme(self) -> Path:
        return self.root / "README.md"

    @property
    def authority(self) -> Path:
        return self.root / "ca.crt"

    @property
    def key(self) -> Path:
        return self.root / "node.key"

    @property
    def public_key(self) -> Path:
        return self.root / "node.pub"

    @property
    def flower_home(self) -> Path:
        return self.root / "flower"

    @property
    def programs(self) -> Path:
        """What the site's SuperNode finds in place of Flower's programs: the guard."""
        return self.flower_home / "programs"

    @property
    def state(self) -> Path:
        """What the site must remember between rounds and restarts; it never leaves the site."""
        return self.root / "state"

    @property
    def running(self) -> Path:
        """Which processes are at work for this site."""
        return self.state / "running.json"

    @property
    def supernode_log(self) -> Path:
        """What Flower says of the connection; it may name files of the site, as the next one does."""
        return self.state / "supernode.log"

    @property
    def superexec_log(self) -> Path:
        """What is said of the work."""
        return self.state / "superexec.log"

    @property
    def cache(self) -> Path:
        """Where the site's ClientApp keeps pixels."""
        return self.state / "cache"


@dataclass(frozen=True)
class Connection:
    """How a site reaches the server."""

    site: str
    host: str
    port: int
    secure: bool = True

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def to_yaml(self) -> str:
        content = {"site": self.site, "host": self.host, "port": self.port, "secure": self.secure}
        return yaml.safe_dump(content, sort_keys=False)


def read_connection(bundle: Bundle) -> Connection:
    """How the site of a bundle reaches the server."""
    try:
        tree: Any = yaml.safe_load(bundle.connection.read_text(encoding="utf-8"))
        return Connection(str(tree["site"]), str(tree["host"]), int(tree["port"]), tree["secure"] is not False)
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
    secure: bool


def read_settings(folder: ServerFolder) -> Settings:
    """How the server of a federation runs."""
    try:
        tree = json.loads(folder.settings.read_text())
        return Settings(str(tree["bind"]), int(tree["control_port"]), tree["secure"] is not False)
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{folder.settings}: cannot be read; expected bind, control_port and secure") from None


def write_settings(folder: ServerFolder, settings: Settings) -> None:
    """Keep how the server runs."""
    content = {"bind": settings.bind, "control_port": settings.control_port, "secure": settings.secure}
    write_whole(folder.settings, (json.dumps(content, indent=1) + "\n").encode(), RunError)


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
