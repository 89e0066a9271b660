"""Readers of data sets: a name becomes a `Dataset`.

A name is one of the built-in ones, `folder:PATH`, `npz:PATH`, `package.module:function` for a function
that returns a `Dataset`, or a name given to `register`. A function with an argument `data_dir` is told where data live.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from feddure import plugins
from feddure.data.dataset import Dataset, check
from feddure.data.sources import cifar, cinic, fashion, folder, npz, svhn
from feddure.data.sources.base import Source, default_data_dir
from feddure.data.sources.own import Found, Options, options_of, with_options
from feddure.errors import DataError, FeddureWarning, did_you_mean

__all__ = [
    "FORMS",
    "Found",
    "Options",
    "Source",
    "default_data_dir",
    "expect_present",
    "find_source",
    "load",
    "options_of",
    "read",
    "register",
    "resolve",
    "sources",
    "with_options",
]

_BUILT_IN = (fashion.MINI_SOURCE, cifar.SOURCE, cifar.SOURCE_100, svhn.SOURCE, fashion.SOURCE, cinic.SOURCE)
_SOURCES = {source.name: source for source in _BUILT_IN}
FORMS = ("folder:PATH", "npz:PATH", "package.module:function")
"""How the user's own data are named."""


def sources() -> list[Source]:
    """The data sets that have a name."""
    return list(_SOURCES.values())


def register(name: str, function: Callable[..., Dataset]) -> None:
    """Give a name to a function that returns a data set."""
    if not name or ":" in name or "?" in name:
        raise DataError(f"data set name '{name}': expected a name without ':' and '?'")
    if name in _SOURCES:
        raise DataError(f"data set name '{name}' is taken; there are: {', '.join(_SOURCES)}")
    _SOURCES[name] = Source(
        name=name,
        about=f"registered: {getattr(function, '__qualname__', function)}",
        load=lambda data_dir, progress: _call(function, name, data_dir),
        find=lambda data_dir: None,
    )


def load(name: str, data_dir: Path | None = None, progress: bool = False) -> Dataset:
    """The data set of this name; `data_dir` is where downloaded ones live. A warning lists files that were left out."""
    dataset, _ = read(name, data_dir, progress)
    if dataset.damaged:
        listed = "\n".join(dataset.damaged)
        warnings.warn(f"{len(dataset.damaged):,} damaged files are left out:\n{listed}", FeddureWarning, stacklevel=2)
    return dataset


def read(
    name: str, data_dir: Path | None = None, progress: bool = False, skip_damaged: bool = False
) -> tuple[Dataset, Found | None]:
    """The data set of this name and, of the user's own images, what was understood of them.

    `skip_damaged` leaves damaged files out, as the option of that name does.
    """
    kind, colon, rest = name.partition(":")
    data_dir = default_data_dir() if data_dir is None else data_dir
    if not colon:
        return find_source(name).load(data_dir, progress), None
    if kind == "folder":
        return _noted(*folder.read(rest, progress, skip_damaged))
    if kind == "npz":
        return _noted(*npz.read(rest, progress))
    return _call(plugins.find(name, "data set", (*_SOURCES, *FORMS[:2]), DataError), name, data_dir), None


def _noted(dataset: Dataset, found: Found) -> tuple[Dataset, Found]:
    """A warning for each kind of repeated images that would mislead whoever trains, which runs keep too."""
    notes = tuple(repeat.sentence() for repeat in found.repeats if repeat.misleads)
    for note in notes:
        warnings.warn(note, FeddureWarning, stacklevel=3)
    return replace(dataset, notes=notes), found


def resolve(name: str, skip_damaged: bool = False) -> str:
    """The name of what a person called a data set: a path that is there is one of own images."""
    path = Path(name.partition("?")[0]).expanduser()
    if name not in _SOURCES and not name.startswith(("folder:", "npz:")) and path.exists():
        name = f"{'npz' if path.suffix.lower() == '.npz' else 'folder'}:{name}"
    of_files = name.startswith("folder:") and path.suffix.lower() != ".npz"
    return with_options(name, skip_damaged=1) if skip_damaged and of_files else name


def expect_present(name: str, data_dir: Path | None = None) -> None:
    """Refuse a data set that is not there as `load` would, without reading one that is."""
    kind, colon, rest = name.partition(":")
    if colon:
        absent = kind in ("folder", "npz") and not Path(rest.partition("?")[0]).expanduser().exists()
    else:
        source = find_source(name)
        built_in = source.classes is not None
        absent = built_in and source.find(default_data_dir() if data_dir is None else data_dir) is None
    if absent:
        load(name, data_dir)


def find_source(name: str) -> Source:
    """What is known of a named data set."""
    if name in _SOURCES:
        return _SOURCES[name]
    known = ", ".join((*_SOURCES, *FORMS))
    meant = resolve(name)
    hint = f"; did you mean '{meant}'?" if meant != name else did_you_mean(name, _SOURCES)
    raise DataError(f"there is no data set '{name}', nor a folder or file of that name; there are: {known}{hint}")


def _call(function: Callable[..., Dataset], name: str, data_dir: Path) -> Dataset:
    """A user's own data set; the function gets `data_dir` if it has an argument of this name."""
    taken = inspect.signature(function)
    given = {"data_dir": data_dir} if "data_dir" in taken.parameters else {}
    try:
        taken.bind(**given)
    except TypeError:
        raise DataError(
            f"data set '{name}': the function takes ({', '.join(taken.parameters)}), expected none or data_dir, the "
            "folder of --data-dir; give the others defaults"
        ) from None
    dataset = function(**given)
    if not isinstance(dataset, Dataset):
        raise DataError(f"data set '{name}': the function returned a {type(dataset).__name__}, expected a Dataset")
    return check(dataset, f"data set '{name}'")
