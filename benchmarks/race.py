"""Race this engine against pfl-research or Flower's simulation engine, on pfl-research's CIFAR-10 workload, in one run.

    python benchmarks/race.py pfl --pfl pfl-0.6.0-py3-none-any.whl --model cnn resnet9 --json results/race.json
    python benchmarks/race.py flower --clients 100 --per-round 10 --rounds 10 --json results/race-flower-cpu.json

The workload: 1,000 clients of 50 images each, 50 of them a round, one local epoch in batches of 10, SGD at 0.1, the
plain mean of the clients' models, all test images every tenth round; no augmentation. The network has two
convolutions, one hidden layer and dropout; `resnet9` is this project's, with group norm, as pfl-research averages no
batch-norm statistics. Whole rounds are timed, evaluation included; what is compiled, loaded or started once is not.

Equal on both sides: partition, first weights, normalised images, all on the device beforehand (Flower's actors read
theirs from memory-mapped files), and towards pfl-research the clients of each round. Different: here the images of a
client are reshuffled each round, on the other side their order stays; dropout draws its own numbers. Under fp32 and
bf16 this engine uses just that; the others have PyTorch's defaults, under which convolutions on a GPU are TF32. They
make no metrics beyond accuracy. pfl-research runs from its unpacked wheel: of the packages that it imports and this
workload does not need (accountants of differential privacy, `multiprocess`), those not installed have placeholders.
"""

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import finish, noise_images, spread
from torch import Tensor, nn

from feddure import experiments, methods
from feddure import nn as networks
from feddure.config import Experiment
from feddure.data import partition, sources
from feddure.data.batches import Needs
from feddure.data.dataset import Dataset
from feddure.data.partition import Partition
from feddure.methods.fedavg import FedAvg
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation, run
from feddure.simulation.program import new_module
from feddure.tracking.observer import Observer

BATCH, IMAGES, RATE = 10, 50, 0.1
Curve = dict[int, float]
"""Accuracy by round."""

Finished = tuple[float, Curve]
"""Seconds of all rounds, and the curve."""


class PlainFedAvg(FedAvg):
    """FedAvg on images as they are."""

    needs = Needs(labelled="plain")


class TwoConvolutions(nn.Sequential):
    """3×3 convolutions of 32 and 64 channels without padding, a pool, a hidden layer of 128; dropout after both."""

    def __init__(self, channels: int, classes: int):
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.LazyLinear(128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )
        self(torch.zeros(2, channels, 32, 32))  # the size of the hidden layer's input
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)


methods.register("fedavg-plain", PlainFedAvg)
networks.register("two-convolutions", TwoConvolutions)
MODELS = {"cnn": "two-convolutions", "resnet9": "resnet9"}


def main() -> None:
    options = parse()
    dataset = patterns() if options.dataset == "patterns" else sources.load(options.dataset)
    races = [race(model, dataset, options) for model in options.model]
    shown = ("clients", "per_round", "rounds", "evaluate_every", "dataset", "cpu_time")
    finish({"benchmark": "race", **{name: getattr(options, name) for name in shown}, "races": races}, options.json)


