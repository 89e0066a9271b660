"""The guard: a site runs feddure's own code and no other.

A run of Flower brings its app along, and the app's Python code runs at every site, under the site's account. A
federation of feddure needs none: its app only names the installed package. So a site's SuperNode finds, under the name
of Flower's program for client apps, one that looks at the app first and refuses any that holds more than that; the
other programs that a server could have started here are refused altogether. This file is also the program itself.
"""

import io
import shlex
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddure.errors import FeddureError

CLIENT_PROGRAM = "flwr-clientapp"
CLIENT_APP = "feddure.federation.flower.client_app:app"
_HARMLESS = {"pyproject.toml", ".info/CONTENT"}


class ForeignCode(FeddureError):
    """An app holds something else than a pointer to feddure."""


def expect_own_app(content: bytes) -> None:
    """Refuse an app, as Flower packs it, that holds code or names other code than feddure's."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            found = archive.namelist()
            settings = tomllib.loads(archive.read("pyproject.toml").decode()) if "pyproject.toml" in found else {}
        named = settings["tool"]["flwr"]["app"]["components"]["clientapp"]
    except (zipfile.BadZipFile, tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ForeignCode("the run's app cannot be read; this site refuses it") from None
    others = sorted(set(found) - _HARMLESS)
    if others:
        raise ForeignCode(
            f"the run's app brings files along ({others[0]}, ...); this site runs feddure's own code only"
        )
    if named != CLIENT_APP:
        raise ForeignCode(f"the run's app names {named}; this site runs {CLIENT_APP} only")


def write_programs(folder: Path) -> Path:
    """Write the programs that a site's SuperNode is to find first on its path; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    python = shlex.quote(sys.executable)
    beside = {program.name for program in Path(sys.executable).parent.glob("flwr-*")}
    for name in beside | {CLIENT_PROGRAM}:
        if name == CLIENT_PROGRAM:
            action = f'exec {python} -m {__name__} "$@"'
        else:
            action = f"echo '{name}: this site runs client apps of feddure only' >&2\nexit 1"
        program = folder / name
        program.write_text(f"#!/bin/sh\n{action}\n")
        program.chmod(0o755)
    return folder


def _guarded(install: Callable[..., Any]) -> Callable[..., Any]:
    def install_own(content: bytes, *arguments: Any, **options: Any) -> Any:
        expect_own_app(content)
        return install(content, *arguments, **options)

    return install_own


def main() -> None:
    """Flower's program for client apps, which first looks at the app."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    # Fails, and the site with it, where another version of Flower installs apps in another way.
    run_clientapp.install_from_fab = _guarded(run_clientapp.install_from_fab)
    flwr_clientapp()


if __name__ == "__main__":
    main()
