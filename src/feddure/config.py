"""An experiment is one configuration: data set, partition, method and federation.

Every field carries its one-sentence meaning; `feddure config --fields` prints them. Presets are YAML files
beside this module; anything in them can be changed with `--set key=value`.
"""

import copy
import difflib
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from feddure import plugins
from feddure.errors import ConfigError

Setting = Literal["iid-iid", "iid-dir", "dir-dir", "fedmatch", "sites"]

# What other programs call some fields; for hints only.
_OTHER_NAMES = {
    "lr": ("learning_rate",),
    "bs": ("labelled_batch", "unlabelled_batch"),
    "batch_size": ("labelled_batch", "unlabelled_batch"),
    "epochs": ("local_steps", "rounds"),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Partition(_Section):
    """Who owns which images, and which of them carry a label."""

    setting: Setting = Field(
        "dir-dir",
        description="How labelled and unlabelled images are spread over clients; `sites` keeps a folder's own clients.",
    )
    clients: int = Field(100, ge=1, description="Number of clients K.")
    gamma: float = Field(0.5, gt=0, description="Dirichlet concentration γ; smaller is more unequal.")
    labels_per_class: int | None = Field(
        None,
        ge=1,
        description="Labelled images per class and client; empty means 5, or every label of a folder data set.",
    )
    label_fraction: float | None = Field(
        None, gt=0, le=1, description="Labelled share of all training images, instead of labels_per_class."
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Seed of the partition; empty means the experiment's seed."
    )


class Optimizer(_Section):
    """Adam, as every client runs it; fresh each round."""

    learning_rate: float = Field(5e-4, gt=0, description="Adam's learning rate on every client.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's mean of gradients.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's mean of squared gradients.")
    epsilon: float = Field(1e-8, gt=0, description="Adam's guard against division by zero.")


class Server(_Section):
    """What the server makes of the clients' updates."""

    weight: Literal["total", "labelled", "uniform"] = Field(
        "total", description="A client's weight in the mean: all its images, its labelled ones, or 1."
    )
    optimizer: Literal["mean", "momentum", "adam"] = Field(
        "mean", description="Take the mean itself, or treat its change as a gradient for momentum or Adam."
    )
    learning_rate: float = Field(1.0, gt=0, description="Step size of the server's momentum or Adam.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Momentum of the server's optimiser.")
    beta2: float = Field(0.99, ge=0, lt=1, description="Decay of squared changes in the server's Adam.")
    epsilon: float = Field(1e-3, gt=0, description="Guard against division by zero in the server's Adam.")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay per round of an averaged global model, evaluated beside it; at 0.9 it needs some 30 rounds.",
    )


class Engine(_Section):
    """How the work is done; nothing here changes what is computed beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")
    lanes: int | Literal["auto"] = Field("auto", description="How many clients train side by side.")
    precision: Literal["auto", "bf16", "tf32", "fp32", "fp64"] = Field(
        "auto", description="Arithmetic of the network; auto is bf16 on CUDA and fp32 on a CPU."
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="Whether to pass the network through torch.compile; auto does so on CUDA."
    )
    deterministic: bool = Field(False, description="Bit-identical repeats on a GPU, at some cost in speed.")


class FixMatch(_Section):
    """FixMatch's confidence threshold and weight."""

    threshold: float = Field(0.95, ge=0, le=1, description="Least confidence τ of a pseudo label that counts.")
    weight: float = Field(1.0, ge=0, description="Weight λ of the unlabelled loss.")


class UDA(_Section):
    """UDA's confidence threshold, sharpening and weight."""

    threshold: float = Field(0.8, ge=0, le=1, description="Least confidence τ of a target that counts.")
    temperature: float = Field(0.4, gt=0, description="Temperature that sharpens the soft targets.")
    weight: float = Field(1.0, ge=0, description="Weight λ of the unlabelled loss.")


class FedDure(_Section):
    """Switches of FedDure and its ablations."""

    h_gradient: Literal["full", "detached"] = Field(
        "full", description="Whether C-reg's gradient flows through the weights H, as Eq. 4 says."
    )
    f_reg_input: Literal["softmax", "logits"] = Field("softmax", description="What F-reg reads.")
    f_reg_memory: Literal["none", "client"] = Field(
        "none", description="F-reg is fresh each round, or kept per client between its rounds."
    )
    reward: Literal["fall", "rise"] = Field(
        "fall",
        description="d is how far C-reg's labelled loss falls in its step (Eq. 3), or rises, as in the released code.",
    )
    d_clip: float | None = Field(None, gt=0, description="Bound on the absolute value of C-reg's reward d.")
    maml_order: Literal[1, 2] = Field(2, description="Order of the meta gradient of baseline+maml.")
    threshold: float = Field(0.95, ge=0, le=1, description="Confidence threshold of the ablations that need one.")
    reward_on: Literal["all", "confident"] = Field(
        "all", description="Unlabelled images that d acts on in c-reg and avg-c-reg: all, or those above the threshold."
    )


