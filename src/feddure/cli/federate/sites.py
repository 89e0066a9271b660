"""`feddure federate sites`: who may take part, and as what, while the server runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from feddure.flower.deploy.layout import ServerFolder

app = typer.Typer(
    no_args_is_help=True,
    help="Sites of a federation, changed without a restart: `feddure federate sites add lungs west`.",
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder, as `init` made it.")]
PublicKey = Annotated[
    Path | None, typer.Option("--public-key", metavar="FILE", help="The site's own public key; default: a new pair.")
]
SiteName = Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")]


def server_folder(folder: Path) -> "ServerFolder":
    """The federation in a folder; what is imported for it takes a moment."""
    from feddure.flower.deploy.layout import ServerFolder

    return ServerFolder(folder.resolve())


@app.command()
def approve(folder: Folder, name: SiteName) -> None:
    """Let a site count with as many images as it says now; before, it counts with what it said first.

    Example: `feddure federate sites approve lungs north`
    """
    from feddure.flower.app.audit import AuditLog
    from feddure.flower.app.registry import Registry

    federation = server_folder(folder)
    federation.read().client(name)
    counts = Registry(federation.server).approve(name)
    AuditLog(federation.server).write("images approved", site=name, **asdict(counts))
    print(f"{name} counts with {counts.labelled:,} labelled and {counts.unlabelled:,} unlabelled images")


@app.command()
def add(folder: Folder, name: SiteName, public_key: PublicKey = None) -> None:
    """Add a site: it can join at once, and takes part from the next run on; the others need nothing new.

    Example: `feddure federate sites add lungs west --public-key west.pub`, then hand over lungs/sites/west.zip
    """
    from feddure.flower.deploy import membership

    federation = server_folder(folder)
    membership.add(federation, name, public_key, print)
    print(f"hand {federation.archive(name)} to {name}")


@app.command()
def rotate(folder: Folder, name: SiteName, public_key: PublicKey = None) -> None:
    """Give a site another key, and with it another bundle; the one before is no longer let in.

    Example: `feddure federate sites rotate lungs north --public-key north.pub`
    """
    from feddure.flower.deploy import membership

    federation = server_folder(folder)
    membership.rotate(federation, name, public_key, print)
    print(f"hand {federation.archive(name)} to {name}")


@app.command()
def revoke(folder: Folder, name: SiteName) -> None:
    """Shut a site out, at once and also in a run that is going on; `rotate` lets it in again with another key.

    Example: `feddure federate sites revoke lungs north`
    """
    from feddure.flower.deploy import membership

    membership.revoke(server_folder(folder), name, print)
    print(f"{name} is shut out")
