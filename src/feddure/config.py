"""The fields that all experiments have: data set, partition, method and federation, each with a sentence about it.

`feddure config --fields` prints them with the options of every method. `feddure.experiments` makes experiments.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from feddure import plugins

Setting = Literal["iid-iid", "iid-dir", "dir-dir", "fedmatch", "pairs", "sites"]
DIRICHLET = ("iid-dir", "dir-dir", "pairs")
"""The settings in which γ acts."""

Metric = Literal["accuracy", "balanced_accuracy", "macro_f1", "auroc"]
"""The metrics that may rank; `feddure.tracking.metrics` has them all."""

Count = Annotated[int, Field(ge=1, le=10**6)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PartitionOptions(_Section):
    """Who owns which images, and which of them carry a label."""

    setting: Setting = Field(
        "dir-dir",
        description="How labelled and unlabelled images are spread over clients; `sites` keeps a folder's own clients.",
    )
    clients: int = Field(100, ge=1, le=10**7, description="Number of clients K.")
    gamma: float = Field(0.5, gt=0, description="Dirichlet concentration γ; smaller is more unequal.")
    labels_per_class: int | None = Field(
        None,
        ge=1,
        description="Labelled images per class and client; empty means 5, or every label of a folder data set.",
    )
    label_fraction: float | None = Field(
        None, gt=0, le=1, description="Labelled share of all training images, instead of labels_per_class."
    )
    labelled_clients: float = Field(
        1.0, gt=0, le=1, description="Share of the clients that hold labels; the number of labels stays."
    )
    unlabelled_fraction: float = Field(
        1.0, ge=0, le=1, description="Share of its unlabelled images that each client keeps; the rest is not used."
    )
    labelled_as_unlabelled: bool = Field(False, description="Labelled images are among the unlabelled ones too.")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Seed of the partition; empty means the experiment's seed."
    )


class OptimizerOptions(_Section):
    """What every client runs, fresh each round."""

    name: Literal["adam", "sgd"] = Field("adam", description="Adam, or stochastic gradient descent.")
    learning_rate: float = Field(5e-4, gt=0, description="Learning rate on every client.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's mean of gradients.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's mean of squared gradients.")
    epsilon: float = Field(1e-8, gt=0, description="Adam's guard against division by zero.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of sgd.")
    nesterov: bool = Field(False, description="Nesterov's momentum for sgd.")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, as in torch.optim.")
    clip_norm: float | None = Field(None, gt=0, description="Longest gradient of a step; longer ones are shortened.")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="The learning rate over rounds: constant, or a cosine from its value down to 0."
    )
    warm_up: int = Field(0, ge=0, description="Rounds in which the learning rate rises to its value.")


class ServerOptions(_Section):
    """What the server makes of the clients' updates."""

    weight: Literal["total", "labelled", "uniform"] = Field(
        "total", description="A client's weight in the mean: all its images, its labelled ones, or 1."
    )
    weight_cap: float | None = Field(
        None,
        ge=1,
        description="No client weighs more than this many times the median of the round's; `federate run` has 3.",
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
        description="Decay of an averaged global model, evaluated beside it; in round r at most r / (r + 9).",
    )
    norm_bound: float | None = Field(
        None, ge=1, description="Longest update, in medians of the round; longer ones are shortened to it."
    )
    robust: Literal["none", "median", "trimmed-mean", "krum", "multi-krum"] = Field(
        "none", description="What takes the place of the mean, against hostile clients."
    )
    robust_share: float = Field(
        0.2, ge=0, lt=0.5, description="Share of a round's clients that trimmed-mean and Krum take to be hostile."
    )
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed", description="Draw exactly S clients a round, or each client by itself with probability S / K."
    )
    dp_clip: float | None = Field(
        None, gt=0, description="Differential privacy of a client: longest update; longer ones are shortened to it."
    )
    dp_noise: float = Field(
        0.0, ge=0, description="Its noise on the sum of updates: the standard deviation is dp_noise · dp_clip."
    )


class AttackOptions(_Section):
    """Hostile clients, simulated: what they do, and how many of them there are."""

    kind: Literal["none", "scale", "sign-flip", "noise", "label-flip", "lie-about-counts"] = Field(
        "none",
        description="They enlarge their update, turn it round, send noise, train on wrong labels, or claim images.",
    )
    share: float = Field(0.2, gt=0, le=1, description="Share of the clients that are hostile.")
    factor: float = Field(
        10.0, gt=0, description="How much larger their update is, or how many times their images they claim."
    )


