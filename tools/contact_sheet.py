"""Draw docs/images/augmentation.png: CIFAR-10 images beside their weak and strong augmentations.

python tools/contact_sheet.py --data-dir DATA
"""

import argparse
import os
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch

from feddure import rng
from feddure.data import augment, sources
from feddure.errors import FeddureError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROWS = 6
WEAK, STRONG = 4, 8
SHEET = Path(__file__).parents[1] / "docs" / "images" / "augmentation.png"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the contact sheet of T_w and T_s.")
    data_dir = os.environ.get("FEDDURE_DATA")
    parser.add_argument("--data-dir", type=Path, default=Path(data_dir) if data_dir else None)
    parser.add_argument("--out", type=Path, default=SHEET)
    options = parser.parse_args()

    dataset = sources.load("cifar10", options.data_dir)
    # The ninth image of each class: none of these has a grey background, which would hide the cutout.
    chosen = [int(np.flatnonzero(dataset.labels == label)[8]) for label in range(ROWS)]
    names = [dataset.classes[label] for label in range(ROWS)]
    originals = dataset.images[chosen]
    draw(originals, names, views(originals, WEAK, "weak"), views(originals, STRONG, "strong"), options.out)


def views(images: np.ndarray, count: int, kind: str) -> np.ndarray:
    """`count` augmentations of every image: uint8 [images, count, side, side, channels]."""
    many = torch.from_numpy(np.repeat(images, count, axis=0))
    side = images.shape[1]
    words = augment.WEAK_BITS if kind == "weak" else augment.STRONG_BITS
    raw = rng.bits(len(many) * words, 0, "contact-sheet", kind).reshape(len(many), words)
    if kind == "weak":
        result = augment.weak(many, augment.weak_decisions(raw, side))
    else:
        result = augment.strong(many, augment.strong_decisions(raw, side))
    return result.view(len(images), count, *images.shape[1:]).numpy()


def draw(originals: np.ndarray, names: list[str], weak: np.ndarray, strong: np.ndarray, file: Path) -> None:
    # Empty columns set the three kinds apart.
    columns = 1 + WEAK + STRONG
    widths = [1, 0.25, *[1] * WEAK, 0.25, *[1] * STRONG]
    figure, axes = plt.subplots(
        len(originals),
        len(widths),
        figsize=(0.86 * (columns + 0.5) + 0.6, 0.86 * len(originals) + 0.45),
        gridspec_kw={"width_ratios": widths, "wspace": 0.06, "hspace": 0.06},
    )
    for row, name in enumerate(names):
        tiles = [originals[row], None, *weak[row], None, *strong[row]]
        for axis, tile in zip(axes[row], tiles, strict=True):
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_frame_on(False)
            if tile is not None:
                axis.imshow(tile, interpolation="nearest")
        axes[row, 0].set_ylabel(name, fontsize=10)
    titles = {0: "original", 2: "weak, $T_w$", 3 + WEAK: "strong, $T_s$"}
    for column, title in titles.items():
        axes[0, column].set_title(title, fontsize=11, loc="left")
    figure.subplots_adjust(left=0.06, right=0.995, top=0.93, bottom=0.01)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name("." + file.name)
    figure.savefig(aside, dpi=120, format="png")
    aside.replace(file)


if __name__ == "__main__":
    try:
        main()
    except FeddureError as error:
        sys.exit(f"error: {error}")
