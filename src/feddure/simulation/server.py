"""What a server knows and does: it draws clients, says what each is to do, and makes the next model of their answers.

The simulator's federation and the Flower app both have one, so that the mathematics exists once. A server knows
how many images a client has, never the images. Its optimisers are those of Reddi et al. (2021); the averaged global
model is Polyak's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddure import methods, rng
from feddure.config import Experiment, ServerOptions
from feddure.data.batches import BatchPlan
from feddure.data.dataset import Dataset
from feddure.data.geometry import PADDING
from feddure.errors import ConfigError, DataError
from feddure.methods.base import Method, State
from feddure.methods.validation import check_state
from feddure.simulation import dp, initial, robust
from feddure.simulation.engine import Engine
from feddure.simulation.evaluate import evaluate, to_record
from feddure.simulation.program import new_heads, new_module
from feddure.tracking import metrics


@dataclass(frozen=True)
class ImageCounts:
    """How many images a client has."""

    labelled: int
    unlabelled: int
    both: int = 0  # how many are among the labelled and among the unlabelled ones

    @property
    def total(self) -> int:
        return self.labelled + self.unlabelled


@dataclass(frozen=True)
class Assignment:
    """What a client is told to do in a round, beside the model that it receives."""

    client: int
    round: int
    seed: int
    steps: int
    unlabelled_batch: int


@dataclass(frozen=True)
class Answer:
    """What a client received and sent in a round; `problem` says why there is nothing to use."""

    client: int
    steps: int
    received: Mapping[str, Tensor]
    upload: State
    problem: str = ""


@dataclass(frozen=True)
class Moment:
    """A server between two rounds; what a round changes of it is made anew, so that it stays as it was."""

    round: int
    state: State
    moments: dict[str, Tensor]
    averaged: list[Tensor]


class Server:
    """One experiment between rounds, as its server sees it.

    `dataset` says how images look and what classes there are, and holds the test images, if any; its training images,
    if any, are not looked at. `data_identity` is a hash of what the clients train on or under. `statistics_of` gives a
    model (θ and its batch-norm statistics) the statistics with which it is evaluated and exported. `validation` are the
    training images that nobody trains on. Weights go by what clients `claimed` to have, where that is not the truth.
    One that `resumes` gets its state from a checkpoint and needs no `init`.
    """

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        image_counts: Sequence[ImageCounts],
        engine: Engine,
        data_identity: str,
        statistics_of: Callable[[Tensor, Tensor], Tensor] | None = None,
        validation: np.ndarray | None = None,
        claimed: Sequence[ImageCounts] | None = None,
        resumes: bool = False,
    ):
        self.experiment = experiment
        self.dataset = dataset
        self.image_counts = list(image_counts)
        self._claimed = claimed
        self.engine = engine
        self.data_identity = data_identity
        self._statistics_of = statistics_of
        self._tested: dict[str, np.ndarray | None] = {"test": None} if len(dataset.test_images) else {}
        self._tested |= {"validation": validation} if validation is not None and len(validation) else {}
        _expect_squares(dataset)
        self.program = engine.program(experiment, dataset)
        self.method = methods.make(experiment)  # the program's own is of the first experiment that shares it
        _expect_plain_uploads(self.method)
        self.round = 0
        network, module = self.program.network, new_module(experiment, dataset)
        if experiment.init is not None and not resumes:
            initial.fill(module.to(network.master), experiment, dataset)
        self.method.prepare(network, dataset.shape)
        theta, statistics = network.take(module, new_heads(experiment, module, network.classifier))
        state = self.method.start(theta, statistics, len(dataset.classes), experiment.seed)
        self.state = check_state(state, experiment.method, "start")
        self.moments: dict[str, Tensor] = {}
        self.decay = experiment.server.ema if experiment.server.ema is not None else self.method.ema
        self.averaged = [tensor.clone() for tensor in self.method.global_model(self.state)]
        self.memories: dict[int, State] = {}  # of clients, in host memory
        self.files: dict[int, Path] = {}  # of a checkpoint, from which what is kept of a client is mapped
        self.unlabelled_batch = resolve_unlabelled_batch(experiment, self.image_counts)
        if experiment.server.dp_clip is not None:
            dp.check_method(self.method, self.state)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.image_counts)

    def note(self) -> str:
        """What whoever starts this should know, if anything."""
        silent, needs = sum(not counts.labelled for counts in self.image_counts), self.method.needs
        if not silent or self.experiment.server.weight != "total" or not needs.unlabelled or needs.every_label:
            return ""
        return (
            f"{silent} of {self.clients} clients have no labelled image and weigh as much as others, which has done "
            "harm (docs/findings.md): server.weight=labelled lets them count little"
        )

    # --- one round -----------------------------------------------------------------------------------
    def sample(self, round_number: int) -> list[int]:
        """The clients of a round, in drawing order, of those that have something the method learns from.

        The others would only return the model that they received.
        """
        able, size = self._able(), self._expected()
        key = (self.experiment.seed, "sample", round_number)
        if self.experiment.server.sampling == "poisson":
            drawn = rng.bits(len(able), *key) >> np.uint64(11)
            return [client for client, number in zip(able, drawn, strict=True) if number < size / len(able) * 2**53]
        return [able[i] for i in rng.sample(len(able), size, *key)]

    def assignments(self, number: int | None = None) -> list[Assignment]:
        """The work of a round, the next one where none is named, in drawing order."""
        number = self.round + 1 if number is None else number
        return [
            Assignment(client, number, self.experiment.seed, self._steps(client), self.unlabelled_batch)
            for client in self.sample(number)
        ]

    def broadcast(self, assignment: Assignment) -> State:
        """What the server sends to a client at the start of its round."""
        averaged = dict(zip(("averaged.theta", "averaged.statistics"), self.averaged, strict=True))
        return self.method.broadcast(
            {**self.state, **averaged} if self.decay else self.state, assignment.client, assignment.round
        )

    def finish_round(self, answers: Sequence[Answer]) -> tuple[dict, dict[int, str]]:
        """Make the next global model of a round's answers; returns its record and why clients were left out."""
        self.round += 1
        problems = self._problems(answers)
        used = [answer for answer in answers if answer.client not in problems]
        used, suspicious = self._defend(used)
        found = self._aggregate(used)
        if found is None:  # finite updates whose sum, say, is not: whoever does this alone is left out
            guilty = {answer.client for answer in used if self._aggregate([answer]) is None}
            found = self._aggregate([answer for answer in used if answer.client not in guilty])
            if found is None:
                guilty, found = {answer.client for answer in used}, (self.state, self.moments)
            problems |= dict.fromkeys(sorted(guilty), "the update makes the model not finite")
        for answer in used:
            self.files.pop(answer.client, None)
        record = self._conclude(answers, *found) | {"left_out": sorted(problems)}
        return record | ({"suspicious": suspicious} if suspicious else {}), problems

    @property
    def can_speculate(self) -> bool:
        """Whether a round can end before anybody has looked at its answers.

        Nothing is kept of clients, or compared, and the method is known to bear what is not finite.
        """
        options, method = self.experiment.server, self.method
        defends = options.robust != "none" or options.norm_bound is not None or options.dp_clip is not None
        own = type(method).__module__.partition(".")[0] != __package__.partition(".")[0]
        return not (defends or method.keeps or method.memory or own)

    def speculate(self, answers: Sequence[Answer]) -> tuple[dict, Callable[[], bool]]:
        """`finish_round` that does not wait for the device; and what does, and says whether every answer was right.

        If one was not, put the server back to the `moment` before and call `finish_round`.
        """
        self.round += 1
        state, moments = self._made(answers)
        right = torch.stack([*self._flags(answers), self._finite_after(state, moments).expand(2)]).all()
        copied = self.engine.later(right)
        return self._conclude(answers, state, moments), lambda: bool(copied())

    @property
    def moment(self) -> Moment:
        return Moment(self.round, self.state, self.moments, self.averaged)

    @moment.setter
    def moment(self, found: Moment) -> None:
        self.round, self.state, self.moments, self.averaged = found.round, found.state, found.moments, found.averaged

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """While this holds, the server is as it was then."""
        now, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = now

    # --- what is kept of each client -----------------------------------------------------------------
    def remember(self, client: int, memory: State) -> None:
        """Keep a client's memory for its next round: on the host, as devices have no room for all clients."""
        self.memories[client] = {name: tensor.cpu() for name, tensor in memory.items()}
        self.files.pop(client, None)

    def recall(self, client: int) -> State:
        """A client's memory, on the device."""
        return {name: tensor.to(self.engine.device) for name, tensor in self.memories.get(client, {}).items()}

    def owner(self, name: str) -> int | None:
        """The client of which a tensor of a checkpoint is kept: `memory.CLIENT.NAME`, `server.NAME.CLIENT`."""
        group, _, rest = name.partition(".")
        if group == "memory":
            return int(rest.partition(".")[0])
        return self._kept_of(rest) if group == "server" else None

    def take(self, client: int, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Have what is kept of a client from a file of a checkpoint."""
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            if group == "memory":
                self.memories.setdefault(client, {})[rest.partition(".")[2]] = tensor
            else:
                self.state[rest] = tensor
        self.files[client] = path

    def _kept_of(self, name: str) -> int | None:
        """The client of which a tensor of the state is kept."""
        kept, _, client = name.rpartition(".")
        return int(client) if kept in self.method.keeps and client.isdecimal() else None

    # --- the global model ----------------------------------------------------------------------------
    def due(self) -> bool:
        """Whether this round ends with an evaluation."""
        return self.round % self.experiment.evaluate_every == 0 or self.round == self.experiment.rounds

    def test(self) -> dict:
        """The global model on test and validation images, and its average where there is one.

        Or the clients' own models, their mean.
        """
        return self.read_test(self.start_test())

    def start_test(self) -> dict[tuple[str, int | None], Tensor]:
        """What `test` finds, still on the device: by what it is on, and by the client whose own model it is of."""
        alone = self.method.client_models(self.memories) if self._tested else {}
        if alone:
            return {(on, c): found for c, model in alone.items() for on, found in self._evaluate(*model).items()}
        found = self._evaluate(*self.method.global_model(self.state))
        averaged = self._evaluate(*self.averaged) if self.decay is not None else {}
        found |= {f"{on}_ema": vector for on, vector in averaged.items()}
        return {(on, None): vector for on, vector in found.items()}

    def read_test(self, found: Mapping[tuple[str, int | None], Tensor]) -> dict:
        """The record of what `start_test` has found, in one copy from the device."""
        if not found:
            return {}
        vectors = torch.cat(list(found.values())).cpu().split([len(vector) for vector in found.values()])
        classes, sites, record = len(self.dataset.classes), self.dataset.sites, {}
        alone: dict[str, dict[int, dict]] = {}
        for (on, client), vector in zip(found, vectors, strict=True):
            if client is None:
                record[on] = to_record(vector, classes, sites)
            else:
                alone.setdefault(on, {})[client] = to_record(vector, classes, sites)
        return record | {on: mean_evaluation(each) for on, each in alone.items()}

    def model_state(self, averaged: bool = False) -> dict[str, Tensor]:
        """The state of the global model, or of its average over rounds, by name."""
        model = self.averaged if averaged else self.method.global_model(self.state)
        return self.program.network.state_dict(*self._as_evaluated(*model))

    # --- details -------------------------------------------------------------------------------------
    def _as_evaluated(self, theta: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        return theta, self._statistics_of(theta, statistics) if self._statistics_of else statistics

    def _evaluate(self, theta: Tensor, statistics: Tensor) -> dict[str, Tensor]:
        """A model on the test images, if any, and on those set aside for validation, if any."""
        if not self._tested:
            return {}
        network, images, classes = self.program.network, self.engine.images(self.dataset), len(self.dataset.classes)
        model = self._as_evaluated(theta.to(network.device), statistics.to(network.device))
        return {
            name: self.program.attempt(partial(evaluate, network, *model, images, classes, index))
            for name, index in self._tested.items()
        }

    def _steps(self, client: int) -> int:
        counts = self.image_counts[client]
        unlabelled = counts.unlabelled - (counts.both if self.method.needs.every_label else 0)
        steps = self.method.steps(counts.labelled, unlabelled, self.unlabelled_batch)
        if steps < 1:
            raise ConfigError(f"method '{self.experiment.method}': {steps} local steps, expected 1 or more")
        return steps

    def _can_learn(self, client: int) -> bool:
        counts, needs = self.image_counts[client], self.method.needs
        return bool(counts.total if needs.every_label or needs.unlabelled else counts.labelled)

    def _able(self) -> list[int]:
        """Clients that have something the method learns from."""
        return [client for client in range(self.clients) if self._can_learn(client)]

    def _expected(self) -> int:
        """Clients in a round, on average where each is drawn by itself."""
        return min(self.experiment.clients_per_round, len(self._able()))

    def _privacy(self) -> dict[str, float | None]:
        """What all rounds up to now tell about any one client, with all its images; ε is null where it is infinite."""
        options, able = self.experiment.server, len(self._able())
        found = dp.epsilon([(options.dp_noise, self._expected() / able, self.round)])
        return {"epsilon": found if np.isfinite(found) else None, "delta": dp.DELTA}

    def _aggregate(self, used: Sequence[Answer]) -> tuple[State, State] | None:
        """The next state and moments from these answers; None where they would not be finite."""
        state, moments = self._made(used)
        return (state, moments) if bool(self._finite_after(state, moments)) else None

    def _made(self, used: Sequence[Answer]) -> tuple[State, State]:
        """The next state and moments from these answers, whatever they are."""
        before, options = self.state["theta"], self.experiment.server
        if options.dp_clip is not None:  # also of nobody: silence would tell that
            thetas, key = [answer.upload["theta"] for answer in used], (self.experiment.seed, self.round)
            sizes = self._expected(), self.program.network.parameters.trained
            mean = dp.private_mean(before, thetas, options.dp_clip, options.dp_noise, *sizes, *key)
            made = {**self.state, "theta": mean}
        elif used:
            uploads = [answer.upload for answer in used]
            clients = [answer.client for answer in used]
            weights = self.weights(clients)
            if combined := robust.combine(options, uploads):
                uploads, weights, clients = [combined], [1.0], clients[:1]
            made = self.method.aggregate(dict(self.state), uploads, weights, clients, self.round)
        else:
            return self.state, self.moments
        state = check_state(made, self.experiment.method, "aggregate")
        state["theta"], moments = optimise(self.experiment.server, before, state["theta"], self.moments)
        return state, moments

    def _finite_after(self, state: State, moments: State) -> Tensor:
        """Whether all that is new in a state is finite, still on the device."""
        new = [tensor for name, tensor in state.items() if tensor is not self.state.get(name)]
        return _finite([*new, *moments.values()]).to(self.program.network.device)

    def _conclude(self, answers: Sequence[Answer], state: State, moments: State) -> dict:
        """Take the next state over, and average it; returns what a record has of a round at the server."""
        record = {
            "round": self.round,
            "clients": [answer.client for answer in answers],
            "steps": [answer.steps for answer in answers],
            "left_out": [],
            "communication": self._communication(answers),
        }
        self.moments = moments
        self.state = {name: tensor if self._kept_of(name) is None else tensor.cpu() for name, tensor in state.items()}
        if self.decay is not None:
            model = self.method.global_model(self.state)
            decay = corrected_decay(self.decay, self.round)
            self.averaged = [average(decay, a, c) for a, c in zip(self.averaged, model, strict=True)]
        return record | ({"privacy": self._privacy()} if self.experiment.server.dp_clip is not None else {})

    def _problems(self, answers: Sequence[Answer]) -> dict[int, str]:
        """Why updates must not be used, by client; one copy from the device for all."""
        arrived = [answer for answer in answers if not answer.problem]
        flags = self._flags(arrived)
        problems = {answer.client: answer.problem for answer in answers if answer.problem}
        for answer, (finite, possible) in zip(arrived, torch.stack(flags).tolist() if flags else [], strict=True):
            if not finite:
                problems[answer.client] = "the update is not finite"
            elif not possible:  # its root would make the model's every output not a number
                problems[answer.client] = "a batch-norm variance is below zero"
        return problems

    def _flags(self, answers: Sequence[Answer]) -> list[Tensor]:
        """For each update whether it is finite, and whether no variance is below zero; still on the device."""
        variances, flags = self.program.network.variances, []
        for answer in answers:
            statistics = answer.upload.get("statistics", variances[:0])
            below = (statistics < 0) & variances if statistics.shape == variances.shape else variances[:0]
            flags.append(torch.stack([_finite(answer.upload.values()).to(below.device), ~below.any()]))
        return flags

    def weights(self, clients: Sequence[int]) -> list[float]:
        """How much each of these clients counts in the mean of their updates."""
        return capped([self._weight(client) for client in clients], self.experiment.server.weight_cap)

    def _defend(self, answers: Sequence[Answer]) -> tuple[list[Answer], dict[str, str]]:
        """The answers that are aggregated, no update longer than the bound; and which clients look hostile, and why."""
        options, suspicious, answers = self.experiment.server, dict[int, str](), list(answers)
        received, uploads = [answer.received for answer in answers], [answer.upload for answer in answers]
        if options.norm_bound is not None and answers:
            bounded, excess = robust.bound_norms(received, uploads, options.norm_bound)
            answers = [replace(answer, upload=upload) for answer, upload in zip(answers, bounded, strict=True)]
            for place, times in excess.items():
                suspicious[answers[place].client] = f"its update was {times:.3g} times as long as the round's median"
                if len(answers) == 2:  # the shorter one is believed, but may be the hostile one that stops the other
                    doubt = f"one of two updates was {times:.3g} times as long as the other: either may be hostile"
                    suspicious |= dict.fromkeys((answer.client for answer in answers), doubt)
        kept = robust.select(options, received, [answer.upload for answer in answers]) if answers else []
        for place in set(range(len(answers))) - set(kept) if options.robust == "multi-krum" else ():
            suspicious.setdefault(answers[place].client, "its update is far from the others")
        return [answers[place] for place in kept], {str(client): why for client, why in sorted(suspicious.items())}

    def _communication(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Bytes that a round's clients received and sent: four a value, and less where a method can do with less."""
        found = {"down": 0, "up": 0}
        for answer in answers if self.method.exchanges else ():
            bytes_of = {"down": _bytes(answer.received), "up": _bytes(answer.upload)}
            if not answer.problem:
                sparse = self.method.sparse_bytes(self.state, answer.client, answer.received, answer.upload)
                bytes_of |= {f"{way}_sparse": size for way, size in sparse.items()}
            for name, size in bytes_of.items():
                found[name] = found.get(name, 0) + size
        return found

    def _weight(self, client: int) -> float:
        counts = (self._claimed or self.image_counts)[client]
        if self.experiment.server.weight == "uniform":
            return 1.0
        if self.experiment.server.weight == "labelled":
            return float(max(counts.labelled, 1))
        return float(counts.total)


def plan_batches(
    experiment: Experiment, method: Method, assignment: Assignment, labelled: np.ndarray, unlabelled: np.ndarray
) -> BatchPlan:
    """What a client with these images trains on in a round."""
    return BatchPlan(
        client=assignment.client,
        labelled=labelled,
        unlabelled=unlabelled,
        steps=assignment.steps,
        labelled_batch=experiment.labelled_batch,
        unlabelled_batch=assignment.unlabelled_batch,
        needs=method.needs,
        cutout=experiment.labelled_cutout,
    )


def resolve_unlabelled_batch(experiment: Experiment, image_counts: Sequence[ImageCounts]) -> int:
    """Unlabelled images in a step; where nobody says, a fifth of the mean client's."""
    wanted = experiment.unlabelled_batch
    if wanted != "auto":
        return wanted
    return max(1, round(sum(counts.unlabelled for counts in image_counts) / len(image_counts) / 5))


def capped(weights: Sequence[float], cap: float | None) -> list[float]:
    """Weights of which none is more than `cap` times their median; of an even number the lower one, as one may lie."""
    if cap is None or not weights:
        return list(weights)
    limit = cap * sorted(weights)[(len(weights) - 1) // 2]
    return [min(weight, limit) for weight in weights]


def optimise(options: ServerOptions, before: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
    """The next global parameters from the old ones and the clients' mean; `state` holds the moments."""
    if options.optimizer == "mean":
        return mean, state
    change = mean - before
    first = options.beta1 * state.get("momentum", torch.zeros_like(before))
    if options.optimizer == "momentum":
        first = first + change
        return before + options.learning_rate * first, {"momentum": first}
    first = first + (1 - options.beta1) * change
    second = options.beta2 * state.get("square", torch.zeros_like(before)) + (1 - options.beta2) * change * change
    after = before + options.learning_rate * first / (second.sqrt() + options.epsilon)
    return after, {"momentum": first, "square": second}


def mean_evaluation(found: Mapping[int, dict]) -> dict:
    """Evaluations of several clients' models as one: means, and the sum of their confusions."""
    every = list(found.values())
    means = {name: metrics.mean(one[name] for one in every) for name in metrics.TITLES}
    means["loss"] = float(np.mean([one["loss"] for one in every]))
    specificities = zip(*(one["specificity"] for one in every), strict=True)
    return means | {
        "per_class": np.mean([one["per_class"] for one in every], axis=0).tolist(),
        "specificity": [metrics.mean(of_class) for of_class in specificities],
        "confusion": np.sum([one["confusion"] for one in every], axis=0).tolist(),
        "by_client": {str(client): one["accuracy"] for client, one in sorted(found.items())},
        "per_class_by_client": {str(client): one["per_class"] for client, one in sorted(found.items())},
    }


def corrected_decay(decay: float, round_number: int) -> float:
    """The decay of a round: smaller in early ones, so that the starting weights are soon forgotten."""
    return min(decay, round_number / (round_number + 9))


def average(decay: float, averaged: Tensor, current: Tensor) -> Tensor:
    """Exponential average of the global model over rounds."""
    return decay * averaged + (1 - decay) * current


def _expect_plain_uploads(method: methods.Method) -> None:
    robust, name = method.experiment.server.robust, method.experiment.method
    if robust in ("median", "trimmed-mean") and (method.relays_uploads or method.uploads_class_counts):
        raise ConfigError(
            f"server.robust: {robust} was given, but method '{name}' needs what each client sent; use krum, multi-krum "
            "or server.norm_bound"
        )


def _expect_squares(dataset: Dataset) -> None:
    height, width, _ = dataset.shape
    if height != width or height <= PADDING:
        raise DataError(
            f"data set '{dataset.name}': images are {height} × {width} pixels, expected squares of "
            f"{PADDING + 1} × {PADDING + 1} or more"
        )


def _finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all values of all tensors are finite, still on the device."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return 4 * sum(tensor.numel() for tensor in tensors.values())
