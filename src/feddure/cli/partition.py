"""`feddure partition`: deal a data set's images to clients, look at the result, keep it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.markup import escape

from feddure import config, plugins
from feddure.cli.options import AsJson, DataDir, expect_writable, make_folder_of
from feddure.cli.tables import listing, numbers
from feddure.data import sources
from feddure.data.partition import describe, expect_clients, make, summarise
from feddure.errors import ConfigError
from feddure.terminal import Console

CLIENTS = 20
"""Number of clients unless told otherwise: a picture of so many is easy to read."""

DEALT = "dir-dir"
"""The setting of images without sites unless told otherwise."""

SHOWN = 10
"""Clients at each end of a long table."""

_KINDS = ("labelled", "unlabelled")
_NAMES = 3


def partition(
    dataset: Annotated[
        str, typer.Option("--dataset", help="Data set name, path of your images, or `module:function`.")
    ] = "fashion-mini",
    setting: Annotated[
        str | None,
        typer.Option(
            "--setting",
            show_default=f"{DEALT}, or sites where the data have them",
            help="iid-iid, iid-dir, dir-dir (labelled-unlabelled), fedmatch, pairs or sites.",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option("--clients", show_default=str(CLIENTS), help="Number of clients; sites bring their own."),
    ] = None,
    gamma: Annotated[float, typer.Option("--gamma", help="Dirichlet concentration; smaller is more unequal.")] = 0.5,
    labels_per_class: Annotated[
        int | None,
        typer.Option(
            "--labels-per-class",
            show_default="5, or a folder's own labels",
            help="Labelled images per class and client.",
        ),
    ] = None,
    label_fraction: Annotated[
        float | None,
        typer.Option("--label-fraction", help="Labelled share of all images, instead of --labels-per-class."),
    ] = None,
    labelled_clients: Annotated[
        float, typer.Option("--labelled-clients", help="Share of the clients that hold labels.")
    ] = 1.0,
    unlabelled_fraction: Annotated[
        float, typer.Option("--unlabelled-fraction", help="Share of its unlabelled images that each client keeps.")
    ] = 1.0,
    labelled_as_unlabelled: Annotated[
        bool, typer.Option("--labelled-as-unlabelled", help="Labelled images are among the unlabelled ones too.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed; the same one gives the same partition anywhere.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.npz", help="Save the partition.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw class × client as bubbles (.png, .svg or .pdf)."),
    ] = None,
    as_json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", help="List every client, however many.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Deal a data set's images to clients: who holds what, how unequal it is, a picture, a file with a hash.

    Examples:

    ```text
    feddure partition
    feddure partition --setting iid-dir --gamma 0.3 --plot clients.png
    feddure partition --dataset cifar10 --clients 100 --out partition.npz
    feddure partition --dataset cifar10 --label-fraction 0.02 --json
    feddure partition --setting pairs --gamma 0.1 --labelled-as-unlabelled     # as in SAGE
    feddure partition --labelled-clients 0.5 --unlabelled-fraction 0.1
    feddure partition --dataset hospitals        # its sites, if it has some
    ```
    """
    expect_writable(out, "--out", ".npz")
    expect_writable(plot, "--plot", ".png", ".svg", ".pdf")
    options = _options(
        setting=setting or DEALT,
        clients=CLIENTS if clients is None else clients,
        gamma=gamma,
        labels_per_class=labels_per_class,
        label_fraction=label_fraction,
        labelled_clients=labelled_clients,
        unlabelled_fraction=unlabelled_fraction,
        labelled_as_unlabelled=labelled_as_unlabelled,
        seed=seed,
    )
    plugins.allow(dataset)
    images = sources.load(sources.resolve(dataset), data_dir, progress=not as_json)
    if setting is None and images.sites:
        options = options.model_copy(update={"setting": "sites"})
    expect_clients(clients, options.setting, images)
    with _named_options():
        made = make(images, options, seed)
    if plot is not None:
        # Drawn before anything is written; matplotlib is slow to import, so only where it is needed.
        from feddure.reports import partition_figure as bubbles
        from feddure.reports import style

        picture = bubbles.figure(summarise(made, images), images.name)
        make_folder_of(plot, "--plot")
        style.save(picture, plot)
    if out is not None:
        make_folder_of(out, "--out")
        made.save(out)
    report = describe(made, images)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report, every or made.clients <= 2 * SHOWN, [path for path in (out, plot) if path is not None])


def _options(**fields: Any) -> config.PartitionOptions:
    """Options of the command as the section of a configuration."""
    from feddure import experiments

    with _named_options():
        return experiments.build({"partition": fields, "clients_per_round": 1}).partition


@contextmanager
def _named_options() -> Iterator[None]:
    """Errors that name fields name this command's options."""
    try:
        yield
    except ConfigError as error:
        once = re.sub(r"(--\w+ \S+) \(partition\.\w+\)", r"\1", str(error))
        field = r"(?:--set )?\bpartition\.(\w+)(?:=true)?"
        raise ConfigError(re.sub(field, lambda found: "--" + found[1].replace("_", "-"), once)) from None


def _show(report: dict[str, Any], every: bool, files: list[Path]) -> None:
    """The report as a table and a few lines for people."""
    parameters, clients = report["parameters"], report["clients"]
    console = Console(highlight=False, soft_wrap=True)
    title = f"{parameters['dataset']}, {parameters['setting']}, {len(clients):,} clients, seed {parameters['seed']}"
    absent_among = [f"absent among {kind}" for kind in _KINDS]
    table = listing(*numbers("client", *_KINDS), *absent_among, title=escape(title))
    for client in clients if every else clients[:SHOWN]:
        table.add_row(*_row(client))
    if not every:
        table.add_section()
        table.add_row(f"… {len(clients) - 2 * SHOWN:,} more", style="dim")
        table.add_section()
        for client in clients[-SHOWN:]:
            table.add_row(*_row(client))
    console.print(table)
    for kind in _KINDS:
        sizes = [client[kind] for client in clients]
        absent = [len(client[f"absent_{kind}"]) for client in clients if client[f"absent_{kind}"] is not None]
        console.print(
            f"{kind}: {sum(sizes):,} images, {min(sizes):,} to {max(sizes):,} per client, mean {fmean(sizes):,.1f}; "
            + (f"{fmean(absent):,.1f} classes absent on average" if absent else "classes are not known")
        )
    for name in ("internal", "external"):
        value = report[f"{name}_imbalance"]
        console.print(f"{name} imbalance: {'cannot be measured' if value is None else f'{value:.3f}'}")
    moved = sum(repair["number"] for repair in report["repairs"])
    receivers = len({repair["to_client"] for repair in report["repairs"]})
    repairs = f"clients that had too few: {receivers}, images moved to them: {moved}" if moved else "none needed"
    console.print(f"repairs: {repairs}")
    console.print(f"sha256: {report['sha256']}")
    for file in files:
        console.print(f"wrote {file}", markup=False)


def _row(client: dict[str, Any]) -> list[str]:
    cells = [f"{client['client']} {client.get('site', '')}".strip(), *(f"{client[kind]:,}" for kind in _KINDS)]
    for kind in _KINDS:
        names = client[f"absent_{kind}"]
        more = f" + {len(names) - _NAMES} more" if names and len(names) > _NAMES else ""
        cells.append("not known" if names is None else ", ".join(names[:_NAMES]) + more)
    return [escape(cell) for cell in cells]
