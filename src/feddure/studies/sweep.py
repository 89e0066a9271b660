"""Sweeps: a user's own grid of experiments, from a file.

A sweep starts from a preset or a configuration file, changes some fields for all its experiments (`set`), and measures
every combination of some values (`grid`) and named changes (`cases`) on every seed.
"""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from feddure import experiments, methods, plugins, recommended
from feddure.config import Experiment
from feddure.data.sources import find_source
from feddure.errors import ConfigError, FeddureError, RunError, did_you_mean
from feddure.files import expect_free, write_whole
from feddure.reports.names import combination
from feddure.studies.grid.measure import expect_data
from feddure.studies.grid.store import Cell, Store, finished_cells, make_folder

MOST_CELLS = 100_000
SWEEP_FILE = "sweep.yaml"

_KEYS = ("preset", "config", "set", "grid", "cases", "seeds")
_OWN_COLUMNS = {"method", "dataset", "partition.setting", "partition.gamma", "clients_per_round", "seed", "rounds"}

Changes = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One combination of a sweep: what it is called, and its values of the fields that the grid varies."""

    name: str
    case: str  # empty where the sweep has no cases
    values: Changes  # as they were validated
    cells: tuple[Cell, ...]  # one a seed, in the sweep's order
    about: str = ""  # what the case is there for
    against: str = ""  # the case that it is compared with


@dataclass(frozen=True)
class Sweep:
    """A sweep's combinations, and where it comes from."""

    name: str
    text: str
    start: str  # the preset, or the configuration file
    axes: tuple[str, ...]  # fields that the grid varies
    seeds: tuple[int, ...]
    points: tuple[Point, ...]

    def cells(self) -> list[Cell]:
        """All cells seed by seed, so that an interrupted sweep has whole comparisons."""
        return [cell for of_a_seed in zip(*(point.cells for point in self.points), strict=True) for cell in of_a_seed]

    def part(self, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> "Sweep":
        """The combinations whose names fit `only` (patterns, in their order), on these seeds; empty means all."""
        points = {} if only else {point.name: point for point in self.points}
        for pattern in only:
            wanted = re.compile(re.escape(pattern).replace(r"\*", ".*"), re.IGNORECASE)
            fit = {point.name: point for point in self.points if wanted.fullmatch(point.name)}
            if not fit:
                hint = did_you_mean(pattern, [point.name for point in self.points])
                raise ConfigError(f"--only: no combination is called '{pattern}'{hint}; --dry-run lists them")
            points |= {name: point for name, point in fit.items() if name not in points}
        for seed in seeds:
            if seed not in self.seeds:
                raise ConfigError(f"--seeds: {seed} was given, expected some of {', '.join(map(str, self.seeds))}")
        kept = tuple(seed for seed in self.seeds if seed in seeds or not seeds)
        chosen = [
            replace(point, cells=tuple(cell for cell in point.cells if cell.experiment.seed in kept))
            for point in points.values()
        ]
        return replace(self, seeds=kept, points=tuple(chosen))


def read(file: Path, init: str | None = None, allow_modules: bool = False) -> Sweep:
    """The sweep that a file describes, with all experiments from a model (`--init`); errors name file and key.

    With `allow_modules` modules beside the file can be imported.
    """
    text, tree = experiments.read_yaml(file, ", ".join(_KEYS), _Loader)
    beside = str(file.parent.resolve())
    if allow_modules and beside not in sys.path:
        sys.path.append(beside)
    try:
        return _expand(file, text, tree, init, allow_modules)
    except FeddureError as error:
        if str(error).startswith(f"{file}: "):
            raise
        raise type(error)(f"{file}: {error}") from None


def from_tree(tree: Mapping[str, Any], init: str | None = None) -> Sweep:
    """The sweep that Python values describe as a file would; modules that they name are the user's own word."""
    plain = dict(tree)
    try:
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"only texts, numbers, true/false, lists and mappings can stand in a sweep ({error})"
        ) from None
    return _expand(Path("sweep.yaml"), text, plain, init, allow_modules=True)


def number_of_cells(file: Path) -> int:
    """How many cells a sweep has, also where what it starts from (`config`) or a user's own code is not there."""
    _, tree = experiments.read_yaml(file, ", ".join(_KEYS), _Loader)
    return _number(_cases(tree.get("cases"))[0], _axes(tree.get("grid")), _seeds(tree.get("seeds", [0])))


def check_folder(sweep: Sweep, folder: Path, merge: Sequence[Path] = ()) -> None:
    """Refuse a folder that holds anything but this sweep, or one that it contains, and others without cells."""
    if not (folder / SWEEP_FILE).exists():
        text = " and holds no sweep; choose another, and merge (--merge) a folder whose cells you want to take over"
        expect_free(folder, RunError, text)
    wanted = {cell.hash for cell in sweep.cells()}
    gone = sum(found.config_hash not in wanted for found in Store(folder).measurements())
    if gone:
        raise RunError(
            f"{folder}: it holds {gone} cells that this sweep lacks, of the one in {folder / SWEEP_FILE}; a sweep "
            "may grow but not shrink or change, so choose another folder (and merge this one into it, --merge)"
        )
    for other in merge:
        finished_cells(other)


