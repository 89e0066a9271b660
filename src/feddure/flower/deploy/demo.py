"""`feddure federate demo`: a server and three sites on this machine, with everything a real federation has."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from feddure import data, experiments, methods, rng
from feddure.data.sources.fashion import MEAN, STD
from feddure.errors import ConfigError, RunError
from feddure.flower.app import audit
from feddure.flower.app.audit import Audit
from feddure.flower.app.description import Description, ServerAddress
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import run, site
from feddure.flower.deploy.control import Show
from feddure.flower.deploy.demo_attacker import ATTACK, replace_program
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import ProcessGroup, free_port
from feddure.flower.deploy.server import serving
from feddure.flower.deploy.status import Status, read_status
from feddure.tracking.records import Run
from feddure.tracking.summary import duration, percent, summarise

SITES = ("north", "east", "south")
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
"""The classes of Fashion-MNIST under names that can be folders."""

LABELLED, UNLABELLED, TESTS = 5, 300, 50
"""Images: labelled ones per class and site, unlabelled ones per site, the server's tests per class."""

_STEPS = 20
_FAVOURED = 4
"""How many times as many unlabelled images a site has of the classes it sees most."""

_COMMAND = re.compile(r"\$ \S+(?: -P -m \S+)?(?: [a-z]+\b)*")
"""What one of Flower's commands begins with: a program, and what it shall do."""


ATTACKER = "south"
_UNDEFENDED = "server.norm_bound=null server.robust=none"
_DEFENDED = "server.robust=median"
"""With the bound on updates that every run has. The bound alone would not do: of three sites of which one sends three
times as much the wrong way, the mean is wrong."""


class Screen(Protocol):
    """How results look on the terminal."""

    def show_run(self, finished: Run, kept: bool) -> None: ...

    def show_status(self, found: Status, folder: Path) -> None: ...

    def show_audit(self, found: Audit) -> None: ...


def demonstrate(
    out: Path | None,
    show: Show,
    screen: Screen,
    method: str,
    rounds: int,
    attacker: bool,
) -> None:
    """Do all of it in a folder, and end all of it; the folder stays where one was named.

    With an attacker one of the sites poisons its updates, in a run without defences and in one with them.
    """
    methods.make(experiments.load("demo", changes={"method": method}))  # a mistake is said before servers start
    began = time.monotonic()
    with _folder(out) as root:
        if out is None:
            show("everything is removed at the end, report and model too; --out FOLDER keeps it\n")
        else:
            show(f"everything is kept in {root}\n")
        show = _brief(show, None if out else root)
        show(f"1. images of three sites, {LABELLED} labelled per class")
        images, test_folder = _write_sites(root / "images")
        description = _describe(free_port())
        show("\n2. certificates, keys and bundles")
        folder = initialise(root / "federation", description, control_port=free_port())
        with ExitStack() as ending:
            show("\n3. the server")
            ending.enter_context(serving(folder, None, show))
            show("\n4. the sites")
            sites = [ending.enter_context(_start(folder, name, images[name], show)) for name in images]
            if attacker:
                replace_program(folder.bundle(ATTACKER))
                show(
                    f"{ATTACKER} is hostile: it turns its updates round and makes them {ATTACK.factor:g} times as long"
                )
            asked = {"method": method, "rounds": rounds, "preset": "demo", "test-folder": str(test_folder)}
            show_run = partial(screen.show_run, kept=out is not None)
            train = partial(_run, folder, sites, asked, f"local_steps={_STEPS}", show, show_run)
            if attacker:
                without = train(root / "run-undefended", "5. a run without defences", _UNDEFENDED)
                defended = train(root / "run", f"6. a run with defences: {_DEFENDED}", _DEFENDED)
                show("\n7. what the server's operator sees: feddure federate status")
                screen.show_status(read_status(folder), folder.root)
                for title, finished in (("without", without), ("with", defended)):
                    show(f"accuracy {title} defences: {percent(summarise(finished.metrics).accuracy_last)}")
                show("\n8. the audit logs: feddure federate audit")
                for name in ("server", *SITES):
                    log = (folder.server if name == "server" else folder.bundle(name).state) / audit.FILE
                    show(f"\n{name}: {log.relative_to(root)}")
                    screen.show_audit(audit.read(log))
            else:
                train(root / "run", "5. the run")
            show(f"\n{9 if attacker else 6}. the end: sites leave, the server ends")
            for process in sites:
                process.terminate()  # side by side; the block waits for each
        show(f"{duration(time.monotonic() - began)}, and nothing is left running")


def _brief(show: Show, removed: Path | None) -> Show:
    """Shows commands without what they are told, and not what lies where in a folder that will be removed."""

    def brief(line: str) -> None:
        if (command := _COMMAND.match(line)) is not None:
            show(f"{command.group()} …")
        elif removed is None or f": {removed}" not in line:
            show(line)

    return brief


def _start(folder: ServerFolder, name: str, images: Path, show: Show) -> ProcessGroup:
    # One thread a site: three of them share this machine.
    threads = {"OMP_NUM_THREADS": "1"}
    return site.start(folder.bundle(name), name, ImageFolder(images), {"approve": "always"}, show, threads)


def _run(
    folder: ServerFolder,
    sites: Sequence[ProcessGroup],
    asked: Mapping[str, Any],
    settings: str,
    show: Show,
    show_run: Callable[[Run], None],
    run_folder: Path,
    title: str,
    more_settings: str = "",
) -> Run:
    show(f"\n{title}")
    options = {**asked, "settings": f"{settings} {more_settings}".strip()}
    finished = run.run(folder, options, run_folder, show)
    if any(process.ended for process in sites):
        raise RunError(f"a site ended before the run did; its log is in {folder.sites}")
    show("")
    show_run(finished)
    return finished


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


def _write_sites(folder: Path) -> tuple[dict[str, Path], Path]:
    """Write the images; returns each site's folder and the server's test folder."""
    images = data.load("fashion-mini")
    taken = [0] * len(CLASSES)
    folders = {}
    for position, name in enumerate(SITES):
        home = folders[name] = folder / name
        weights = [_FAVOURED if number % len(SITES) == position else 1 for number in range(len(CLASSES))]
        for number, kind in enumerate(CLASSES):
            many = round(UNLABELLED * weights[number] / sum(weights))
            own = _of_class(images.labels, number)[taken[number] :][: LABELLED + many]
            taken[number] += len(own)
            _write(home / "labelled" / kind, images.images[own[:LABELLED]])
            # The names of unlabelled files say nothing about the class.
            order = rng.bits(len(own), "demo", name, number)
            _write(home / "unlabelled", images.images[own[LABELLED:]], [f"{bits:016x}" for bits in order[LABELLED:]])
    for number, name in enumerate(CLASSES):
        _write(folder / "test" / name, images.test_images[_of_class(images.test_labels, number)[:TESTS]])
    return folders, folder / "test"


def _of_class(labels: np.ndarray, number: int) -> np.ndarray:
    return np.flatnonzero(labels == number)


def _write(folder: Path, images: np.ndarray, names: list[str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        name = names[number] if names is not None else f"{number:04d}"
        Image.fromarray(image[:, :, 0]).save(folder / f"{name}.png")