def race(model: str, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """All competitors in turn, once for each seed."""
    precisions = options.precision or (["fp32", "tf32", "bf16"] if torch.cuda.is_available() else ["fp32"])
    competitors: dict[str, Callable[[Workload], Finished]] = {f"feddure {name}": Ours(name) for name in precisions}
    competitors[options.against] = {"pfl": run_pfl, "flower": run_flower}[options.against]
    found: dict[str, list[Finished]] = {name: [] for name in competitors}
    for seed in range(options.repeats):
        workload = Workload(model, dataset, options, seed)
        for name, compete in competitors.items():
            found[name].append(compete(workload))
            print(f"{model}, seed {seed}, {name}: {found[name][-1][0]:.2f} s, {found[name][-1][1]}", file=sys.stderr)
    times = {name: spread([seconds for seconds, _ in runs], 1000 / options.rounds) for name, runs in found.items()}
    return {
        "model": model,
        "parameters": sum(parameter.numel() for parameter in workload.module().parameters()),
        "against": options.against,
        "ms_per_round": times,
        "times_as_fast": {
            name: times[options.against]["median"] / times[name]["median"] for name in times if name != options.against
        },
        "accuracy": {name: [curve for _, curve in runs] for name, runs in found.items()},
    }


class Workload:
    """What both sides train: data, who owns them, first weights."""

    def __init__(self, model: str, dataset: Dataset, options: argparse.Namespace, seed: int):
        self.dataset = dataset
        self.options = options
        self.clock = time.process_time if options.cpu_time else time.perf_counter
        self.experiment = experiments.load(
            changes={
                "method": "fedavg-plain",
                "model": MODELS[model],
                "norm": "group",
                "seed": seed,
                "rounds": options.rounds,
                "clients_per_round": options.per_round,
                "labelled_batch": BATCH,
                "evaluate_every": options.evaluate_every,
                "server.weight": "uniform",
                "optimizer.name": "sgd",
                "optimizer.learning_rate": RATE,
                "partition.setting": "iid-iid",
                "partition.clients": options.clients,
                "partition.labels_per_class": IMAGES // len(dataset.classes),
                "partition.labelled_as_unlabelled": True,  # or a label for every image would leave none unlabelled
            }
        )
        self.partition: Partition = partition.make(dataset, self.experiment.partition, seed)

    def with_engine(self, **engine: Any) -> Experiment:
        return experiments.load(
            changes=experiments.flat(self.experiment) | {f"engine.{k}": v for k, v in engine.items()}
        )

    def module(self) -> nn.Module:
        return new_module(self.experiment, self.dataset)

    def federation(self, engine: Engine) -> Federation:
        return Federation(self.experiment, self.dataset, self.partition, engine)

    def due(self, round_number: int) -> bool:
        return round_number % self.options.evaluate_every == 0 or round_number == self.options.rounds


class Ours:
    """This engine; compiled once for all seeds."""

    def __init__(self, precision: str):
        self._precision = precision
        self._engine: Engine | None = None
        self._model = ""

    def __call__(self, workload: Workload) -> Finished:
        options = workload.with_engine(precision=self._precision).engine
        if self._engine is None or self._model != workload.experiment.model:
            self._engine, self._model = Engine(options), workload.experiment.model
        _set_arithmetic(tf32=self._precision != "fp32")  # an engine made since has set it too
        warm = workload.federation(self._engine)
        warm.prepare()
        warm.train_round()
        federation, curve = workload.federation(self._engine), _Curve()
        _synchronise()
        began = workload.clock()
        run(federation, [curve])
        _synchronise()
        return workload.clock() - began, curve.found


class _Curve(Observer):
    def __init__(self) -> None:
        self.found: Curve = {}

    def round_done(self, federation: Federation, record: dict, seconds: float) -> None:
        if "test" in record:
            self.found[record["round"]] = record["test"]["accuracy"]


# --- pfl-research -----------------------------------------------------------------------------------
def run_pfl(workload: Workload) -> Finished:
    """Its simulated backend with FedAvg, as its own benchmark has it, without what that measures on the way."""
    add_pfl(workload.options.pfl)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset as PflDataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    _set_arithmetic(tf32=None)
    engine = Engine(workload.with_engine(precision="fp32").engine)
    _set_arithmetic(tf32=None)
    images, server = engine.images(workload.dataset), workload.federation(engine).server
    owned = {
        client: [images.plain(index.copy()), images.labels[torch.from_numpy(index.copy()).to(engine.device)]]
        for client, index in enumerate(workload.partition.labelled)
    }
    tests = [torch.cat(part) for part in zip(*images.test_batches(10_000), strict=True)]
    central, evaluation = PflDataset(tests), NNEvalHyperParams(local_batch_size=10_000)

    class Evaluate(TrainingProcessCallback):
        def __init__(self) -> None:
            self.curve: Curve = {}

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if workload.due(central_iteration + 1):
                found = model.evaluate(central, eval_params=evaluation)
                self.curve[central_iteration + 1] = found["accuracy"].overall_value
            return False, Metrics()

    def train(rounds: int) -> Finished:
        torch.manual_seed(workload.experiment.seed)
        module = _Judged(workload.module()).to(engine.device)
        central_optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = PyTorchModel(model=module, local_optimizer_create=torch.optim.SGD, central_optimizer=central_optimizer)
        drawn = iter([client for number in range(1, rounds + 1) for client in server.sample(number)])
        users = FederatedDataset.from_slices(owned, lambda: next(drawn))
        backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()])
        parameters = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # of clients on their own images: in the first round alone
            train_cohort_size=workload.options.per_round,
            val_cohort_size=0,
        )
        training = NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=BATCH)
        evaluate = Evaluate()
        _synchronise()
        began = workload.clock()
        FederatedAveraging().run(
            parameters, backend, model, training, evaluation, [evaluate], send_metrics_to_platform=False
        )
        _synchronise()
        return workload.clock() - began, evaluate.curve

    train(1)
    return train(workload.options.rounds)


class _Judged(nn.Module):
    """A network with the two functions that pfl-research asks of it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.module.train()(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        right = (self.module.eval()(images).argmax(1) == labels).sum().item()
        return {"accuracy": Weighted(right, len(labels))}


def add_pfl(wheel: Path | None) -> None:
    """Make `import pfl` work: from a wheel or a folder, and without packages that this workload does not use."""
    if wheel is not None:
        sys.path[:0] = [str(path) for path in (wheel, *wheel.glob("pfl-*.whl")) if str(path) not in sys.path]
    if importlib.util.find_spec("pfl") is None:
        raise SystemExit("pfl-research is not installed: name its wheel with --pfl (pip download --no-deps pfl)")
    if importlib.util.find_spec("multiprocess") is None:
        sys.modules.setdefault("multiprocess", multiprocessing)
    for name, inner in {
        "dp_accounting": ("dp_event", "pld", "pld.privacy_loss_distribution", "rdp", "rdp.rdp_privacy_accountant"),
        "prv_accountant": (),
    }.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            for path in (name, *(f"{name}.{part}" for part in inner)):
                sys.modules[path] = _Placeholder(path)
                sys.modules[path].__path__ = []  # a package


class _Placeholder(types.ModuleType):
    """A module that is not there: it can be imported from, and what comes of it cannot be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", type(name, (), {}))


