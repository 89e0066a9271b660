"""The engine and a twin on the same tiny federation: same images, same received model, same first F-reg."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from feddure import config, experiments
from feddure import nn as networks
from feddure.data import partition
from feddure.data.dataset import Dataset
from feddure.methods import Client
from feddure.nn import regulator
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation
from feddure.simulation.lanes import Task
from oracle.client import Client as Twin
from oracle.client import Settings
from oracle.feddure_twin import MAML, AvgCReg, AvgFReg, CReg, FedDure, FReg, new_f_reg
from oracle.fixmatch_twin import UDA, FixMatch
from oracle.proxyfl_twin import Model

CLASSES = 4
FIXMATCH = {"fedavg-fixmatch": FixMatch, "fedprox-fixmatch": FixMatch, "baseline+maml": MAML}
UDAS = {"fedavg-uda": UDA, "fedprox-uda": UDA}
FEDDURE = {"feddure": FedDure, "f-reg": FReg, "avg-f-reg": AvgFReg, "c-reg": CReg, "avg-c-reg": AvgCReg}
TWINS: dict[str, type[Twin]] = {**FIXMATCH, **UDAS, **FEDDURE}


def toy_dataset(per_class: int = 24, side: int = 12, channels: int = 3, seed: int = 0) -> Dataset:
    """Noisy images with one bright patch, whose place says the class."""
    random = np.random.default_rng(seed)
    labels = np.tile(np.arange(CLASSES), per_class)
    images = random.integers(0, 170, (len(labels), side, side, channels))
    half = side // 2
    for image, label in zip(images, labels, strict=True):
        row, column = half * (label // 2), half * (label % 2)
        image[row : row + half, column : column + half] += 85
    images = images.astype(np.uint8)
    names = tuple("abcd")
    return Dataset("toy", images, labels, images[:8], labels[:8], names, (0.4,) * channels, (0.2,) * channels)


def experiment_of(method: str, **changes: Any) -> config.Experiment:
    """A small float64 experiment; `changes` write `__` for the dot of a dotted key."""
    small = {
        "method": method,
        "engine.precision": "fp64",
        "engine.device": "cpu",
        "engine.lanes": 1,
        "partition.setting": "iid-dir",
        "partition.clients": 4,
        "partition.labels_per_class": 2,
        "clients_per_round": 1,
        "local_steps": 3,
        "labelled_batch": 4,
        "unlabelled_batch": 6,
        # An untrained network is not confident; about half of its pseudo labels pass this one.
        "feddure.threshold": 0.45,
        "fixmatch.threshold": 0.45,
        "uda.threshold": 0.45,
    }
    return experiments.load(
        "demo",
        changes={"optimizer.learning_rate": 5e-4, **small, **{k.replace("__", "."): v for k, v in changes.items()}},
    )


def federation_of(experiment: config.Experiment, dataset: Dataset | None = None) -> Federation:
    """A federation whose first model has random values everywhere, where a fresh one has zeros and ones."""
    dataset = toy_dataset() if dataset is None else dataset
    made = partition.make(dataset, experiment.partition, experiment.partition_seed)
    federation = Federation(experiment, dataset, made, Engine(experiment.engine))
    generator = torch.Generator().manual_seed(experiment.seed + 1)
    theta, statistics = federation.server.state["theta"], federation.server.state["statistics"]
    theta = theta + 0.05 * torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
    statistics = statistics + 0.1 * torch.rand(statistics.shape, generator=generator, dtype=theta.dtype)
    federation.server.state = federation.server.method.start(theta, statistics, len(dataset.classes), experiment.seed)
    return federation


def settings_of(experiment: config.Experiment, proximal: float) -> Settings:
    """The experiment's constants in the twin's words."""
    method = experiment.method
    of_loss = experiments.options(experiment, "uda") if method in UDAS else experiments.options(experiment, "fixmatch")
    return Settings(
        learning_rate=experiment.optimizer.learning_rate,
        proximal=proximal,
        threshold=of_loss.threshold if method not in FEDDURE else experiments.options(experiment, "feddure").threshold,
        weight=of_loss.weight,
        temperature=experiments.options(experiment, "uda").temperature,
        h_gradient=experiments.options(experiment, "feddure").h_gradient,
        f_reg_input=experiments.options(experiment, "feddure").f_reg_input,
        d_clip=experiments.options(experiment, "feddure").d_clip,
        maml_order=experiments.options(experiment, "feddure").maml_order,
        reward=experiments.options(experiment, "feddure").reward,
        reward_on=experiments.options(experiment, "feddure").reward_on,
    )


def module_of(federation: Federation, theta: Tensor, statistics: Tensor) -> nn.Module:
    """An ordinary module with these flat parameters and statistics."""
    experiment, dataset = federation.experiment, federation.dataset
    channels = dataset.shape[2]
    module = networks.make(experiment.model, channels, len(dataset.classes), experiment.norm, seed=99).double()
    found = module.load_state_dict(federation.server.program.network.state_dict(theta, statistics), strict=False)
    assert not found.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in found.missing_keys)
    return module


def headed_of(federation: Federation, theta: Tensor, statistics: Tensor) -> Model:
    """An ordinary module with these parameters, and ProxyFL's heads with theirs."""
    network = module_of(federation, theta, statistics)
    values, features = federation.server.program.network.parameters.views(theta), network[-1].in_features
    feature, proxy = nn.Linear(features, features).double(), nn.Linear(features, features, bias=False).double()
    with torch.no_grad():
        feature.weight.copy_(values["head:feature.weight"])
        feature.bias.copy_(values["head:feature.bias"])
        proxy.weight.copy_(values["head:proxy.weight"])
    return Model(network, feature, proxy)


