"""A site, and its own images under the federation's description.

    PATH/labelled/<class>/**      images whose class is known
    PATH/unlabelled/**            images whose class is not
    PATH/test/<class>/**          images to test the received model on, at the site (may be missing)

A site may have some of the classes only, and labelled or unlabelled images only. A file that is no readable image is
left out and reported. Flower starts a process for each message, so pixels are kept in a cache; it is made again
when a file's name, size or time of change differs.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from feddure.config import Experiment
from feddure.data import recipes
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.sources import cache as caches
from feddure.data.sources import own
from feddure.data.sources.images import FULL_DEPTH, Rule, decode
from feddure.data.sources.layouts import entries, files_below, name_of
from feddure.errors import ConfigError, DataError, did_you_mean
from feddure.flower.app import description as descriptions
from feddure.flower.app.description import Description
from feddure.flower.app.private_files import make_private_folder, state_folder, write_private_file
from feddure.flower.app.sanitize import disclosed
from feddure.version import VERSION

_PARTS = ("labelled", "unlabelled", "test")
_FORMAT = 4  # of kept pixels
_PREFIX = "folder:"
Unreadable = tuple[str, str]
"""A file that gives no image, relative to its folder, and the reason."""


@dataclass(frozen=True)
class ImageFolder:
    """A folder as `--data` and `--test` name it: PATH, or folder:PATH?depth=12 where 16-bit files use fewer bits.

    Size and channels are the federation's, and the same everywhere; how many bits its files use each place knows.
    """

    path: Path
    depth: int = FULL_DEPTH

    def __str__(self) -> str:
        return str(self.path) if self.depth == FULL_DEPTH else f"{_PREFIX}{self.path}?depth={self.depth}"

    def resolve(self) -> "ImageFolder":
        """The same folder by its absolute path."""
        return ImageFolder(self.path.resolve(), self.depth)

    @staticmethod
    def parse(text: str, option: str) -> "ImageFolder":
        """The folder that an option names."""
        if not text.startswith(_PREFIX):
            return ImageFolder(Path(text).expanduser())
        try:
            path, options = own.parse("folder", text.removeprefix(_PREFIX), ("depth",))
        except DataError as problem:
            raise ConfigError(
                f"{option} {problem} (size and channels are the federation's, see federation.yaml)"
            ) from None
        return ImageFolder(path, options.depth)


@dataclass(frozen=True, eq=False)
class SiteData:
    """A site's images; positions in `dataset.images` say which are labelled and which are not."""

    dataset: Dataset
    labelled: np.ndarray
    unlabelled: np.ndarray
    unreadable: tuple[Unreadable, ...]
    validation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # labelled, never trained on

    def counts(self) -> dict[str, int]:
        """Labelled images of each class of the description."""
        found = np.bincount(self.dataset.labels[self.labelled], minlength=len(self.dataset.classes))
        return dict(zip(self.dataset.classes, found.tolist(), strict=True))


@dataclass(frozen=True)
class _File:
    path: Path
    part: str
    kind: str | None  # the class, or None where it is not known


_Decoded = tuple[np.ndarray, dict[int, str]]
"""Pixels of all files in their order, and by position why a file is not readable: its pixels mean nothing."""


def load(images: ImageFolder, description: Description, cache: Path | None = None, progress: bool = False) -> SiteData:
    """A site's images; `cache` is a folder in which to keep their pixels."""
    folder = images.path
    parts = _find_parts(folder)
    if not {"labelled", "unlabelled"} & set(parts):
        raise disclosed(
            DataError(f"{folder}: neither labelled/ nor unlabelled/; expected labelled/<class>/ with images"),
            "its folder has neither labelled/ nor unlabelled/",
        )
    files: list[_File] = []
    for part in parts:
        if part == "unlabelled":
            files += [_File(path, part, None) for path in files_below(folder / part)]
        else:
            files += _of_classes(folder / part, part, description)
    rule = _rule(images, description)
    if cache is None:
        decoded = _decode(folder, files, rule, progress)
    else:
        decoded = _decode_cached(folder, files, description, rule, cache, progress)
    found = _assemble(folder, files, description, *decoded)
    if not len(found.labelled) + len(found.unlabelled):
        raise disclosed(
            DataError(
                f"{folder}: no readable image in labelled/ or unlabelled/{_first(found.unreadable)}; "
                "expected at least one image"
            ),
            "no readable image in labelled/ or unlabelled/",
        )
    return found


