"""Experiments from presets, files and `--set key=value`: checked, written, compared and named by a fingerprint.

Presets are YAML files in `presets/`. The options of a method stand in a section of the configuration, `feddure.reward`
say; the method's own model (`Method.Options`) checks them. An experiment keeps of a section only what differs from its
defaults.
"""

import copy
import difflib
import hashlib
import itertools
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from feddure import methods, plugins, pretrained
from feddure.config import DIRICHLET, Experiment
from feddure.data import partition
from feddure.errors import ConfigError, did_you_mean
from feddure.files import is_text, parse_yaml, read_regular, readable

SCHEMA = 2
"""Of fingerprints. They hash what differs from the defaults, so new fields and options change none; a *changed* default
or meaning does not show in them and needs the next number."""

_NOT_IN_RESULTS = {
    "engine": {"lanes", "compile", "device"}, "checkpoint_every": True, "probe_every": True, "init": True,
    "metric": True,
}  # fmt: skip

# What other programs call some fields; for hints only.
_OTHER_NAMES = {
    "lr": ("learning_rate",),
    "bs": ("labelled_batch", "unlabelled_batch"),
    "batch_size": ("labelled_batch", "unlabelled_batch"),
    "epochs": ("local_steps", "rounds"),
}


_SHORT_NAMES = {"setting": "partition.setting", "clients": "partition.clients"}  # of commands and of Python's arguments


class FieldRow(NamedTuple):
    """A field of the configuration as a person reads about it."""

    key: str  # dotted, as `--set` takes it
    default: str
    allowed: str
    meaning: str


# --- making ---------------------------------------------------------------------------------------------------
def presets() -> list[str]:
    """Names of the presets in the package."""
    folder = resources.files("feddure") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def about(preset: str) -> str:
    """What a preset is, in a sentence."""
    return _read_preset(preset)["about"]


def compared(preset: str) -> tuple[list[str], list[int]]:
    """The methods and seeds that a preset compares; none for most."""
    tree = _read_preset(preset)
    return tree.get("methods", []), tree.get("seeds", [])


def load(
    preset: str | None = None,
    file: Path | None = None,
    changes: dict[str, Any] | None = None,
    sets: Iterable[str] = (),
    allow_modules: bool = False,
) -> Experiment:
    """An experiment from a preset or a file, then `changes` (dotted keys), then `--set key=value` texts.

    Changes and sets are the user's own word, so modules that they name may be imported; those that the file names
    with `allow_modules` alone.
    """
    said = (changes or {}) | parse_sets(sets)
    plugins.allow(*(said.get(key) for key in ("method", "model", "dataset")))
    experiment = compose(preset, file, changes, sets)
    if allow_modules:
        plugins.allow(*experiment.modules)
    return experiment


_LABELS = ("partition.labels_per_class", "partition.label_fraction")
"""Two ways to say how many labels there are."""


def compose(
    preset: str | None = None,
    file: Path | None = None,
    changes: dict[str, Any] | None = None,
    sets: Iterable[str] = (),
) -> Experiment:
    """What `load` makes, where changes come from a file too: no module is allowed by it."""
    if preset is not None and file is not None:
        raise ConfigError("a preset and a configuration file were both given: use one of them")
    tree: dict[str, Any] = {}
    by_dataset: dict[str, Any] = {}
    if preset is not None:
        tree = _read_preset(preset)
        by_dataset = tree.pop("by_dataset", {})
        for key in ("about", "methods", "seeds"):
            tree.pop(key, None)
    elif file is not None:
        _, tree = read_yaml(file, "fields, as in a run's config.yaml")
    overrides = {key: value for key, value in (changes or {}).items() if value is not None}
    overrides.update(parse_sets(sets))
    dataset = str(overrides.get("dataset", tree.get("dataset")))
    for key, value in by_dataset.get(dataset, {}).items():
        _assign(tree, key, value)
    for key, other in (_LABELS, _LABELS[::-1]):
        if overrides.get(key) is not None and other not in overrides:
            _assign(tree, other, None)  # a preset may say it the other way
    for key, value in overrides.items():
        _assign(tree, key, value)
    if "init" in overrides or (tree.get("init") and not tree.get("init_sha256")):
        tree |= pretrained.identify(tree["init"])
    return build(tree)


