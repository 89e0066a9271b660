"""`feddure federate sites`: who may take part, and as what, while the server runs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Sites of a federation; what changes here counts without a restart.")
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder, as `init` made it.")]
SiteName = Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")]


@app.command()
def approve(folder: Folder, name: SiteName) -> None:
    """Let a site count with as many images as it says now; before, it counts with what it said first.

    Example: `feddure federate sites approve lungs north`
    """
    from feddure.flower.app.registry import Registry
    from feddure.flower.deploy.layout import ServerFolder

    federation = ServerFolder(folder.resolve())
    federation.read().client(name)
    counts = Registry(federation.server).approve(name)
    print(f"{name} counts with {counts.labelled:,} labelled and {counts.unlabelled:,} unlabelled images")
