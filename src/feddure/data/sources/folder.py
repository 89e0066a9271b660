"""A folder of the user's own images: `layouts.py` says how it may be laid out.

The name of the data set may end in options (`own.py`); `images.py` states how a file becomes a square of pixels. Mean
and standard deviation are measured on the training images.
"""

import statistics
from collections import Counter
from dataclasses import replace

import numpy as np

from feddure.data.dataset import UNKNOWN, Dataset, check
from feddure.data.sources import npz, repeats
from feddure.data.sources.images import decode, headers
from feddure.data.sources.layouts import EXPECTED, File, is_table, look
from feddure.data.sources.own import Found, Options, Split, choose_tests, parse, refuse_damaged
from feddure.errors import DataError
from feddure.files import shown

ALL_LABELLED = (
    "every training image has a label, and all are used; --set partition.label_fraction=0.1, say, uses a tenth of them "
    "and the other images as unlabelled ones"
)


def read(where: str, progress: bool = False, skip_damaged: bool = False) -> tuple[Dataset, Found]:
    """The data set in a folder, and what was understood of it; `where` is the path with its options."""
    path, options = parse("folder", where, Options._fields)
    if path.is_file() and path.suffix.lower() == ".npz":
        return npz.read(where, progress)
    if not where.partition("?")[0] or not (path.is_dir() or (path.is_file() and is_table(path))):
        name = where.partition("?")[0]
        found = f"'{name}' is a file" if name and path.exists() else f"there is no folder '{name}'"
        raise DataError(f"{found}, and no .csv or .json list of images; expected a folder with {EXPECTED}")
    listing = look(path)
    every = sorted(listing.files, key=lambda file: file.part == "test")  # so that each part is a slice
    decoded = decode([file.path for file in every], options.rule, "decoding images", progress)
    damaged = [f"{shown(every[number].path)}: {text}" for number, text in decoded.problems.items()]
    if damaged and not (skip_damaged or options.skip_damaged):
        raise refuse_damaged(
            damaged, "mend or remove them, or leave them out with --skip-damaged (?skip_damaged=1 in the name)"
        )
    whole = [number for number in range(len(every)) if number not in decoded.problems]
    files, pixels = [every[number] for number in whole], decoded.images[whole] if damaged else decoded.images
    dataset, split, names = _assemble(f"folder:{where}", files, pixels, listing.classes, listing.sites, options)
    dataset = replace(_expect_classes(dataset, damaged), damaged=tuple(damaged))
    sizes = Counter(decoded.sizes[number] for number in whole)
    remarks = listing.remarks
    if dataset.labelled is not None and dataset.labelled.all():
        remarks.append(ALL_LABELLED)
    return dataset, Found(
        listing.layout,
        tuple(remarks),
        split,
        dict(listing.ignored.most_common()),
        {f"{width}×{height}": number for (width, height), number in sizes.most_common()},
        dict(Counter(decoded.modes[number] for number in whole).most_common()),
        round(statistics.median(min(decoded.sizes[number]) for number in whole)),
        tuple(repeats.find(dataset, names)),
        decoded.depth,
    )


def shorter_side(where: str) -> tuple[int, set[str]] | None:
    """The files' median shorter side and their modes, by their headers; None where there are no image files."""
    path, _ = parse("folder", where, Options._fields)
    if not (path.is_dir() or (path.is_file() and is_table(path))):
        return None
    found = list(headers(file.path for file in look(path).files))
    return (round(statistics.median(min(size) for size, _ in found)), {mode for _, mode in found}) if found else None


def _assemble(
    name: str,
    files: list[File],
    pixels: np.ndarray,
    classes: tuple[str, ...],
    sites: tuple[str, ...],
    options: Options,
) -> tuple[Dataset, Split | None, list[str]]:
    """The data set, the split where one was made, and the names of the files in the order of the data set."""
    number: dict[str | None, int] = {kind: position for position, kind in enumerate(classes)}
    number[None] = UNKNOWN
    labels = np.array([number[file.kind] for file in files], dtype=np.int64)
    owner: dict[str | None, int] = {site: position for position, site in enumerate(sites)}
    site = np.array([owner.get(file.site, UNKNOWN) for file in files], dtype=np.int64) if sites else None
    train = sum(file.part != "test" for file in files)
    parts: tuple[slice | np.ndarray, slice | np.ndarray] = slice(train), slice(train, None)
    split = None
    if train == len(files) and options.test:
        chosen = choose_tests(labels, site, options.test, options.split_seed)
        parts = np.delete(np.arange(train), chosen), chosen
        split = Split(len(chosen), options.test, options.split_seed) if len(chosen) else None
    training, tests = parts
    dataset = Dataset(
        name=name,
        images=pixels[training],
        labels=labels[training],
        test_images=pixels[tests],
        test_labels=labels[tests],
        classes=classes,
        labelled=labels[training] != UNKNOWN,
        sites=sites,
        site=None if site is None else site[training],
        flip=bool(options.flip),
        test_site=None if site is None or (site[tests] == UNKNOWN).all() else site[tests],
    )
    order = np.arange(len(files))
    names = [shown(files[image].path) for image in np.concatenate([order[training], order[tests]])]
    return dataset, split, names


def _expect_classes(dataset: Dataset, damaged: list[str]) -> Dataset:
    """The data set, checked: files that were left out may have been all that a class or a site had."""
    counts = np.bincount(dataset.labels[dataset.labels != UNKNOWN], minlength=len(dataset.classes))
    empty = [name for name, count in zip(dataset.classes, counts, strict=True) if not count]
    if empty:
        raise DataError(
            f"{dataset.name}: every training image of class {', '.join(empty)} is damaged ({len(damaged)} files are); "
            "mend them, or remove the class"
        )
    return check(dataset, dataset.name)
