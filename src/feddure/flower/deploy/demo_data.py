"""Three hospitals' worth of pictures for the demo: fashion-mini as PNG folders, with unequal classes."""

from pathlib import Path

import numpy as np
from PIL import Image

from feddure import data
from feddure import rng as draws
from feddure.data.sources.fashion import MEAN, STD
from feddure.flower.app.description import Description, ServerAddress

SITES = ("north", "east", "south")
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
"""The classes of Fashion-MNIST under names that can be folders."""

_FAVOURED = 4
"""How many times as many unlabelled images a site has of the classes it sees most."""


def describe(port: int) -> Description:
    """The demo's federation."""
    return Description(
        name="demo",
        classes=CLASSES,
        size=28,
        channels=1,
        mean=MEAN,
        std=STD,
        sites=SITES,
        server=ServerAddress(host="127.0.0.1", port=port),
        timeout_seconds=120,
    )


def write_sites(folder: Path, labelled: int, unlabelled: int, tests: int) -> tuple[dict[str, Path], Path]:
    """Write the images: `labelled` per class and site, about `unlabelled` a site, `tests` per class.

    Returns each site's folder and the server's test folder.
    """
    images = data.load("fashion-mini")
    taken = [0] * len(CLASSES)
    places = {}
    for position, site in enumerate(SITES):
        place = places[site] = folder / site
        weights = [_FAVOURED if number % len(SITES) == position else 1 for number in range(len(CLASSES))]
        for number, name in enumerate(CLASSES):
            many = round(unlabelled * weights[number] / sum(weights))
            own = _of_class(images.labels, number)[taken[number] :][: labelled + many]
            taken[number] += len(own)
            _write(place / "labelled" / name, images.images[own[:labelled]])
            # The names of unlabelled files say nothing about the class.
            order = draws.bits(len(own), "demo", site, number)
            _write(place / "unlabelled", images.images[own[labelled:]], [f"{bits:016x}" for bits in order[labelled:]])
    for number, name in enumerate(CLASSES):
        _write(folder / "test" / name, images.test_images[_of_class(images.test_labels, number)[:tests]])
    return places, folder / "test"


def _of_class(labels: np.ndarray, number: int) -> np.ndarray:
    return np.flatnonzero(labels == number)


def _write(folder: Path, images: np.ndarray, names: list[str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        name = names[number] if names is not None else f"{number:04d}"
        Image.fromarray(image[:, :, 0]).save(folder / f"{name}.png")
