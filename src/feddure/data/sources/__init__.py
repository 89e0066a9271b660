"""Readers of data sets: a name becomes a `Dataset`.

A name is one of the built-in ones, `folder:PATH`, `npz:PATH`, `package.module:function` for a function
that returns a `Dataset`, or a name given to `register`. A function with an argument `data_dir` is told where data live.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from feddure import plugins
from feddure.data.dataset import Dataset, check
from feddure.data.sources import cifar, cinic, fashion, folder, npz
from feddure.data.sources.base import Source, default_data_dir
from feddure.errors import DataError, did_you_mean

__all__ = ["FORMS", "Source", "default_data_dir", "expect_present", "find_source", "load", "register", "sources"]

_SOURCES = {source.name: source for source in (fashion.MINI_SOURCE, cifar.SOURCE, fashion.SOURCE, cinic.SOURCE)}
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
    """The data set of this name; `data_dir` is where downloaded ones live."""
    kind, colon, rest = name.partition(":")
    data_dir = default_data_dir() if data_dir is None else data_dir
    if not colon:
        return find_source(name).load(data_dir, progress)
    if kind == "folder":
        return folder.load(rest, progress)
    if kind == "npz":
        return npz.load(rest, progress)
    return _call(plugins.find(name, "data set", (*_SOURCES, *FORMS[:2]), DataError), name, data_dir)


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
    raise DataError(f"there is no data set '{name}'; there are: {known}{did_you_mean(name, _SOURCES)}")


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
