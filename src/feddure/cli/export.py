"""`feddure export`: a trained model as one file for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from feddure.cli.options import AllowModules, WhichModel
from feddure.cli.tables import plain_console


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder, or a safetensors file.")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="safetensors, onnx or torchscript; default: by --out's ending, or onnx."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; default: in the run's folder, with its name.")
    ] = None,
    which: WhichModel = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    allow_modules: AllowModules = False,
) -> None:
    """Write a trained model as safetensors, ONNX or TorchScript, with its classes and normalisation inside.

    ONNX and TorchScript models take uint8 images [N, channels, height, width] of 0 to 255, any N, and give
    `probabilities` and `logits`. Before the file is put in place, its model is compared with the original.

    Examples:

    ```text
    feddure export runs/demo                     # writes runs/demo/demo.onnx
    feddure export runs/demo --out clothes.pt    # TorchScript
    feddure export runs/demo --out clothes.onnx --force
    ```
    """
    from feddure.serving.export import export as write_model  # torch takes seconds: only when it is needed
    from feddure.serving.load import detect, read_network

    target = write_model(run, out, format=kind, model=which, force=force, allow_modules=allow_modules)
    about, _ = read_network(run, which, allow_modules)
    shape, classes = ", ".join(map(str, about.input_shape)), len(about.classes)
    console = plain_console(stderr=True)
    if detect(target.read_bytes()) == "safetensors":
        console.print(f"{about.model}: weights only, of a network for images [N, {shape}] and {classes} classes")
    else:
        console.print(f"{about.model}: uint8 images [N, {shape}] to probabilities and logits [N, {classes}]")
    print(target)