def expect_no_sweep(folder: Path) -> None:
    """Refuse a folder that belongs to a sweep, for studies that are none."""
    if (folder / SWEEP_FILE).exists():
        raise RunError(
            f"{folder}: the folder belongs to a sweep, see {folder / SWEEP_FILE}; choose another folder, "
            "and --merge this folder where you want to take over its cells"
        )


def open_folder(
    sweep: Sweep,
    folder: Path,
    merge: Sequence[Path] = (),
    data_dir: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    part: Sweep | None = None,
) -> Store:
    """The folder's cells with those of the folders to `merge`; the folder remembers the sweep.

    Only the data of a `part` that is to be measured need be there.
    """
    check_folder(sweep, folder, merge)
    expect_data((part or sweep).cells(), Store(folder, merge), data_dir)
    make_folder(folder)
    write_whole(folder / SWEEP_FILE, sweep.text.encode(), RunError)
    store = Store(folder)
    for other in merge:
        say(f"{other}: {store.merge(other, sweep.cells())} new cells taken over")
    return store


def _expand(file: Path, text: str, tree: dict[str, Any], init: str | None, allow_modules: bool) -> Sweep:
    for key in tree:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS) or f"; expected {', '.join(_KEYS)}"
            raise ConfigError(f"unknown key '{key}'{hint}")
    if ("preset" in tree) == ("config" in tree):
        raise ConfigError("expected preset or config, one of them, to start from")
    for key in ("preset", "config"):
        if key in tree and not isinstance(tree[key], str):
            raise ConfigError(f"{key}: {tree[key]!r} was given, expected a name")
    preset, named = tree.get("preset"), str(tree.get("preset") or tree["config"])
    start = file.parent / tree["config"] if "config" in tree else None  # found from where the sweep's file lies
    fixed = _fields("set", tree.get("set"))
    fixed |= {"init": init} if init is not None else {}
    axes = _axes(tree.get("grid"))
    cases, notes = _cases(tree.get("cases"))
    seeds = _seeds(tree.get("seeds", [0]))
    _expect_apart(fixed, axes, cases)
    if not axes and not cases:
        raise ConfigError("expected grid or cases, what the experiments differ in")
    if (number := _number(cases, axes, seeds)) > MOST_CELLS:
        raise ConfigError(f"{number:,} experiments were asked for, expected at most {MOST_CELLS:,}: leave values out")
    points = []
    for (case, changes), values in itertools.product(cases.items() or [("", {})], itertools.product(*axes.values())):
        varied = dict(zip(axes, values, strict=True))
        place = f"grid ({', '.join(f'{key}: {value}' for key, value in varied.items())})"
        layers = {"set": fixed, f"case '{case}'": changes, place: varied}
        made = [_experiment(preset, start, layers, seed, allow_modules) for seed in seeds]
        found = experiments.flat(made[0])
        shown = {key: _value(found, key) for key in varied}
        every = {key: _value(found, key) for key in fixed | changes | varied if key not in _OWN_COLUMNS}
        options = " ".join(f"{key}={value}" for key, value in every.items())
        name = combination(case, shown)
        cells = tuple(Cell(file.stem, named, experiment, options, name if case else "") for experiment in made)
        points.append(Point(name, case, shown, cells, *notes.get(case, ())))
    _expect_different(points)
    return Sweep(file.stem, text, named, tuple(axes), tuple(seeds), tuple(points))


def _number(cases: Sized, axes: dict[str, list[Any]], seeds: Sized) -> int:
    return max(1, len(cases)) * math.prod(map(len, axes.values())) * len(seeds)


def _experiment(
    preset: str | None, start: Path | None, layers: dict[str, Changes], seed: int, allow_modules: bool
) -> Experiment:
    """The experiment after all layers of changes; an error is said of the first layer that has it."""
    changes = {key: value for layer in layers.values() for key, value in layer.items()}
    try:
        return _load(preset, start, changes | {"seed": seed}, allow_modules)
    except FeddureError as error:
        changes = {}
        for where, layer in {"config" if start else "": {}, **layers}.items():
            changes |= layer
            try:
                _load(preset, start, changes, allow_modules)
            except FeddureError as problem:
                if set(str(problem).splitlines()) <= set(str(error).splitlines()):
                    raise type(problem)(f"{where}: {problem}" if where else str(problem)) from None
        raise


