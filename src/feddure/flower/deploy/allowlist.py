"""The allowlist: a site runs feddure's own code and no other.

A run of Flower brings its app along, and the app's Python code runs at every site, under the site's account. A
federation of feddure needs none: its app only names the installed package. So a site's SuperNode finds, under the name
of Flower's program for client apps, one that looks at the app, refuses any that holds more than that, and runs the
installed one, wherever the server says that the app lies; the other programs that a server could have started here are
refused altogether. This file is also the program itself.
"""

import io
import os
import re
import shlex
import shutil
import sys
import tomllib
import zipfile
import zlib
from pathlib import Path
from typing import Any

from feddure.errors import FeddureError, RunError
from feddure.flower.app import APP_NAME, CLIENT_APP, PUBLISHER
from feddure.flower.app.sanitize import log

_MODULE = "feddure.flower.deploy.allowlist"  # `__name__` is another where this file is the program
CLIENT_PROGRAM = "flwr-clientapp"
_VERSION = re.compile(r"[0-9A-Za-z.+]+")
_HARMLESS = {"pyproject.toml", ".info/CONTENT"}
_FILE_BYTES = 1 << 20
_APP_BYTES = 128 << 10
"""Of a whole app, packed. What its files say of their sizes may be wrong: deflated, they unpack to a thousand times as
much at most, and by other ways to any size."""
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # an encrypted archive, or a compression that zipfile does not know
    tomllib.TOMLDecodeError,
    UnicodeDecodeError,
    KeyError,
    TypeError,
)


class ForeignCode(FeddureError):
    """An app holds something else than a pointer to feddure."""


def check_app(content: bytes) -> None:
    """Refuse an app, as Flower packs it, that holds code or names other code than feddure's."""
    if len(content) > _APP_BYTES:
        raise ForeignCode(f"the run's app has more than {_APP_BYTES:,} bytes; this site refuses it")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for file in archive.infolist():
                if file.file_size > _FILE_BYTES or file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ForeignCode(
                        f"the run's app holds {file.filename!r} of more than {_FILE_BYTES:,} bytes or packed in an "
                        "unusual way; this site refuses it"
                    )
            found = archive.namelist()
            settings = tomllib.loads(archive.read("pyproject.toml").decode())
        app, project = settings["tool"]["flwr"]["app"], settings["project"]
        named = app["components"]["clientapp"]
        identity = app["publisher"], project["name"]
        version = project["version"]
    except _UNREADABLE:
        raise ForeignCode("the run's app cannot be read; this site refuses it") from None
    others = sorted(set(found) - _HARMLESS)
    if others or len(found) > len(set(found)):
        raise ForeignCode(
            f"the run's app brings files along ({(others or found)[0]!r}, ...); this site runs feddure's own code only"
        )
    if named != CLIENT_APP:
        raise ForeignCode(f"the run's app names {named!r}; this site runs {CLIENT_APP} only")
    if identity != (PUBLISHER, APP_NAME):
        raise ForeignCode(f"the run's app is {identity!r}; this site runs {APP_NAME} of {PUBLISHER} only")
    # Flower makes folders of these: none of them may lead out of its own.
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise ForeignCode(f"the run's app has the version {version!r}; expected letters, digits, dots and plus signs")


def write_wrappers(folder: Path) -> Path:
    """Write the programs that a site's SuperNode is to find first on its path; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    python = shlex.quote(sys.executable)
    beside = {program.name for program in Path(sys.executable).parent.glob("flwr-*")}
    for name in beside | _started_by_flower() | {CLIENT_PROGRAM}:
        if name == CLIENT_PROGRAM:
            # -P: modules that lie in the current folder cannot be imported.
            action = f'exec {python} -P -m {_MODULE} "$@"'
        else:
            action = f"echo '{name}: this site runs client apps of feddure only' >&2\nexit 1"
        program = folder / name
        program.write_text(f"#!/bin/sh\n{action}\n")
        program.chmod(0o755)
        if os.name == "posix" and not os.access(program, os.X_OK):
            # Whoever looks for a program would pass over this one and take Flower's own.
            raise RunError(f"{folder}: programs cannot be started from here (noexec?); unpack the bundle elsewhere")
    return folder


def check_path(folder: Path, path: str) -> None:
    """Refuse a search path on which one of these programs is not the one that is found."""
    for program in sorted(folder.iterdir()):
        found = shutil.which(program.name, path=path)
        if found is None or Path(found) != program:
            raise RunError(
                f"{program.name}: feddure's own is not what would be started, but {found}; "
                f"leave PATH to feddure, and unpack the bundle in a folder without '{os.pathsep}' in its name"
            )


def _started_by_flower() -> set[str]:
    """The programs that Flower starts by name when a server asks for it, wherever on the path they lie."""
    try:
        from flwr.supercore.constant import TASK_TYPE_TO_COMMAND
    except ImportError:
        raise RunError(
            "this version of Flower does not say which programs it starts, so this site cannot be protected; "
            "pip install 'feddure[flower]'"
        ) from None
    return set(TASK_TYPE_TO_COMMAND.values())


def main() -> None:
    """Flower's program for client apps, which looks at the app, and runs feddure's own."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    def check(content: Any, **options: Any) -> None:
        try:
            check_app(content)
        except ForeignCode as problem:
            log(f"problem: refused: {problem}; ask the server's operator, whose run this was")
            raise

    def own(**options: Any) -> Any:
        from feddure.flower.app.client import app

        return lambda *named: app

    for name, instead in (("install_from_fab", check), ("get_load_client_app_fn", own)):
        getattr(run_clientapp, name)  # fails, and the site with it, where another version of Flower has none
        setattr(run_clientapp, name, instead)
    flwr_clientapp()


if __name__ == "__main__":
    main()
