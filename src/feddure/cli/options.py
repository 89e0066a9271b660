"""Options that several commands share."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from feddure.errors import ConfigError

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDDURE_DATA", help="Where data sets live; default: a user cache folder."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset", help="Preset (`feddure config` lists them); default: recommended for own images, else none."
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Start from a configuration file, e.g. a run's.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any field; may be repeated.")
]

AllowModules = Annotated[
    bool,
    typer.Option("--allow-modules", help="Import, and so run, the modules that a file names; for files you trust."),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else, for scripts.")]
WhichModel = Annotated[
    str,
    typer.Option("--model", metavar="averaged|last", help="Of a run; default: the averaged one where there is one."),
]
DatasetName = Annotated[
    str | None,
    typer.Option("--dataset", help="Data set name (`feddure data list`) or path of your images."),
]
Setting = Annotated[str | None, typer.Option("--setting", help="iid-iid, iid-dir, dir-dir, fedmatch, pairs or sites.")]
Model = Annotated[str | None, typer.Option("--model", help="Network name or package.module:Class.")]
Init = Annotated[
    str | None,
    typer.Option("--init", metavar="MODEL", help="Start from this model: a finished run's folder or a .safetensors."),
]
Track = Annotated[
    str | None,
    typer.Option("--track", metavar="A,B", help="Report to mlflow, wandb or tensorboard (which runs always write)."),
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder; default: a new one under runs/.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of every random decision.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Communication rounds.")]
Clients = Annotated[int | None, typer.Option("--clients", help="Number of clients.")]
SkipDamaged = Annotated[
    bool, typer.Option("--skip-damaged", help="Leave image files out that cannot be read, and list them.")
]


def expect_writable(path: Path | None, option: str, *endings: str) -> None:
    """Refuse a file that could not be written, before any work is done."""
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{option} {path}: expected a name that ends in {' or '.join(endings)}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written ({error.strerror}); name a file in a folder you may write to"
        ) from None


def make_folder_of(path: Path, option: str) -> None:
    """Make the folder that a file is to be written into."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: its folder cannot be made ({error.strerror})") from None


def names(option: str, text: str | None) -> list[str]:
    """The names that an option lists with commas between them; none where it was not given."""
    if text is None:
        return []
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ConfigError(f"{option} {text}: expected names with commas between them, such as {option} a,b")
    return found


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers that an option lists with commas between them."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"{option} {text}: expected whole numbers from 0 with commas between them, such as 0,1,2")
    return [int(word) for word in words]