class FedMatch(_Section):
    """FedMatch's weights and the readings of its set-up."""

    optimizer: Literal["original", "common"] = Field(
        "original", description="SGD 1e-3 as released, or the Adam every other method here uses."
    )
    net: Literal["common", "original"] = Field(
        "common", description="The experiment's network, or one without normalisation and biases."
    )
    learning_rate: float = Field(1e-3, gt=0, description="SGD's learning rate under optimizer: original.")
    threshold: float = Field(0.75, ge=0, le=1, description="Least confidence of an unlabelled image that counts.")
    helpers: int = Field(2, ge=1, description="Number H of helper models a client receives.")
    helper_every: int = Field(
        10, ge=1, description="Helpers are sent, and count, in rounds whose number is a multiple of this."
    )
    lambda_s: float = Field(10.0, ge=0, description="Weight of the supervised loss.")
    lambda_i: float = Field(1e-2, ge=0, description="Weight of the inter-client consistency.")
    lambda_a: float = Field(1e-2, ge=0, description="Weight of the agreement pseudo labels.")
    lambda_1: float = Field(1e-4, ge=0, description="Weight of the L1 norm of ψ.")
    lambda_2: float = Field(10.0, ge=0, description="Weight of the distance between σ and ψ.")
    psi_factor: float = Field(0.2, description="ψ starts as this multiple of σ.")


class Experiment(_Section):
    """One experiment, complete: this and the data set determine every number it reports."""

    dataset: str = Field("fashion-mini", description="Data set name, `folder:PATH`, `npz:PATH` or `module:function`.")
    method: str = Field("feddure", description="Method name, or `package.module:Class` for your own.")
    model: str = Field("resnet9", description="Network name (resnet9, resnet9-slim, cnn) or `package.module:Class`.")
    norm: Literal["batch", "group"] = Field("batch", description="Normalisation layer of the built-in networks.")
    batch_norm: Literal["aggregate", "static"] = Field(
        "aggregate",
        description="Batch-norm statistics are averaged over clients, or recomputed before each evaluation.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random decision.")
    rounds: int = Field(200, ge=1, description="Number of communication rounds R.")
    clients_per_round: int = Field(5, ge=1, description="Number S of clients drawn each round, without replacement.")
    local_steps: int | Literal["epoch"] = Field(
        5, description="Local steps per round of methods that use unlabelled images; epoch is one pass over them."
    )
    labelled_batch: int = Field(10, ge=1, description="Labelled images in a step.")
    unlabelled_batch: int | Literal["auto"] = Field(
        "auto", description="Unlabelled images in a step; auto is a fifth of the mean client's, as released."
    )
    labelled_cutout: bool = Field(False, description="Cut a grey square out of labelled images too, as released.")
    proximal: float | None = Field(
        None, ge=0, description="FedProx's μ for any method; empty means the method's own (0.01 for fedprox-*)."
    )
    evaluate_every: int = Field(5, ge=1, description="Rounds between two evaluations on the whole test set.")
    checkpoint_every: int = Field(10, ge=1, description="Rounds between two checkpoints.")
    partition: Partition = Partition()
    optimizer: Optimizer = Optimizer()
    server: Server = Server()
    engine: Engine = Engine()
    fixmatch: FixMatch = FixMatch()
    uda: UDA = UDA()
    feddure: FedDure = FedDure()
    fedmatch: FedMatch = FedMatch()
    options: dict[str, Any] = Field(default_factory=dict, description="Free options for a method of your own.")

    @property
    def partition_seed(self) -> int:
        return self.seed if self.partition.seed is None else self.partition.seed

    def to_yaml(self) -> str:
        """The complete configuration as text that `from_yaml` reads back to an equal object."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """A hash of all that determines the results: everything but how the engine does the work."""
        fields = self.model_dump(exclude={"engine": {"lanes", "compile", "device"}, "checkpoint_every": True})
        for section, name, before in _ADDED:
            if fields[section][name] == before:
                del fields[section][name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def own_code(self) -> str:
        """What the fingerprint does not know: the user's own modules that it names, with hashes of their files."""
        return plugins.own_code(self.method, self.model, self.dataset)


