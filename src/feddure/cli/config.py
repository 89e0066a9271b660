"""`feddure config`: presets, fields, and the configuration that options add up to."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from feddure import config
from feddure.cli.options import ConfigFile, Preset, Sets


def show(
    preset: Preset = None,
    file: ConfigFile = None,
    sets: Sets = None,
    fields: Annotated[bool, typer.Option("--fields", help="List every field with its default and meaning.")] = False,
) -> None:
    """Show presets, fields, or a complete configuration.

    Examples:

    ```text
    feddure config                                   # the presets
    feddure config --fields                          # every field and what it means
    feddure config --preset aaai24 --set partition.gamma=0.3 > mine.yaml
    ```
    """
    console = Console(soft_wrap=False)
    if fields:
        table = Table("field", "default", "meaning", title="Fields for --set and configuration files")
        for row in config.fields():
            table.add_row(*row)
        console.print(table)
    elif preset is None and file is None and not sets:
        table = Table("preset", "what it is")
        for name in config.presets():
            table.add_row(name, config.about(name))
        console.print(table)
    else:
        print(config.load(preset, file, sets=sets or ()).to_yaml(), end="")
