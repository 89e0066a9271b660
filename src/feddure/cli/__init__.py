"""The `feddure` command: each subcommand is a few lines that call the rooms below."""

import io
import os
import sys
import warnings
from typing import Annotated

import typer

from feddure import plugins
from feddure.cli import (
    compare,
    config,
    data,
    export,
    federate,
    methods,
    partition,
    predict,
    report,
    reproduce,
    run,
    sweep,
    theory,
    watch,
)
from feddure.cli.tables import plain_console, tell_error
from feddure.errors import FeddureError, FeddureWarning, first_line
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
    """Federated semi-supervised image classification: FedTutor, FedDure and baselines.

    Example: `feddure run --preset demo --method fedtutor`
    """


app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("reproduce")(reproduce.reproduce)
app.command("sweep")(sweep.sweep)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("predict")(predict.predict)
app.command("partition")(partition.partition)
app.add_typer(data.app, name="data")
app.add_typer(federate.app, name="federate")
app.command("theory")(theory.theory)
app.command("config")(config.show)
app.command("methods")(methods.methods)


def main() -> None:
    """Run the command; a mistake of the user's is one message and exit code 2, never a traceback.

    An error inside the user's own code shows that code's lines, and with FEDDURE_TRACEBACK=1 all others too.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    console = plain_console(stderr=True)
    warnings.showwarning = lambda message, category, *_: (
        console.print("note:", str(message)) if issubclass(category, FeddureWarning) else None
    )
    try:
        app()
    except FeddureError as error:
        tell_error(str(error))
        sys.exit(2)
    except Exception as error:
        lines = plugins.own_lines(error)
        if not lines or os.environ.get("FEDDURE_TRACEBACK"):
            raise
        tell_error(f"in your own code\n{lines}{first_line(error)}\nFEDDURE_TRACEBACK=1 shows the lines of feddure too")
        sys.exit(1)