_ADDED = (("feddure", "reward_on", "all"), ("feddure", "reward", "fall"))
"""Fields that came after the first published measurements, with the value that does what was done before: at that
value they are left out of fingerprints, so that what was measured without them stays measured."""


def presets() -> list[str]:
    """Names of the presets in the package."""
    folder = resources.files("feddure") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def about(preset: str) -> str:
    """What a preset is, in a sentence."""
    return _read_preset(preset)["about"]


def methods(preset: str) -> list[str]:
    """The methods that a preset compares; none for most."""
    return _read_preset(preset).get("methods", [])


def load(
    preset: str | None = None,
    file: Path | None = None,
    changes: dict[str, Any] | None = None,
    sets: Iterable[str] = (),
) -> Experiment:
    """An experiment from a preset or a file, then `changes` (dotted keys), then `--set key=value` texts."""
    if preset is not None and file is not None:
        raise ConfigError("a preset and a configuration file were both given: use one of them")
    tree: dict[str, Any] = {}
    by_dataset: dict[str, Any] = {}
    if preset is not None:
        tree = _read_preset(preset)
        by_dataset = tree.pop("by_dataset", {})
        for key in ("about", "methods"):
            tree.pop(key, None)
    elif file is not None:
        tree = _read_yaml(file)
    overrides = {key: value for key, value in (changes or {}).items() if value is not None}
    overrides.update(parse_sets(sets))
    dataset = str(overrides.get("dataset", tree.get("dataset")))
    for key, value in by_dataset.get(dataset, {}).items():
        _assign(tree, key, value)
    for key, value in overrides.items():
        _assign(tree, key, value)
    return build(tree)


def parse_sets(sets: Iterable[str]) -> dict[str, Any]:
    """`--set key=value` texts as values by dotted keys."""
    return dict(_parse_set(text) for text in sets)


def build(tree: dict[str, Any]) -> Experiment:
    """An experiment from nested plain values, with errors a person understands."""
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None
    part = experiment.partition
    if part.labels_per_class is not None and part.label_fraction is not None:
        raise ConfigError("partition.labels_per_class and partition.label_fraction were both given: use one of them")
    if part.setting != "sites" and experiment.clients_per_round > part.clients:
        raise ConfigError(
            f"clients_per_round is {experiment.clients_per_round} but partition.clients is {part.clients}: "
            "a round cannot draw more clients than there are"
        )
    try:
        json.dumps(experiment.options)
    except TypeError:
        raise ConfigError("options: only texts, numbers, true/false, lists and mappings can be replayed") from None
    for name in ("local_steps", "unlabelled_batch"):
        value = getattr(experiment, name)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name}: {value} was given, expected 1 or more")
    if isinstance(experiment.engine.lanes, int) and experiment.engine.lanes < 1:
        raise ConfigError(f"engine.lanes: {experiment.engine.lanes} was given, expected 1 or more, or auto")
    return experiment


def fields(model: type[BaseModel] = Experiment, prefix: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, default, meaning) of every field."""
    rows = []
    for name, info in model.model_fields.items():
        if isinstance(info.default, BaseModel):
            rows += fields(type(info.default), f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True)
            rows.append((prefix + name, "" if default is None else str(default), info.description or ""))
    return rows


def _read_preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise ConfigError(f"preset '{name}' does not exist; there are: {', '.join(presets())}")
    return copy.deepcopy(_parse_preset(name))  # callers change what they get


@cache
def _parse_preset(name: str) -> dict[str, Any]:
    """Grids read a preset once for each of hundreds of cells."""
    return yaml.safe_load((resources.files("feddure") / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of fields, as in a run's config.yaml")
    return tree


def _parse_set(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: expected key=value, for example --set partition.gamma=0.3")
    try:
        return key.strip(), _number(yaml.safe_load(value))
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
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: '{section}' is a field, not a section")
        tree = inner
    tree[name] = value


def _explain(detail: Any) -> str:
    # pydantic adds the name of a union's branch to the location ("local_steps.int"); people know the field.
    known = [*(key for key, _, _ in fields()), "options"]
    location = [str(part) for part in detail["loc"]]
    key = next((k for n in range(len(location), 0, -1) if (k := ".".join(location[:n])) in known), ".".join(location))
    if detail["type"] == "extra_forbidden":
        meant = [f"'{name}'" for name in _meant(key, known)]
        hint = f"did you mean {' or '.join(meant)}?" if meant else "`feddure config --fields` lists them all"
        return f"unknown field '{key}'; {hint}"
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{key}: {detail['input']!r} was given, {message}"


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
