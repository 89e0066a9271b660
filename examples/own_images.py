"""Images of your own in a folder, each site a client.

    python examples/own_images.py

The folder that this example makes has the layout that `folder:PATH` reads:

    clients/<site>/labelled/<class>/*.png     images whose class the site knows
    clients/<site>/unlabelled/*.png           images whose class nobody knows
    test/<class>/*.png                        images to test on
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import feddure

SITES = ("north", "east", "south", "west")
LABELLED, UNLABELLED, TEST = 4, 60, 10  # images of a class at a site, of all classes at a site, of a class


def write(folder: Path, images: np.ndarray, first: int) -> None:
    """Grey images as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images, start=first):
        Image.fromarray(image[:, :, 0]).save(folder / f"{number:04}.png")


def make_folder(root: Path) -> None:
    """Deal the package's own small data set out to four sites."""
    source = feddure.load_dataset("fashion-mini")
    for label, name in enumerate(source.classes):
        kind = name.replace("/", " or ")
        own = source.images[source.labels == label]
        share = LABELLED + UNLABELLED // len(source.classes)
        for number, site in enumerate(SITES):
            part = own[number * share : (number + 1) * share]
            write(root / "clients" / site / "labelled" / kind, part[:LABELLED], 0)
            write(root / "clients" / site / "unlabelled", part[LABELLED:], 100 * label)
        write(root / "test" / kind, source.test_images[source.test_labels == label][:TEST], 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        run = feddure.run(dataset=f"folder:{folder}?size=28&channels=1", rounds=rounds)  # preset recommended
    print(f"{len(SITES)} sites, accuracy {run.summary.accuracy_last:.3f}, report in {run.folder}")
