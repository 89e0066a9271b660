"""`feddure federate demo`: a server and three sites on this machine, with everything a real federation has."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from feddure.errors import ConfigError, RunError
from feddure.flower.app.location import Place
from feddure.flower.deploy import demo_data, run, site
from feddure.flower.deploy.control import Show
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.layout import ServerFolder
from feddure.flower.deploy.processes import Together, free_port
from feddure.flower.deploy.server import serving
from feddure.tracking.records import Run
from feddure.tracking.summary import duration


@dataclass(frozen=True)
class Size:
    """How much is done."""

    method: str = "feddure"
    rounds: int = 5
    labelled: int = 5
    unlabelled: int = 300
    tests: int = 50
    local_steps: int = 20


def demonstrate(size: Size, out: Path | None, show: Show, show_run: Callable[[Run], None]) -> None:
    """Do all of it in a folder, and end all of it; the folder stays where one was named."""
    began = time.monotonic()
    with _place(out) as root:
        show(f"1. images of three sites, {size.labelled} labelled per class: {root / 'images'}")
        images, tests = demo_data.write_sites(root / "images", size.labelled, size.unlabelled, size.tests)
        description = demo_data.describe(free_port())
        show(f"\n2. certificates, keys and bundles: {root / 'federation'}")
        folder = initialise(root / "federation", description, control_port=free_port())
        with ExitStack() as ending:
            show("\n3. the server")
            ending.enter_context(serving(folder, None, show))
            show("\n4. the sites")
            sites = [ending.enter_context(_start(folder, name, images[name], show)) for name in images]
            show("\n5. the run")
            options = run.Options(
                method=size.method,
                rounds=size.rounds,
                preset="demo",
                sets=(f"local_steps={size.local_steps}",),
                tests=Place(tests),
            )
            finished = run.run(folder, options, root / "run", show)
            if any(process.ended for process in sites):
                raise RunError(f"a site ended before the run did; its log is in {root / 'federation' / 'sites'}")
            show("")
            show_run(finished)
            show("\n6. the end: sites leave, the server ends")
            for process in sites:
                process.ask_to_end()  # side by side; the block waits for each
        show(f"{duration(time.monotonic() - began)}, and nothing is left running")
        if out is None:
            show("the folder is removed; `feddure federate demo --keep` keeps it")


def _start(folder: ServerFolder, name: str, images: Path, show: Show) -> Together:
    # One thread a site: three of them share this machine.
    threads = {"OMP_NUM_THREADS": "1"}
    return site.start(folder.bundle(name), name, images, {}, show, threads)


@contextmanager
def _place(out: Path | None) -> Iterator[Path]:
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
