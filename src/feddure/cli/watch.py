"""`feddure watch`: a local page that follows what trains in a folder."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from feddure.cli.tables import plain_console
from feddure.errors import RunError


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A run, comparison, sweep or federation, or a folder of such.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; default: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Follow runs, comparisons, sweeps and federations while they train, on a page that only this machine can open.

    It reads what they write and changes nothing; start and stop it at any time. Ctrl-C ends it.

    Examples:

    ```text
    feddure watch                              # all that is in runs/
    feddure watch runs/compare-demo            # one comparison
    feddure watch --no-browser --port 8765     # on a server; docs/watching.md
    ```
    """
    if not folder.exists():
        raise RunError(
            f"{folder}: there is no such folder yet; start a run first, or name the folder that it writes to"
        )
    if not folder.is_dir():
        raise RunError(f"{folder}: a file was given; expected a folder, here perhaps {folder.parent}")
    from feddure.watch.folder import Folder
    from feddure.watch.server import Server

    console = plain_console(stderr=True)
    watched = Folder(folder)
    with Server(watched, port) as server, suppress(KeyboardInterrupt):
        console.print(f"watching {folder}: {server.url} (Ctrl-C ends it)")
        watched.look()
        if not watched.entries:
            console.print("nothing is there yet; the page shows runs as they begin")
        if browser:
            _open(server.url)
        server.serve_forever()


def _open(url: str) -> None:
    """In a window; a browser for terminals would take over this one."""
    import os
    import sys
    import webbrowser

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    webbrowser.open(url)
