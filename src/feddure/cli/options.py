"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddure.errors import ConfigError

if TYPE_CHECKING:
    from feddure.data.dataset import Dataset

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDDURE_DATA", help="Where data sets live; default: a user cache folder."),
]
Preset = Annotated[str | None, typer.Option("--preset", help="Start from this preset (`feddure config` lists them).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Start from a configuration file, e.g. a run's.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any field; may be repeated.")
]


def expect_clients(clients: int | None, setting: str, images: "Dataset") -> None:
    """Refuse a --clients that contradicts the sites of the data, which are the clients under --setting sites."""
    if setting == "sites" and images.sites and clients not in (None, len(images.sites)):
        raise ConfigError(
            f"--clients {clients}: data set '{images.name}' has {len(images.sites)} sites, and under "
            "--setting sites each is one client; leave --clients out"
        )