class EngineOptions(_Section):
    """How the work is done; nothing here changes what is computed beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")
    lanes: Count | Literal["auto"] = Field("auto", description="How many clients train side by side.")
    precision: Literal["auto", "bf16", "tf32", "fp32", "fp64"] = Field(
        "auto",
        description="Arithmetic of the network; auto is bf16 on CUDA and fp32 on a CPU. Recent CPUs have bf16 too.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="Whether to pass the network through torch.compile; auto does so on CUDA."
    )
    deterministic: bool = Field(False, description="Bit-identical repeats on a GPU, at some cost in speed.")


class Experiment(_Section):
    """One experiment, complete: this and the data set determine every number it reports.

    Sections of other names hold what methods' own options change, as plain values (`experiment.feddure`, say);
    `feddure.experiments` has them checked by the methods, and knows their defaults.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    dataset: str = Field("fashion-mini", description="Data set name, `folder:PATH`, `npz:PATH` or `module:function`.")
    method: str = Field("feddure", description="Method name, or `package.module:Class` for your own.")
    model: str = Field(
        "resnet9", description="Network: resnet9, resnet9-slim, resnet8, cnn, or `package.module:Class`."
    )
    norm: Literal["batch", "group"] = Field("batch", description="Normalisation layer of the built-in networks.")
    batch_norm: Literal["aggregate", "static"] = Field(
        "aggregate",
        description="Batch-norm statistics are averaged over clients, or recomputed before each evaluation.",
    )
    init: str | None = Field(
        None, description="Model to start from: a finished run's folder or a .safetensors file; empty: a fresh network."
    )
    init_sha256: str | None = Field(None, description="The hash of that file, filled in when it is named.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random decision.")
    rounds: int = Field(200, ge=1, le=10**7, description="Number of communication rounds R.")
    clients_per_round: int = Field(
        5, ge=1, le=10**7, description="Number S of clients drawn each round, without replacement."
    )
    local_steps: Count | Literal["epoch"] = Field(
        5, description="Local steps per round of methods that use unlabelled images; epoch is one pass over them."
    )
    labelled_batch: int = Field(10, ge=1, le=2**16, description="Labelled images in a step.")
    unlabelled_batch: Count | Literal["auto"] = Field(
        "auto", description="Unlabelled images in a step; auto is a fifth of the mean client's, as released."
    )
    labelled_cutout: bool = Field(False, description="Cut a grey square out of labelled images too, as released.")
    proximal: float | None = Field(
        None, ge=0, description="FedProx's μ for any method; empty means the method's own (0.01 for fedprox-*)."
    )
    evaluate_every: int = Field(5, ge=1, description="Rounds between two evaluations on the whole test set.")
    metric: Metric = Field(
        "accuracy", description="What ranks runs in tables, reports, comparisons and sweeps; all are recorded."
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the images whose class is known that nobody trains on: evaluations test on them too.",
    )
    checkpoint_every: int = Field(10, ge=1, description="Rounds between two checkpoints.")
    probe_every: int = Field(
        0,
        ge=0,
        description="Rounds between two looks at a simulation's clients before aggregation: whose labels are right, "
        "and how far clients drift; 0 is never.",
    )
    partition: PartitionOptions = PartitionOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    server: ServerOptions = ServerOptions()
    attack: AttackOptions = AttackOptions()
    engine: EngineOptions = EngineOptions()
    options: dict[str, Any] = Field(default_factory=dict, description="Options of a method of your own.")

    @property
    def partition_seed(self) -> int:
        return self.seed if self.partition.seed is None else self.partition.seed

    @property
    def modules(self) -> list[str]:
        """The import paths among its names, which are code: `package.module:name`."""
        own_data = self.dataset.startswith(("folder:", "npz:"))
        return [name for name in (self.method, self.model, *(() if own_data else (self.dataset,))) if ":" in name]

    def own_code(self) -> str:
        """What the fingerprint does not know: the user's own modules that it names, with hashes of their files."""
        return plugins.own_code(*self.modules)