def flat_of(federation: Federation, module: nn.Module) -> tuple[Tensor, Tensor]:
    """A module's parameters and statistics in the engine's order, with its heads' if it has any."""
    if isinstance(module, Model):
        heads = {"feature": module.feature, "proxy": module.proxy}
        return federation.server.program.network.take(module.network, heads)
    return federation.server.program.network.take(module)


def fresh_w(federation: Federation, key: tuple[int, ...]) -> Tensor:
    """The engine's first w of this seed, round and client."""
    return torch.from_numpy(regulator.initial(len(federation.dataset.classes), "f-reg", *key))


def f_reg_of(w: Tensor, classes: int = CLASSES) -> nn.Module:
    """The perceptron with these flat parameters."""
    f_reg = new_f_reg(classes).double()
    vector_to_parameters(w.clone(), f_reg.parameters())
    return f_reg


def w_of(f_reg: nn.Module) -> Tensor:
    """A perceptron's parameters in the engine's order: matrix, biases, row, last bias."""
    return parameters_to_vector(f_reg.parameters()).detach()


def twin_of(federation: Federation, task: Task, start: Tensor | None = None, twin: type[Twin] | None = None) -> Twin:
    """The twin of this task's client; `start` is its first w (or the received w̄, φ̄) where it is not the default."""
    experiment = federation.experiment
    received = module_of(federation, task.received["theta"], task.received["statistics"])
    settings = settings_of(experiment, federation.server.program.proximal)
    twin = twin or TWINS[experiment.method]
    classes = len(federation.dataset.classes)
    if issubclass(twin, AvgFReg):
        w = fresh_w(federation, (experiment.seed, 0, 0)) if start is None else start
        return twin(received, settings, f_reg_of(w, classes))
    if issubclass(twin, FedDure | FReg):
        return twin(received, settings, f_reg_of(fresh_w(federation, task.key) if start is None else start, classes))
    if issubclass(twin, AvgCReg):
        phi = task.received["theta"] if start is None else start
        return twin(received, settings, module_of(federation, phi, task.received["statistics"]))
    return twin(received, settings)


def client_of(federation: Federation, task: Task) -> Client:
    """The engine's client at the start of this task."""
    program = federation.server.program
    client = Client(program.network, program.experiment, program.proximal, program.classes)
    program.method.allocate(client)
    client.receive(task.received, task.key)
    for name, value in task.memory.items():
        client.state[name].copy_(value)
    program.method.start_round(client, {**task.received, **task.memory})
    return client


def twin_step(twin: Twin, task: Task, index: int) -> dict[str, Tensor]:
    """One local step of the twin on the task's batch of that number."""
    batch = task.batches.step(index)
    return twin.step(batch.labelled, batch.labels, batch.weak, batch.strong)


def twin_round(twin: Twin, task: Task) -> list[dict[str, Tensor]]:
    """All local steps of the twin; its records."""
    return [twin_step(twin, task, index) for index in range(task.steps)]


def state_of(federation: Federation, twin: Twin) -> dict[str, Tensor]:
    """θ, its statistics, φ and the w that learns, as far as the twin has them."""
    theta, statistics = flat_of(federation, twin.theta)
    state = {"theta": theta, "statistics": statistics}
    if hasattr(twin, "phi"):
        state["phi"] = flat_of(federation, twin.phi)[0]
    if hasattr(twin, "f_reg"):
        state["w"] = w_of(twin.sent if isinstance(twin, AvgFReg) else twin.f_reg)
    return state


def upload_of(federation: Federation, twin: Twin) -> dict[str, Tensor]:
    """What the twin sends: θ, its statistics, and the regulator it trained for the server's mean."""
    theta, statistics = flat_of(federation, twin.theta)
    upload = {"theta": theta, "statistics": statistics}
    if isinstance(twin, AvgFReg):
        upload["w"] = w_of(twin.sent)
    if isinstance(twin, AvgCReg):
        upload["phi"] = flat_of(federation, twin.sent)[0]
    return upload


def records_of(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The twin's records of a round under the engine's names, one row a step."""
    names = {"m": "weight", "mask": "weight", "d": "d"}
    return {names[name]: torch.stack([step[name] for step in steps]) for name in steps[0]}


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest expected value."""
    if expected.numel() == 0:
        return 0.0
    difference = (found.detach() - expected.detach()).abs().max()
    return (difference / expected.detach().abs().max().clamp_min(1e-300)).item()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-9) -> None:
    """All that `expected` names is in `found`, in the same shape and equal up to rounding."""
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert distance(found[name], value) < tolerance, (name, distance(found[name], value))


def assert_same_round(federation: Federation, starts: Mapping[int, Tensor] | None = None) -> None:
    """The next round of all its clients, through the engine's lanes, against one twin each."""
    tasks = federation.tasks()
    for task, result in zip(tasks, federation.engine.run(tasks), strict=True):
        twin = twin_of(federation, task, (starts or {}).get(task.client))
        records = records_of(twin_round(twin, task))
        upload = upload_of(federation, twin)
        assert set(result.upload) == set(upload)
        assert_same(result.upload, upload)
        assert_same(result.records, records)
