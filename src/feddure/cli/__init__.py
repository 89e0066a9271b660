"""The `feddure` command: each subcommand is a few lines that call the rooms below."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from feddure.cli import config as config_command
from feddure.errors import FeddureError
from feddure.version import VERSION

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"feddure {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated semi-supervised learning: FedDure and its rivals, exact, fast and measured."""


app.command("config")(config_command.show)


def main() -> None:
    """Run the command; a mistake of the user's is one message and exit code 2, never a traceback."""
    try:
        app()
    except FeddureError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False)
        sys.exit(2)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
