"""`feddure federate demo`: a server and three sites on this machine, with everything a real federation has."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from feddure import data, rng
from feddure.data.sources.fashion import MEAN, STD
from feddure.errors import ConfigError, RunError
from feddure.flower.app.description import Description, ServerAddress
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import run, site
from feddure.flower.deploy.control import Show
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import ProcessGroup, free_port
from feddure.flower.deploy.server import serving
from feddure.tracking.records import Run
from feddure.tracking.summary import duration

SITES = ("north", "east", "south")
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
"""The classes of Fashion-MNIST under names that can be folders."""

_FAVOURED = 4
"""How many times as many unlabelled images a site has of the classes it sees most."""


def demonstrate(
    out: Path | None,
    show: Show,
    show_run: Callable[[Run], None],
    method: str,
    rounds: int,
    local_steps: int,
    labelled: int,
    unlabelled: int,
    tests: int,
) -> None:
    """Do all of it in a folder, and end all of it; the folder stays where one was named."""
    began = time.monotonic()
    with _folder(out) as root:
        show(f"1. images of three sites, {labelled} labelled per class: {root / 'images'}")
        images, test_folder = _write_sites(root / "images", labelled, unlabelled, tests)
        description = _describe(free_port())
        show(f"\n2. certificates, keys and bundles: {root / 'federation'}")
        folder = initialise(root / "federation", description, control_port=free_port())
        with ExitStack() as ending:
            show("\n3. the server")
            ending.enter_context(serving(folder, None, show))
            show("\n4. the sites")
            sites = [ending.enter_context(_start(folder, name, images[name], show)) for name in images]
            show("\n5. the run")
            options = {
                "method": method,
                "rounds": rounds,
                "preset": "demo",
                "settings": f"local_steps={local_steps}",
                "test-folder": str(test_folder),
            }
            finished = run.run(folder, options, root / "run", show)
            if any(process.ended for process in sites):
                raise RunError(f"a site ended before the run did; its log is in {root / 'federation' / 'sites'}")
            show("")
            show_run(finished)
            show("\n6. the end: sites leave, the server ends")
            for process in sites:
                process.terminate()  # side by side; the block waits for each
        show(f"{duration(time.monotonic() - began)}, and nothing is left running")
        if out is None:
            show("the folder is removed; `feddure federate demo --keep` keeps it")


def _start(folder: ServerFolder, name: str, images: Path, show: Show) -> ProcessGroup:
    # One thread a site: three of them share this machine.
    threads = {"OMP_NUM_THREADS": "1"}
    return site.start(folder.bundle(name), name, ImageFolder(images), {}, show, threads)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="feddure-demo-") as root:
            yield Path(root)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: something is there already; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{out}: the folder cannot be made ({problem.strerror})") from None
    yield out.resolve()


# --- three hospitals' worth of pictures: fashion-mini as PNG folders, with unequal classes ------------
def _describe(port: int) -> Description:
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


def _write_sites(folder: Path, labelled: int, unlabelled: int, tests: int) -> tuple[dict[str, Path], Path]:
    """Write the images: `labelled` per class and site, about `unlabelled` a site, `tests` per class.

    Returns each site's folder and the server's test folder.
    """
    images = data.load("fashion-mini")
    taken = [0] * len(CLASSES)
    folders = {}
    for position, name in enumerate(SITES):
        home = folders[name] = folder / name
        weights = [_FAVOURED if number % len(SITES) == position else 1 for number in range(len(CLASSES))]
        for number, kind in enumerate(CLASSES):
            many = round(unlabelled * weights[number] / sum(weights))
            own = _of_class(images.labels, number)[taken[number] :][: labelled + many]
            taken[number] += len(own)
            _write(home / "labelled" / kind, images.images[own[:labelled]])
            # The names of unlabelled files say nothing about the class.
            order = rng.bits(len(own), "demo", name, number)
            _write(home / "unlabelled", images.images[own[labelled:]], [f"{bits:016x}" for bits in order[labelled:]])
    for number, name in enumerate(CLASSES):
        _write(folder / "test" / name, images.test_images[_of_class(images.test_labels, number)[:tests]])
    return folders, folder / "test"


def _of_class(labels: np.ndarray, number: int) -> np.ndarray:
    return np.flatnonzero(labels == number)


def _write(folder: Path, images: np.ndarray, names: list[str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        name = names[number] if names is not None else f"{number:04d}"
        Image.fromarray(image[:, :, 0]).save(folder / f"{name}.png")