def load_tests(images: ImageFolder, description: Description) -> tuple[Dataset, tuple[Unreadable, ...]]:
    """The images in `PATH/<class>/**` as the test set of a data set without training images."""
    folder = images.path
    files = list(test_files(folder, description))
    decoded = _decode(folder, files, _rule(images, description), progress=False)
    found = _assemble(folder, files, description, *decoded)
    if not len(found.dataset.test_images):
        raise DataError(
            f"{folder}: no readable image to test on{_first(found.unreadable)}; expected <class>/ with images"
        )
    return found.dataset, found.unreadable


def without_images(description: Description) -> Dataset:
    """A data set that says how images look and what classes there are."""
    none = np.empty((0, description.size, description.size, description.channels), dtype=np.uint8)
    nothing = np.empty(0, dtype=np.int64)
    return Dataset(
        *(description.name, none, nothing, none, nothing, description.classes, description.mean, description.std),
        flip=description.flip,
    )


def _rule(images: ImageFolder, description: Description) -> Rule:
    return Rule(description.size, description.channels, depth=images.depth)


def _find_parts(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise disclosed(
            DataError(f"{folder}: there is no such folder; expected labelled/<class>/ and unlabelled/ in it"),
            "its folder of images is not there",
        )
    found = [entry.name for entry in entries(folder) if entry.is_dir()]
    for name in found:
        if name not in _PARTS:
            raise disclosed(
                DataError(f"{folder / name}: unknown folder; expected {', '.join(_PARTS)}{did_you_mean(name, _PARTS)}"),
                f"a folder of another name beside {', '.join(_PARTS)}",
            )
    return found


def _decode_cached(
    folder: Path, files: Sequence[_File], description: Description, rule: Rule, cache: Path, progress: bool
) -> _Decoded:
    names = ((file.path.relative_to(folder).as_posix(), file.path) for file in files)
    signature = caches.sign(names, f"{_FORMAT} {rule.depth} {description.fingerprint()}")
    prefix = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    path = cache / f"pixels-{prefix}-{signature[:24]}.npz"
    make_private_folder(cache, DataError)
    kept = caches.read(path, signature)
    if kept is None:
        pixels, problems = _decode(folder, files, rule, progress)
        numbers, texts = np.array(list(problems), dtype=np.int64), np.array(list(problems.values()), dtype=np.str_)
        kept = {"pixels": pixels, "damaged": numbers, "problems": texts}
        write_private_file(path, caches.pack(signature, kept), DataError)
        for old in cache.glob(f"pixels-{prefix}-*.npz"):
            if old != path:
                old.unlink(missing_ok=True)
    return kept["pixels"], dict(zip(kept["damaged"].tolist(), kept["problems"].tolist(), strict=True))


def test_files(folder: Path, description: Description) -> Iterator[_File]:
    """The files of a test folder; an error where it holds anything but folders of the description's classes."""
    return _of_classes(folder, "test", description)


def _of_classes(folder: Path, part: str, description: Description) -> Iterator[_File]:
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; expected a folder for each class")
    for entry in entries(folder):
        if not entry.is_dir():
            raise disclosed(
                DataError(f"{entry}: expected only folders here; move it into the folder of its class"),
                f"a file in {part}/ that is in no class folder",
            )
        kind = name_of(entry)
        if kind not in description.classes:
            raise disclosed(
                DataError(
                    f"{entry}: the federation '{description.name}' has no class '{kind}'; there are: "
                    f"{', '.join(description.classes)}{did_you_mean(kind, description.classes)}"
                ),
                "a class folder that the federation does not have",
            )
        for path in files_below(entry):
            yield _File(path, part, kind)


def _decode(folder: Path, files: Sequence[_File], rule: Rule, progress: bool) -> _Decoded:
    found = decode([file.path for file in files], rule, f"decoding {folder.name}", progress)
    return found.images, found.problems


def _assemble(
    folder: Path, files: Sequence[_File], description: Description, pixels: np.ndarray, problems: Mapping[int, str]
) -> SiteData:
    number: dict[str | None, int] = {kind: position for position, kind in enumerate(description.classes)}
    number[None] = UNKNOWN
    labels = np.array([number[file.kind] for file in files], dtype=np.int64)
    tests = np.array([file.part == "test" for file in files], dtype=bool)
    readable = np.ones(len(files), dtype=bool)
    readable[list(problems)] = False
    training = labels[readable & ~tests]
    dataset = Dataset(
        name=folder.name,
        images=pixels[readable & ~tests],
        labels=training,
        test_images=pixels[readable & tests],
        test_labels=labels[readable & tests],
        classes=description.classes,
        mean=description.mean,
        std=description.std,
        labelled=training != UNKNOWN,
        flip=description.flip,
    )
    return SiteData(
        dataset,
        labelled=np.flatnonzero(training != UNKNOWN),
        unlabelled=np.flatnonzero(training == UNKNOWN),
        unreadable=tuple(
            (files[position].path.relative_to(folder).as_posix(), problem) for position, problem in problems.items()
        ),
    )


def _first(unreadable: Sequence[Unreadable]) -> str:
    return " ({}: {})".format(*unreadable[0]) if unreadable else ""


# --- sites -------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Site:
    """A site with its images, under the description it goes by."""

    name: str
    client: int
    clients: int
    fingerprint: str  # of its description
    data: SiteData
    state: Path  # where to keep what must survive a restart

    def introduce(self) -> dict[str, Any]:
        """Who the site is and how many images it has: all that the server learns before the first round."""
        return {
            "site": self.name,
            "client": self.client,
            "clients": self.clients,
            "fingerprint": self.fingerprint,
            "labelled": len(self.data.labelled),
            "unlabelled": len(self.data.unlabelled),
            "unreadable": len(self.data.unreadable),
            "version": VERSION,
        }


def set_aside(site: Site, experiment: Experiment) -> Site:
    """The site with a share of its labelled images for validation: those of the simulator on the same folders."""
    if not experiment.validation:
        return site
    labels = site.data.dataset.labels  # all that are known may be used
    held = recipes.hold_out(labels, experiment.validation, experiment.partition_seed, site.client)
    rest = np.setdiff1d(site.data.labelled, held)
    return replace(site, data=replace(site.data, labelled=rest, validation=held))


def open_site(node: Mapping[str, Any], run_description: str) -> Site:
    """The site that a node's configuration names by `site`, `data`, `state` and `description`.

    It goes by its own description; a run with another one is refused.
    """
    for key in ("site", "data", "description"):
        if not node.get(key):
            raise disclosed(
                ConfigError(f"the node's configuration has no '{key}': start it with `feddure federate site`")
            )
    description = descriptions.read(Path(str(node["description"])))
    name, folder, state = str(node["site"]), Path(str(node["data"])), state_folder(node)
    try:
        client = description.client(name)
    except ConfigError as error:
        raise disclosed(error, "its description of the federation has no site of its name") from None
    _expect_agreed(description, run_description, str(node["description"]))
    images = ImageFolder(folder, int(node.get("depth", FULL_DEPTH)))
    found = load(images, description, state / "cache")
    return Site(name, client, len(description.sites), description.fingerprint(), found, state)


def _expect_agreed(own: descriptions.Description, run_description: str, where: str) -> None:
    """Refuse a run whose server means other classes or images than this site does; the server would refuse too."""
    servers = descriptions.parse(run_description, "the run's description")
    differing = own.differences(servers)
    if not differing:
        return
    told = [
        f"{name} is {_shown(getattr(own, name))} here, {_shown(getattr(servers, name))} there" for name in differing
    ]
    raise disclosed(
        ConfigError(
            f"refused: {where} differs from the server's description of the federation ({'; '.join(told)}): ask the "
            "server's operator for the current bundle, unpack it, and start the site again"
        ),
        f"it goes by another description of the federation (in {', '.join(differing)}); "
        "give it the server's federation.yaml",
    )


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
