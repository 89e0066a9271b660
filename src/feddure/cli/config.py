"""`feddure config`: presets, fields, and the configuration that options add up to."""

from typing import Annotated

import typer
from rich.markup import escape

from feddure.cli.options import ConfigFile, Preset, Sets
from feddure.cli.tables import listing
from feddure.terminal import Console


def show(
    preset: Preset = None,
    file: ConfigFile = None,
    sets: Sets = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="List every field with its default, its values and its meaning.")
    ] = False,
) -> None:
    """Show presets, fields, or a complete configuration.

    Examples:

    ```text
    feddure config                                   # the presets
    feddure config --fields                          # every field and what it means
    feddure config --preset aaai24 --set partition.gamma=0.3 > mine.yaml
    ```
    """
    from feddure import experiments

    console = Console(soft_wrap=False)
    if fields:
        for row in experiments.fields():
            values = f"  ({row.allowed})" if row.allowed else ""
            console.print(f"[bold]{escape(row.key)}[/] = {escape(row.default)}[dim]{escape(values)}[/]", soft_wrap=True)
            console.print(f"    {escape(row.meaning)}")
    elif preset is None and file is None and not sets:
        table = listing("preset", "what it is")
        for name in experiments.presets():
            table.add_row(name, experiments.about(name))
        console.print(table)
    else:
        print(experiments.to_yaml(experiments.load(preset, file, sets=sets or ())), end="")