def expect_given(preset: str | None, file: Path | None, changes: Mapping[str, Any], sets: Iterable[str] = ()) -> None:
    """Refuse what nobody asked for: the fields' defaults are a study's, which takes hours without a GPU."""
    if preset is None and file is None and not list(sets) and all(value is None for value in changes.values()):
        raise ConfigError(
            "nothing says what to train: give a preset (--preset demo takes minutes at most), or a data set "
            "(--dataset PATH for your own images)"
        )


def default_folder(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """A folder under `runs/` named after the experiment that is not there yet."""
    words = (experiment.dataset, experiment.partition.setting, experiment.method, f"seed{experiment.seed}")
    return new_folder("-".join(words), root)


def new_folder(name: str, root: Path = Path("runs")) -> Path:
    """A folder of this name, or with a number after it, that is not there yet."""
    name = re.sub(r"[^\w.=-]+", "_", name)  # a path that can be copied into a shell as it stands
    numbered = (root / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())


def by_key(**given: Any) -> dict[str, Any]:
    """What commands and Python's functions were given, by the dotted keys of the fields."""
    return {_SHORT_NAMES.get(name, name): value for name, value in given.items()}


def parse_sets(sets: Iterable[str]) -> dict[str, Any]:
    """`--set key=value` texts as values by dotted keys."""
    return dict(_parse_set(text) for text in sets)


def build(tree: Mapping[str, Any]) -> Experiment:
    """An experiment from nested plain values, with errors a person understands."""
    sections = methods.sections()
    common = {key: value for key, value in tree.items() if key in Experiment.model_fields}
    problems = [f"unknown field '{key}'; {_hint(key)}" for key in tree if key not in common and key not in sections]
    given: dict[str, dict[str, Any]] = {}
    for section, model in sections.items():
        try:
            changed = model.model_validate(tree.get(section) or {}).model_dump(exclude_defaults=True)
        except ValidationError as error:
            problems += [_explain(detail, section) for detail in error.errors()]
        else:
            given |= {section: changed} if changed else {}
    try:
        experiment = Experiment.model_validate(common | given)
    except ValidationError as error:
        problems += [_explain(detail) for detail in error.errors()]
    problems += [
        f"{key}: the name '{readable(value)}' is not UTF-8, so a configuration cannot hold it; rename it, or link to it"
        for key, value in common.items()
        if isinstance(value, str) and not is_text(value)
    ]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    _check_together(experiment)
    return experiment


def _check_together(experiment: Experiment) -> None:
    """What a field cannot say of itself."""
    part = experiment.partition
    partition.check(part)
    if part.setting != "sites" and experiment.clients_per_round > part.clients:
        raise ConfigError(
            f"clients_per_round is {experiment.clients_per_round} but partition.clients is {part.clients}: "
            "a round cannot draw more clients than there are; "
            f"add --set clients_per_round={part.clients}, or more --clients"
        )
    if (experiment.init is None) != (experiment.init_sha256 is None):
        raise ConfigError("init and init_sha256 belong together: name the model file with --init, which fills in both")
    optimizer = experiment.optimizer
    if optimizer.name == "adam" and (optimizer.momentum or optimizer.nesterov):
        raise ConfigError(
            "optimizer.momentum and optimizer.nesterov were given, but belong to sgd: add optimizer.name=sgd"
        )
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError("optimizer.nesterov was given without optimizer.momentum: add, say, optimizer.momentum=0.9")
    server = experiment.server
    if server.dp_noise and server.dp_clip is None:
        raise ConfigError("server.dp_noise was given without server.dp_clip: noise needs a bound on the update")
    if server.dp_clip is not None and (server.weight, server.sampling) != ("uniform", "poisson"):
        raise ConfigError(
            f"server.dp_clip was given with server.weight={server.weight} and server.sampling={server.sampling}: "
            "the account of privacy holds for server.weight=uniform and server.sampling=poisson"
        )
    if server.dp_clip is not None and (server.robust != "none" or server.norm_bound is not None):
        raise ConfigError(
            "server.dp_clip was given with server.robust or server.norm_bound: what one client sends would then change "
            "what becomes of others, which the account of privacy does not cover; use one of the two"
        )
    if server.sampling == "poisson" and experiment.batch_norm == "static":
        raise ConfigError("batch_norm: static needs clients in every round; use server.sampling=fixed, or aggregate")
    try:
        json.dumps(experiment.options, sort_keys=True)
        yaml.safe_dump(experiment.options)
    except (TypeError, yaml.YAMLError):
        raise ConfigError("options: only texts, numbers, true/false, lists and mappings can be replayed") from None


# --- writing and comparing ------------------------------------------------------------------------------------
def to_tree(experiment: Experiment) -> dict[str, Any]:
    """All common fields, all options of the chosen method, and what the options of others change."""
    tree = experiment.model_dump()
    read = _sections_read(experiment) if experiment.method in methods.METHODS else []
    return tree | {section: options(experiment, section).model_dump() for section in read}


def to_yaml(experiment: Experiment) -> str:
    """The complete configuration as text that `load` reads back to an equal experiment."""
    return yaml.safe_dump(to_tree(experiment), sort_keys=False, allow_unicode=True)


def options(experiment: Experiment, section: str) -> Any:
    """A section of methods' options, complete."""
    return methods.sections()[section].model_validate(getattr(experiment, section, None) or {})


def changes(experiment: Experiment) -> dict[str, Any]:
    """What differs from the defaults, nested; of methods' options those of the chosen method alone."""
    read = _sections_read(experiment)
    tree = experiment.model_dump(exclude_defaults=True)
    return {key: value for key, value in tree.items() if key in Experiment.model_fields or key in read}


def fingerprint(experiment: Experiment) -> str:
    """A hash of all that determines the results: everything but how the engine does the work."""
    tree = changes(experiment.model_copy(update={"partition": _effective_partition(experiment)}))
    for key, names in _NOT_IN_RESULTS.items():
        kept = {} if names is True else {k: v for k, v in tree.get(key, {}).items() if k not in names}  # type: ignore[operator]
        tree = {k: v for k, v in tree.items() if k != key} | ({key: kept} if kept else {})
    return hashlib.sha256(json.dumps([SCHEMA, tree], sort_keys=True).encode()).hexdigest()


def flat(experiment: Experiment) -> dict[str, Any]:
    """Every field by its dotted key, with the options of all methods."""
    found = dict(_leaves(experiment))
    for section in methods.sections():
        found |= _leaves(options(experiment, section), f"{section}.")
    return found


def differences(experiments: Iterable[Experiment]) -> list[str]:
    """Dotted keys of the fields in which experiments differ, in the order of the configuration."""
    trees = [flat(experiment) for experiment in experiments]
    return [key for key in trees[0] if any(tree[key] != trees[0][key] for tree in trees)]


def counts(experiment: Experiment, key: str) -> bool:
    """Whether a field, by its dotted key, is one that the experiment's method reads."""
    section = key.partition(".")[0]
    return section not in methods.sections() or section in _sections_read(experiment)


def fields() -> list[FieldRow]:
    """Every field that `--set` takes: the common ones, then the options of each method."""
    rows = _fields(Experiment)
    for section, model in methods.sections().items():
        rows += _fields(model, f"{section}.")
    return rows


# --- details --------------------------------------------------------------------------------------------------
def _sections_read(experiment: Experiment) -> list[str]:
    """Sections of options that the method reads; one by import path may read any."""
    found = methods.METHODS.get(experiment.method)
    every = methods.sections()
    return [name for name in found.sections() if name in every] if found and ":" not in experiment.method else [*every]


def _effective_partition(experiment: Experiment):
    """γ counts only where there is a Dirichlet share."""
    part = experiment.partition
    return part if part.setting in DIRICHLET else part.model_copy(update={"gamma": type(part)().gamma})


def _leaves(values: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of `_fields`, with their values."""
    for name, info in type(values).model_fields.items():
        value = getattr(values, name)
        if isinstance(info.default, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _fields(model: type[BaseModel], prefix: str = "") -> list[FieldRow]:
    rows = []
    for name, info in model.model_fields.items():
        if isinstance(info.default, BaseModel):
            rows += _fields(type(info.default), f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True)
            text = "" if default is None or default == {} else str(default)
            rows.append(FieldRow(prefix + name, text, _allowed(info), info.description or ""))
    return rows


def _allowed(info: FieldInfo) -> str:
    """The values that a field takes: words, and bounds of numbers."""
    union = get_origin(info.annotation) in (Union, types.UnionType)
    kinds, rules = [], list(info.metadata)
    for kind in get_args(info.annotation) if union else (info.annotation,):
        if get_origin(kind) is Annotated:
            kind, *inner = get_args(kind)
            rules += [rule for one in inner for rule in one.metadata]
        kinds.append(kind)
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    numbers = {int: "whole number", float: "number"}
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {value:{',' if isinstance(value, int) else 'g'}}"
        for rule in rules
        for name, sign in signs.items()
        if (value := getattr(rule, name, None)) is not None and value < 2**53
    ]
    for kind in kinds:
        if kind in numbers:
            words.append(" ".join([numbers[kind], " and ".join(bounds)]).strip())
        elif kind is bool:
            words += ["true", "false"]
    return " | ".join(words + (["empty"] if type(None) in kinds else []))


def _read_preset(name: str) -> dict[str, Any]:
    known = presets()
    if name not in known:
        raise ConfigError(f"preset '{name}' does not exist; there are: {', '.join(known)}{did_you_mean(name, known)}")
    return copy.deepcopy(_parse_preset(name))  # callers change what they get


@cache
def _parse_preset(name: str) -> dict[str, Any]:
    """Grids read a preset once for each of hundreds of cells."""
    return yaml.safe_load((resources.files("feddure") / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))


def read_yaml(file: Path, expected: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> tuple[str, dict[str, Any]]:
    """The text of a file and the mapping that it is."""
    try:
        text = read_regular(file).decode()
        tree = parse_yaml(text, loader)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of {expected}")
    return text, tree


def _parse_set(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: expected key=value, for example --set partition.gamma=0.3")
    try:
        return key.strip(), _number(parse_yaml(value))
    except yaml.YAMLError:
        return key.strip(), value


def _number(value: Any) -> Any:
    """YAML 1.1 reads 5e-4 as text; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict | None):
            raise ConfigError(f"{key}: '{section}' is a field, not a section")
        tree[section] = dict(inner or {})  # a copy, as it may be the caller's
        tree = tree[section]
    tree[name] = value


def _explain(detail: Any, section: str = "") -> str:
    # pydantic adds the name of a union's branch to the location ("local_steps.int"); people know the field.
    location = [*([section] if section else []), *(str(part) for part in detail["loc"])]
    known = {row.key: row for row in fields()}
    key = next((k for n in range(len(location), 0, -1) if (k := ".".join(location[:n])) in known), ".".join(location))
    if detail["type"] == "extra_forbidden":
        return f"unknown field '{key}'; {_hint(key)}"
    given, allowed = detail["input"], known[key].allowed if key in known else ""
    expected = allowed.replace(" | ", " or ") or detail["msg"][:1].lower() + detail["msg"][1:]
    # Not of all fields: who says engine.device=gpu does not mean cpu.
    hint = did_you_mean(str(given), allowed.split(" | ")) if key == "partition.setting" else ""
    return f"{key}: {given!r} was given, expected {expected}{hint}"


def _hint(key: str) -> str:
    meant = [f"'{name}'" for name in _meant(key, [row.key for row in fields()])]
    return f"did you mean {' or '.join(meant)}?" if meant else "`feddure config --fields` lists them all"


def _meant(key: str, known: list[str]) -> list[str]:
    """The fields that a person may have meant by a key that does not exist."""
    section, _, name = key.rpartition(".")
    names = _OTHER_NAMES.get(name, (name,))
    inside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    exact = [inside[n] for n in names if n in inside] or [k for k in known if k.rpartition(".")[2] in names]
    if exact:
        return exact
    if section and (close := difflib.get_close_matches(name, inside, n=1)):
        return [inside[close[0]]]
    sections = [] if section else dict.fromkeys(k.partition(".")[0] for k in known if "." in k)
    return difflib.get_close_matches(key, [*known, *sections], n=1)
