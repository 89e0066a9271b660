"""`feddure predict`: the classes of image files."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from feddure.cli.options import AllowModules, AsJson, WhichModel, expect_writable, make_folder_of
from feddure.cli.tables import folded, listing, numbers, plain_console
from feddure.files import readable
from feddure.terminal import Console

if TYPE_CHECKING:
    from feddure.serving.predict import Prediction

WIDE = 1000
"""Columns of a table that goes to a file or another program: no line is to be broken there."""


def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A finished run's folder, or a safetensors or ONNX file.")
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    as_json: AsJson = False,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write a table with the probability of every class."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="K", help="Classes to show for an image.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Images classified at once.")] = 64,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    which: WhichModel = "auto",
    allow_modules: AllowModules = False,
) -> None:
    """Say what is on images: the most probable classes with their probabilities.

    Files become pixels by the rule of training's own folders, in the model's size and channels. A file that is no
    image is named on standard error, the others go on, and the exit code is 1. Where a folder's sub-folders are called
    as the model's classes, it also says how good the model is: accuracy, sensitivity and specificity.

    Examples:

    ```text
    feddure predict runs/demo shirt.png boot.jpg
    feddure predict clothes.onnx photos/ --top 1 --csv photos.csv
    feddure predict runs/demo test/                     # test/CLASS/: also how good the model is
    feddure predict runs/demo photos/ --json | jq 'select(.probability < 0.5)'
    ```
    """
    from feddure.serving.load import load_model  # torch takes seconds: only when it is needed
    from feddure.serving.predict import classify, evaluate, find_images

    expect_writable(csv_file, "--csv")
    trained = load_model(model, device=device, model=which, allow_modules=allow_modules)
    files = find_images(images)
    found = []
    for prediction in classify(trained, files, batch, progress=not as_json):  # a bar would take over standard output
        found.append(prediction)
        if as_json:
            print(json.dumps(_record(prediction, top)), flush=True)
    evaluation = evaluate(found, images, trained.classes)
    if not as_json:
        _show(found, top)
    if evaluation is not None:
        print(json.dumps({"evaluation": evaluation})) if as_json else _show_evaluation(evaluation, len(found))
    if csv_file is not None:
        make_folder_of(csv_file, "--csv")
        _write_csv(csv_file, found, trained.classes)
    _name_unreadable(found)


def _record(prediction: "Prediction", top: int) -> dict[str, Any]:
    if prediction.problem is not None:
        return {"file": readable(prediction.file), "error": prediction.problem}
    best = [{"class": label, "probability": probability} for label, probability in prediction.ranking[:top]]
    return {"file": readable(prediction.file), **best[0], "top": best}


def _show(found: Sequence["Prediction"], top: int) -> None:
    table = listing(folded("file"), "class", *numbers("probability"), *(["runners-up"] if top > 1 else []))
    for prediction in found:
        if prediction.ranking:
            shares = [(name, f"{100 * share:.1f} %") for name, share in prediction.ranking[:top]]
            runners_up = ", ".join(" ".join(share) for share in shares[1:])
            table.add_row(*map(Text, [readable(prediction.file), *shares[0], runners_up][: len(table.columns)]))
    if table.row_count:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDE
        console.print(table)


def _show_evaluation(found: dict[str, Any], files: int) -> None:
    console = plain_console()
    console.print(f"\n{found['images']:,} of {files:,} files are in a folder that is called as a class")
    if others := found["other_folders"]:
        console.print(f"not counted, as no class is called so: {', '.join(others)}")
    console.print(f"accuracy {_share(found, 'accuracy')}")
    table = listing("class", *numbers("images", "sensitivity", "specificity"))
    for row in found["classes"]:
        cells = row["class"], f"{row['images']:,}", _share(row, "sensitivity"), _share(row, "specificity")
        table.add_row(*map(Text, cells))
    console.print(table)
    console.print("in brackets: 95 % intervals (Wilson)")


def _share(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "no image"
    low, high = row[f"{name}_interval"]
    return f"{100 * row[name]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _write_csv(path: Path, found: Iterable["Prediction"], classes: Sequence[str]) -> None:
    from feddure.errors import DataError
    from feddure.files import write_whole

    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["file", "class", "probability", *classes, "error"])
    for prediction in found:
        shares = dict(prediction.ranking)
        row = [prediction.label, prediction.probability, *(shares.get(name) for name in classes), prediction.problem]
        writer.writerow([readable(prediction.file), *row])
    write_whole(path, text.getvalue().encode(), DataError)


def _name_unreadable(found: Sequence["Prediction"]) -> None:
    unreadable = [prediction for prediction in found if prediction.problem is not None]
    console = plain_console(stderr=True)
    for prediction in unreadable:
        console.print(f"{readable(prediction.file)}: {prediction.problem}")
    if unreadable:
        console.print(f"{len(unreadable)} of {len(found)} files could not be read")
        raise typer.Exit(1)