def _load(preset: str | None, start: Path | None, changes: Changes, allow_modules: bool) -> Experiment:
    empty = [f"{key}=null" for key, value in changes.items() if value is None]  # among changes it means: as it was
    experiment = experiments.compose(preset, start, changes, empty)
    if allow_modules:
        plugins.allow(*experiment.modules)
    plugins.expect_allowed(*experiment.modules)
    methods.make(experiment)
    own = experiment.dataset.startswith(recommended.OWN_IMAGES)
    if preset == recommended.NAME and own and "partition.setting" not in changes:
        raise ConfigError(
            f"preset {preset} is fitted to your images and their sites by `feddure run` and `compare`, not by a sweep; "
            "start from such a run, config: runs/NAME/config.yaml in place of preset, or say partition.setting"
        )
    if ":" not in experiment.dataset:
        find_source(experiment.dataset)
    return experiment


def _fields(where: str, given: Any) -> Changes:
    """Values by dotted keys, none where nothing was given."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{where}: {given!r} was given, expected fields with their values, such as rounds: 20")
    known = [row.key for row in experiments.fields()]
    for key in given:
        if key == "metric" and where != "set":
            raise ConfigError(f"{where}: metric was given; it ranks the whole sweep, so give it in set")
        if key == "seed":
            raise ConfigError(f"{where}: seed was given; list all seeds under seeds, such as seeds: [0, 1, 2]")
        if any(name.startswith(f"{key}.") for name in known):
            inside = next(name for name in known if name.startswith(f"{key}."))
            raise ConfigError(f"{where}: '{key}' is a section; name its field with a dot, such as {inside}")
    return given


def _axes(given: Any) -> dict[str, list[Any]]:
    axes = _fields("grid", given)
    for key, values in axes.items():
        if not isinstance(values, list):
            raise ConfigError(f"grid.{key}: {values!r} was given, expected a list of values; use set for a single one")
        if not values:
            raise ConfigError(f"grid.{key}: the list is empty, expected one value or more")
        for twice in _repeated(values):
            raise ConfigError(f"grid.{key}: {twice} was given twice; name each value once")
    return axes


def _cases(given: Any) -> tuple[dict[str, Changes], dict[str, tuple[str, str]]]:
    """The changes of each case, and by its name what it is there for and the case that it is compared with."""
    if given is None:
        return {}, {}
    if not isinstance(given, list) or not given:
        raise ConfigError(f"cases: {given!r} was given, expected a list of changes, each with a name")
    cases: dict[str, Changes] = {}
    notes: dict[str, tuple[str, str]] = {}
    for number, case in enumerate(given, 1):
        name = case.get("name") if isinstance(case, dict) else None
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"cases: number {number} has no name; give it one, such as name: few labels")
        if name in cases:
            raise ConfigError(f"cases: the name '{name}' was given twice; name each case differently")
        about, against = case.get("about", ""), case.get("against", next(iter(cases), name))
        if not isinstance(about, str):
            raise ConfigError(f"case '{name}': about is {about!r}, expected a sentence")
        if against not in cases and against != name:
            raise ConfigError(f"case '{name}': against is {against!r}, expected the name of a case before it")
        notes[name] = about, against
        changes = {key: value for key, value in case.items() if key not in ("name", "about", "against")}
        cases[name] = _fields(f"case '{name}'", changes)
    return cases, notes


def _seeds(given: Any) -> list[int]:
    whole = isinstance(given, list) and all(type(seed) is int and seed >= 0 for seed in given)
    if not whole or not given:
        raise ConfigError(f"seeds: {given!r} was given, expected a list of whole numbers from 0, such as [0, 1, 2]")
    for twice in _repeated(given):
        raise ConfigError(f"seeds: {twice} was given twice; name each seed once")
    return given


def _repeated(values: Sequence[Any]) -> list[Any]:
    seen: set[tuple[bool, Any]] = set()
    twice = []
    for value in values:
        # To Python, true equals 1.
        alike = type(value) is bool, value if isinstance(value, str | int | float) else repr(value)
        twice += [value] if alike in seen else []
        seen.add(alike)
    return twice


def _expect_apart(fixed: Changes, axes: Changes, cases: dict[str, Changes]) -> None:
    """What the grid varies nothing else says; a case may be an exception from `set`."""
    for where, fields in ({"set": fixed} | {f"case '{name}'": changes for name, changes in cases.items()}).items():
        for key in fields.keys() & axes.keys():
            raise ConfigError(f"{where}: {key} is in grid too; keep it in one of them")


def _expect_different(points: Iterable[Point]) -> None:
    first: dict[str, Point] = {}
    for point in points:
        other = first.setdefault(point.cells[0].hash, point)
        if other is not point:
            raise ConfigError(
                f"'{other.name}' and '{point.name}' are the same experiment: nothing that they differ in changes its "
                "results; drop one of them, or give fields that only some combinations read in cases"
            )


def _value(found: Changes, key: str) -> Any:
    if key in found:
        return found[key]
    outer, _, last = key.rpartition(".")  # an entry of a field that is a mapping
    return _value(found, outer)[last]


class _Loader(yaml.SafeLoader):
    """Plain values only; a key that is there twice is an error rather than the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for twice in _repeated(keys):
            raise yaml.constructor.ConstructorError(None, None, f"the key '{twice}' is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 5e-4 as text; people mean a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)
