"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDDURE_DATA", help="Where data sets live; default: a user cache folder."),
]
Preset = Annotated[str | None, typer.Option("--preset", help="Start from this preset (`feddure config` lists them).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Start from a configuration file, e.g. a run's.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any field; may be repeated.")
]
