"""`feddure data`: which data sets there are, how to get them, and whether they are whole."""

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from feddure import plugins
from feddure.cli import own_images
from feddure.cli.options import AsJson, DataDir, SkipDamaged
from feddure.cli.tables import folded, listing, numbers
from feddure.data import sources
from feddure.data.dataset import UNKNOWN, Dataset, measure
from feddure.data.sources.fetch import fetch as fetch_dataset
from feddure.errors import FeddureWarning
from feddure.terminal import Console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List, fetch and check data sets, also your own: `feddure data check my/images`.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set, as `feddure data list` names it.")]


@app.command("list")
def show(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the data sets and where they are.

    Examples:

    - `feddure data list`
    - `feddure data list --data-dir /data --json`
    """
    folder = data_dir or sources.default_data_dir()
    rows = [(source, source.find(folder)) for source in sources.sources()]
    if as_json:
        fields = ("name", "about", "classes", "train", "test")
        _print_json(
            [
                {**{field: getattr(source, field) for field in fields}, "path": str(path) if path else None}
                for source, path in rows
            ]
        )
        return
    table = listing("name", "what it is", *numbers("classes", "train + test"), folded("where"))
    for source, path in rows:
        size = "" if source.train is None else f"{source.train:,} + {source.test:,}"
        where = _where(source, path, folder)
        table.add_row(source.name, escape(source.about), str(source.classes or ""), size, escape(where))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Data folder: {escape(str(folder))}", soft_wrap=True)
    console.print("`feddure data fetch NAME` downloads one that is not here.")
    console.print(f"Your own data: {escape(', '.join(sources.FORMS))}", soft_wrap=True)


@app.command()
def fetch(
    name: Name,
    data_dir: DataDir = None,
    mirror: Annotated[
        str | None, typer.Option("--mirror", help="Address of a folder with the same files, used instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set from its official place; a broken download goes on where it stopped.

    Examples:

    - `feddure data fetch cifar10`
    - `feddure data fetch fashion-mnist --data-dir /data`
    - `feddure data fetch cinic10 --mirror https://example.org/datasets`
    """
    path = fetch_dataset(name, data_dir, mirror, progress=True)
    if as_json:
        _print_json({"name": name, "path": str(path)})
    else:
        print(f"{name} is in {path}")


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A data set, or the path of your own images.")],
    skip_damaged: SkipDamaged = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Load a data set and say what is in it, what will be done with it, and what may not be meant.

    Of your own images also what to train on them, how long that takes here, and the two commands for it. The exit code
    is 1 where files are damaged, or where a data set is not the official one. Nothing is trained or written.

    Examples:

    - `feddure data check my/images`
    - `feddure data check 'folder:x-rays?size=64&channels=1&depth=12'`
    - `feddure data check list.csv`
    - `feddure data check npz:mine.npz --json`
    - `feddure data check cifar10`
    """
    name = sources.resolve(name, skip_damaged)
    skip_damaged = skip_damaged or (name.startswith("folder:") and sources.options_of(name).skip_damaged == 1)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", FeddureWarning)
        plugins.allow(name)
        if name.startswith(("folder:", "npz:")):
            name = own_images.as_trained(name)
        # Damaged files are listed here, not refused.
        dataset, found = sources.read(name, data_dir, progress=True, skip_damaged=True)
    report = _report(dataset, None if ":" in name else sources.find_source(name))
    report["notes"] += [str(note.message) for note in noted if issubclass(note.category, FeddureWarning)]
    if found is not None:
        report |= {**asdict(found), "damaged": dataset.damaged}
        report["suggestion"] = own_images.suggestion(name, dataset, found.depth)
        others = [repeat.sentence() for repeat in found.repeats if not repeat.misleads]
        report["notes"] = [*found.sentences(), *report["notes"], *others]
    if as_json:
        _print_json(report)
    else:
        _show(report, skip_damaged)
    if report["official"] is False or (dataset.damaged and not skip_damaged):
        raise typer.Exit(1)


def _where(source: sources.Source, path: Path | None, folder: Path) -> str:
    if path is None:
        return "not here" if source.download else "in your code"
    if not path.is_relative_to(folder):
        return "in the package"
    return str(path.relative_to(folder)) if path != folder else "the data folder"


def _report(dataset: Dataset, source: sources.Source | None) -> dict[str, Any]:
    """What is in a data set, counted and measured; `official` is None where there is nothing to compare with."""
    labelled = dataset.labels != UNKNOWN if dataset.labelled is None else dataset.labelled
    classes = [
        _counts(name, dataset.labels == number, labelled, int((dataset.test_labels == number).sum()))
        for number, name in enumerate(dataset.classes)
    ]
    mean, std = measure(dataset.images)
    known = source is not None and source.train is not None
    deviations = source.deviations(dataset) if source is not None and known else []
    return {
        "name": dataset.name,
        "shape": dataset.shape,
        "train": len(dataset.images),
        "test": len(dataset.test_images),
        "unlabelled": None if dataset.labelled is None else int((~labelled).sum()),  # else a partition decides
        "classes": classes,
        "sites": [_of_site(dataset, number, labelled) for number in range(len(dataset.sites))],
        "mean": dataset.mean,
        "std": dataset.std,
        "flip": dataset.flip,
        "measured_mean": mean,
        "measured_std": std,
        "fingerprint": dataset.fingerprint,
        "official": not deviations if known else None,
        "deviations": deviations,
        "notes": [f"class '{counts['name']}' has no test image" for counts in classes if not counts["test"]]
        if len(dataset.test_images)
        else ["no test images: a run needs --set validation=0.2, say, which sets labelled images aside"],
    }


def _counts(name: str, members: Any, labelled: Any, test: int) -> dict[str, Any]:
    """Images of one class or site; `labelled` counts those whose label the learner may see."""
    return {"name": name, "train": int(members.sum()), "labelled": int((labelled & members).sum()), "test": test}


def _of_site(dataset: Dataset, number: int, labelled: Any) -> dict[str, Any]:
    own = dataset.site == number
    tests = 0 if dataset.test_site is None else int((dataset.test_site == number).sum())
    counts = [int((labelled & own & (dataset.labels == kind)).sum()) for kind in range(len(dataset.classes))]
    classes = dict(zip(dataset.classes, counts, strict=True))
    return _counts(dataset.sites[number], own, labelled, tests) | {"classes": classes}


def _show(report: dict[str, Any], left_out: bool) -> None:
    console = Console(highlight=False)
    height, width, channels = report["shape"]
    facts = Table("", escape(report["name"]), show_edge=False, box=None)
    if "layout" in report:
        facts.add_row("layout", escape(report["layout"]))
    facts.add_row("images", f"{report['train']:,} train, {report['test']:,} test")
    own_labels = report["unlabelled"] is not None
    if own_labels:
        facts.add_row("", f"{report['train'] - report['unlabelled']:,} labelled, {report['unlabelled']:,} unlabelled")
    if report.get("sizes"):
        modes = ", ".join(f"{number:,} {mode}" for mode, number in report["modes"].items())
        facts.add_row("files", f"{_most(report['sizes'])} pixels; {modes}")
    facts.add_row("shape", f"{height} × {width}, {channels} channel{'s' if channels > 1 else ''}")
    for name in ("mean", "std"):
        stated, measured = (" ".join(f"{value:.4f}" for value in report[key]) for key in (name, f"measured_{name}"))
        facts.add_row(name, f"{stated}   measured {measured}")
    facts.add_row("mirrored", "in half of the views" if report["flip"] else "never")
    facts.add_row("fingerprint", report["fingerprint"])
    if report["official"] is not None:
        facts.add_row("official", "yes" if report["official"] else "[bold red]no[/]")
    console.print(facts, soft_wrap=True)
    for deviation in report["deviations"]:
        console.print(f"  {escape(deviation)}", soft_wrap=True)
    columns = ["labelled" if own_labels else "train", "test"]
    console.print(
        _table("class", columns, [(row["name"], [row[name] for name in columns]) for row in report["classes"]])
    )
    if report["sites"]:
        console.print(f"\nwho has what: {columns[0]} images of each class at each site")
        console.print(_of_sites(report["sites"]))
    for note in report["notes"]:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    if report.get("damaged"):
        console.print(f"damaged files{', left out' if left_out else ''}: {len(report['damaged']):,}")
        for line in report["damaged"]:
            console.print(f"  {escape(line)}", soft_wrap=True)
        if not left_out:
            console.print("Mend or remove them; --skip-damaged, or skip_damaged=1 in the name below, leaves them out.")
    if "suggestion" in report:
        _show_suggestion(report["suggestion"], console)


def _show_suggestion(found: dict[str, Any], console: Console) -> None:
    if "problem" in found:
        console.print(f"cannot be trained on yet: {escape(found['problem'])}", soft_wrap=True)
        return
    console.print(f"\nPreset {found['preset']}: {escape(found['text'])}.\nNext:", soft_wrap=True)
    for command in found["commands"]:
        console.print(f"  {escape(command)}", soft_wrap=True)


def _most(counts: dict[str, int], shown: int = 3) -> str:
    """The most frequent of some values, with their numbers."""
    told = [f"{number:,} of {value}" for value, number in list(counts.items())[:shown]]
    rest = list(counts.values())[shown:]
    return ", ".join(told) + (f", {sum(rest):,} of {len(rest):,} other sizes" if rest else "")


def _of_sites(sites: list[dict[str, Any]]) -> Table:
    """Labelled images by class and site, and the unlabelled ones; the longer of the two goes down the page."""
    kinds, names = [*sites[0]["classes"], "unlabelled"], [site["name"] for site in sites]
    counts = [[*site["classes"].values(), site["train"] - site["labelled"]] for site in sites]
    if len(names) > len(kinds):
        return _table("site", kinds, zip(names, counts, strict=True))
    return _table("class", names, zip(kinds, zip(*counts, strict=True), strict=True))


def _table(what: str, columns: Iterable[str], rows: Iterable[tuple[str, Iterable[int]]]) -> Table:
    """A row of counts for each class or site."""
    table = listing(what, *numbers(*map(escape, columns)))
    for name, counts in rows:
        table.add_row(escape(name), *(f"{count:,}" for count in counts))
    return table


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