# --- Flower -----------------------------------------------------------------------------------------
def run_flower(workload: Workload) -> Finished:
    """Its simulation engine: an actor for each core, FedAvg as it comes. One round more comes first, untimed."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
    from flwr.simulation import run_simulation

    engine = Engine(workload.with_engine(precision="fp32", device="cpu").engine)
    images = engine.images(workload.dataset)
    evaluated = workload.module().eval()
    rounds, marks, curve = workload.options.rounds, {}, {}

    with tempfile.TemporaryDirectory() as folder:
        owned = np.stack(workload.partition.labelled)
        pixels = images.plain(owned.reshape(-1)).contiguous().unflatten(0, owned.shape)
        np.save(f"{folder}/images.npy", pixels.numpy())
        np.save(f"{folder}/labels.npy", workload.dataset.labels[owned])
        model, channels, classes = workload.module(), workload.dataset.shape[2], len(workload.dataset.classes)
        made = TwoConvolutions if isinstance(model, TwoConvolutions) else None
        client_app, server_app = ClientApp(), ServerApp()

        @client_app.train()
        def train(message: Message, context: Context) -> Message:
            torch.set_num_threads(1)
            client = int(context.node_config["partition-id"])
            x, y = (np.load(f"{folder}/{name}.npy", mmap_mode="r")[client] for name in ("images", "labels"))
            x, y = torch.from_numpy(x.copy()), torch.from_numpy(y.copy())
            local = made(channels, classes) if made else networks.make("resnet9", channels, classes, "group", 0)
            local.load_state_dict(message.content["arrays"].to_torch_state_dict())
            local.train()
            sgd = torch.optim.SGD(local.parameters(), lr=RATE)
            for images, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
                sgd.zero_grad()
                F.cross_entropy(local(images), labels).backward()
                sgd.step()
            found = {"arrays": ArrayRecord(local.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
            return Message(content=RecordDict(found), reply_to=message)

        def evaluate(number: int, arrays: ArrayRecord) -> None:
            if workload.due(number) and number:
                evaluated.load_state_dict(arrays.to_torch_state_dict())
                with torch.no_grad():
                    right = [(evaluated(x).argmax(1) == y).sum() for x, y in images.test_batches(500)]
                curve[number] = torch.stack(right).sum().item() / len(images.test_labels)
            marks[number] = time.perf_counter()

        @server_app.main()
        def serve(grid: Grid, context: Context) -> None:
            share = (workload.options.per_round + 0.5) / workload.options.clients  # rounded down to a number of them
            strategy = FlowerFedAvg(fraction_train=share, fraction_evaluate=0.0)
            first = ArrayRecord(workload.module().state_dict())
            strategy.start(grid, first, rounds + 1, train_config=ConfigRecord({}), evaluate_fn=evaluate)

        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server_app, client_app, workload.options.clients, backend_config=resources)
    return marks[rounds + 1] - marks[1], curve


# --- details ----------------------------------------------------------------------------------------
def patterns(number: int = 50_000, tests: int = 10_000) -> Dataset:
    """Images that can be learned, where no others can be had: ten coarse patterns under much noise."""
    noise = noise_images(number=number, tests=0)
    stream = np.random.RandomState(1)
    coarse = stream.randint(0, 256, (10, 4, 4, 3)).repeat(8, 1).repeat(8, 2)
    labels = stream.permutation(number) % 10

    def draw(labels: np.ndarray) -> np.ndarray:
        grains = stream.randint(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
        return (0.9 * grains + 0.1 * coarse[labels]).astype(np.uint8)

    test_labels = (np.arange(tests) % 10).astype(np.int64)
    return Dataset(
        "patterns", draw(labels), labels, draw(test_labels), test_labels, noise.classes, (0.5,) * 3, (0.25,) * 3
    )


def _set_arithmetic(tf32: bool | None) -> None:
    """Whether products of float32 may be TF32; None is PyTorch's default, convolutions alone."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = tf32 is not False
    torch.backends.cuda.matmul.allow_tf32 = bool(tf32)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", choices=["pfl", "flower"])
    parser.add_argument("--pfl", type=Path, metavar="WHEEL", help="pfl-research's wheel, or a folder that holds it")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["cnn"])
    parser.add_argument("--dataset", default="cifar10", help="of 32 × 32 pixels and ten classes; patterns: made here")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", nargs="+", metavar="NAME", help="of this engine; all that the device has")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU seconds, where other work shares the cores (not of Flower)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
