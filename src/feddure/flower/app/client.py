"""Flower's ClientApp: one client of a federation, at the site that owns its images.

A node is told who it is by its configuration, for example
`site="a" data="/images" state="/var/feddure" description="/path/federation.yaml"`, and perhaps `device="cpu"` and the
options of `privacy` and `policy`. Training itself is the simulator's own code.
"""

import hashlib
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from feddure import experiments, methods
from feddure.config import Experiment
from feddure.errors import ConfigError, FeddureError, RunError
from feddure.files import parse_yaml
from feddure.flower.app import limits
from feddure.flower.app.audit import AuditLog, describe_arrays
from feddure.flower.app.messages import (
    ANSWER,
    TASK,
    Task,
    array_bytes,
    pack,
    pack_state,
    unpack_state,
)
from feddure.flower.app.policy import MOST_HELPERS, check_approval, check_method, check_policy, check_work
from feddure.flower.app.privacy import protect
from feddure.flower.app.private_files import make_private_folder, state_folder, write_private_file
from feddure.flower.app.sanitize import disclosed, log, one_line, public_text
from feddure.flower.app.site_data import Site, open_site, set_aside
from feddure.methods.base import State
from feddure.simulation.engine import Engine
from feddure.simulation.evaluate import evaluate, to_record
from feddure.simulation.lanes import Result
from feddure.simulation.lanes import Task as LaneTask
from feddure.simulation.program import new_heads, new_module
from feddure.simulation.server import plan_batches

_KEPT_RUNS = 16
"""Runs whose memory a site keeps, those that it trained in last."""


class Memory:
    """What a client remembers between its rounds, such as FedDure's F-reg under `f_reg_memory: client`.

    It never leaves the site, and survives a restart of its node. A memory belongs to a run and to the round that made
    it; the server says which round's update it used last, and the client goes on from that one. So an update that was
    lost or refused leaves no trace, and a server that goes back to its last checkpoint finds the memory of that time.
    """

    def __init__(self, state: Path, run_name: str):
        if not (run_name.isascii() and run_name.isalnum()):  # it comes from the server, and becomes a path here
            raise disclosed(RunError(f"the server calls its run {run_name!r}, expected letters and digits; update it"))
        self._folder = state / "memory" / run_name

    def recall(self, round_number: int) -> State | None:
        """The memory of a round; None where it is lost."""
        try:
            return load_file(self._file(round_number))
        except (OSError, SafetensorError):
            return None

    def keep(self, round_number: int, memory: State, also: Iterable[int]) -> None:
        """Keep a round's memory, and of the earlier ones those of the rounds in `also`."""
        for folder in (self._folder.parent, self._folder):
            make_private_folder(folder, RunError)
        content = save({name: tensor.cpu().contiguous() for name, tensor in memory.items()})
        write_private_file(self._file(round_number), content, RunError, durable=True)
        kept = {self._file(number) for number in (round_number, *also)}
        for file in self._folder.glob("round-*.safetensors"):
            if file not in kept:
                file.unlink(missing_ok=True)
        # The server names its runs, and may think of a new name for each message.
        runs = sorted(self._folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in runs[:-_KEPT_RUNS]:
            shutil.rmtree(folder, ignore_errors=True)

    def _file(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number}.safetensors"


def read_experiment(text: str, device: str = "") -> Experiment:
    """The run's experiment as a site carries it out: one lane, and nothing compiled unless that was asked for.

    Flower starts a process for each message; compiling would take longer there than it saves.
    """
    experiment = experiments.build(parse_yaml(text) or {})
    engine: dict[str, Any] = {"lanes": 1}
    if experiment.engine.compile == "auto":
        engine["compile"] = False
    if device:
        engine["device"] = device
    return experiments.build(experiment.model_dump() | {"engine": experiment.engine.model_dump() | engine})


class Worker:
    """Trains a site's client; keeps its engine where the process lives longer than one message."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.engine = Engine(experiment.engine)
        self.method = methods.make(experiment)
        if self.helpers > MOST_HELPERS:
            raise disclosed(ConfigError(f"the server asks for {self.helpers} helpers, expected {MOST_HELPERS} at most"))

    @property
    def helpers(self) -> int:
        """Further models that a client of FedMatch receives."""
        return int(getattr(self.method.options, "helpers", 0))

    def first_message_bytes(self, site: Site) -> int:
        """What the arrays of a run's first message to a site take, by the site's own reckoning."""
        experiment, dataset = self.experiment, site.data.dataset
        network, module = self.engine.program(experiment, dataset).network, new_module(experiment, dataset)
        self.method.prepare(network, dataset.shape)
        theta, statistics = network.take(module, new_heads(experiment, module, network.classifier))
        state = self.method.start(theta, statistics, len(dataset.classes), experiment.seed)
        averaged = dict(zip(("averaged.theta", "averaged.statistics"), self.method.global_model(state), strict=True))
        sent = self.method.broadcast({**state, **averaged}, site.client, 1)
        return sum(tensor.numel() * tensor.itemsize for tensor in sent.values())

    def train(self, site: Site, task: Task, received: State, memory: Memory) -> tuple[State, dict[str, Any]]:
        """One round of the site's client: what it uploads, and its answer."""
        began = time.perf_counter()
        images, labelled, unlabelled = site.data.dataset, len(site.data.labelled), len(site.data.unlabelled)
        # A GPU's own error is harmless; a machine without memory may end any of its programs.
        in_memory = self.engine.device.type == "cpu"
        network = self.engine.program(self.experiment, images).network
        image_bytes = math.prod(images.shape) * network.master.itemsize if in_memory else 0
        check_work(self.experiment, self.method, task.assignment, labelled, unlabelled, image_bytes)
        before, note = self._recall(task, memory)
        tests = self._test(site, received) if task.evaluate else {}
        result = self.work(site, task, received, before)
        if self.method.memory:
            memory.keep(task.assignment.round, result.memory, (task.remembered_round, task.checkpointed_round))
        answer = {
            "site": site.name,
            "client": site.client,
            "round": task.assignment.round,
            "seconds": time.perf_counter() - began,
            "memory": note,
            **_means(result),
            **tests,
        }
        return result.upload, answer

    def work(self, site: Site, task: Task, received: State, memory: State) -> Result:
        """The client's local training, exactly as the simulator's lanes do it."""
        assignment = task.assignment
        plan = plan_batches(self.experiment, self.method, assignment, site.data.labelled, site.data.unlabelled)
        (batches,) = self.engine.images(site.data.dataset).batches([plan], assignment.seed, assignment.round)
        key = (assignment.seed, assignment.round, assignment.client)
        program = self.engine.program(self.experiment, site.data.dataset)
        (counts,) = self.engine.images(site.data.dataset).class_counts([plan])
        lane_task = LaneTask(program, assignment.client, assignment.steps, batches, received, key, counts, memory)
        return self.engine.run([lane_task])[0]

    def _recall(self, task: Task, memory: Memory) -> tuple[State, str | None]:
        if not self.method.memory or not task.remembered_round:
            return {}, None
        found = memory.recall(task.remembered_round)
        if found is None or found.keys() != set(self.method.memory):
            return {}, f"the memory of round {task.remembered_round} is lost; the client started afresh"
        return {name: tensor.to(self.engine.device) for name, tensor in found.items()}, None

    def _test(self, site: Site, received: State) -> dict[str, float | int]:
        """The received model on the site's own test and validation images; nothing of a model that is sent in parts."""
        if not {"theta", "statistics"} <= received.keys():
            return {}
        found: dict[str, float | int] = {}
        dataset, validation = site.data.dataset, site.data.validation
        program, classes = self.engine.program(self.experiment, dataset), len(dataset.classes)
        model = received["theta"], received["statistics"], self.engine.images(dataset), classes

        def test(index: np.ndarray | None = None) -> dict[str, Any]:
            return to_record(program.attempt(lambda: evaluate(program.network, *model, index)), classes)

        if len(dataset.test_images):
            tested = test()
            found |= {f"test.{name}": tested[name] for name in ("accuracy", "loss")}
            found["test.images"] = len(dataset.test_images)
        if len(validation):
            found["validation.accuracy"] = test(validation)["accuracy"]
            found["validation.images"] = len(validation)
        return found


def _means(result: Result) -> dict[str, float]:
    """Means over all images and steps of the round; nothing of a single one is told, and true classes never count."""
    arrays = {name: tensor.double().cpu().numpy() for name, tensor in result.records.items()}
    found = {name: float(values.mean()) for name, values in arrays.items() if values.ndim == 1}
    if "weight" in arrays and arrays["weight"].ndim == 2 and arrays["weight"].size:
        found["weight"] = float(arrays["weight"].mean())
    return {f"train.{name}": value for name, value in found.items() if np.isfinite(value)}


# --- Flower's app ------------------------------------------------------------------------------------
app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Who this site is and how many images it has."""

    def answer() -> RecordDict:
        asked = message.content.config_records[TASK]
        site = _open(context, str(asked["experiment"]))
        for file, reason in site.data.unreadable:
            print(f"left out: {file}: {reason}", flush=True)
        if "refused" in asked:
            log(f"problem: the server refuses this site: {one_line(asked['refused'])}; ask the server's operator")
        else:
            log(_introduction(site, str(asked["experiment"])))
        worker = _worker_at(context, str(asked["experiment"]), "cpu")
        first = worker.first_message_bytes(site)
        limits.allow_download(site.state, context.run_id, first, min(worker.helpers, site.clients))
        return RecordDict({ANSWER: pack(site.introduce())})

    return _answer(message, context, answer)


def keep_record(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod around all others: the site's audit log has what came and what leaves, as it leaves."""
    reply = _explained(message, context, lambda: call_next(message, context))
    return _explained(message, context, lambda: _kept(message, context, reply))


def _kept(message: Message, context: Context, reply: Message) -> Message:
    state = state_folder(context.node_config)
    task: Mapping[str, Any] = message.content.config_records.get(TASK) or {}
    answer: Mapping[str, Any] = reply.content.config_records.get(ANSWER) or {} if reply.has_content() else {}
    make_private_folder(state, RunError)
    asked = {name: one_line(task.get(name, "")) for name in ("run_name", "round", "audit")}
    problem = answer.get("problem") if reply.has_content() else "failed"
    AuditLog(state).write(
        "refused to train" if problem else "trained",
        site=context.node_config.get("site"),
        run=asked["run_name"],
        round=asked["round"],
        experiment=hashlib.sha256(str(task.get("experiment", "")).encode()).hexdigest(),
        received=describe_arrays(message.content),
        **({"why": problem} if problem else {"sent": describe_arrays(reply.content)}),
        servers_log=asked["audit"],
    )
    return reply


@app.train(mods=[keep_record, protect])
def train(message: Message, context: Context) -> Message:
    """One round of this site's client."""

    def answer() -> RecordDict:
        task = Task.unpack(message.content.config_records[TASK])
        site = _open(context, task.experiment, task.assignment.round)
        if task.left_out:
            log(f"warning: the server did not use this site's answer of {one_line(task.left_out)}")
        if task.notice:
            log(f"note: this site {one_line(task.notice)}")
        worker = _worker_at(context, task.experiment, str(context.node_config.get("device", "")))
        memory = Memory(site.state, task.run_name)
        upload, report = worker.train(site, task, unpack_state(message.content, worker.engine.device), memory)
        content = pack_state(upload)
        content[ANSWER] = pack(report)
        sizes = array_bytes(message.content), array_bytes(content)
        log(_round_line(report, worker.experiment.rounds, *sizes))
        return content

    return _answer(message, context, answer)


def _introduction(site: Site, experiment: str) -> str:
    asked = parse_yaml(experiment) or {}
    data, share = site.data, asked.get("validation")
    notes = [f"{len(data.unreadable)} unreadable files are left out"] if data.unreadable else []
    if len(data.validation):
        notes.append(f"{len(data.validation):,} more labelled ones are set aside for validation")
    elif share:
        notes.append(f"too few are labelled to set {share:g} of them aside for validation")
    if not len(data.labelled):
        notes.append("methods that learn from labels alone do not draw a site without any")
    return (
        f"a run asks for this site: {asked.get('method')}, {asked.get('rounds')} rounds; the server was told of "
        f"{len(data.labelled):,} labelled and {len(data.unlabelled):,} unlabelled images"
        + (f" ({'; '.join(notes)})" if notes else "")
    )


def _round_line(report: Mapping[str, Any], rounds: int, received: int, sent: int) -> str:
    parts = []
    if "train.loss" in report:
        parts.append(f"loss {report['train.loss']:.3f}")
    if "test.accuracy" in report:
        parts.append(
            f"received model {100 * report['test.accuracy']:.1f} % on {report['test.images']:,} own test images"
        )
    if "validation.accuracy" in report:
        held = report["validation.images"]
        parts.append(f"{100 * report['validation.accuracy']:.1f} % on {held:,} images set aside for validation")
    parts.append(f"{report['seconds']:.1f} s, {received / 1e6:.2f} MB received, {sent / 1e6:.2f} MB to send")
    line = f"round {report['round']}/{rounds}: {', '.join(parts)}"
    return f"{line}; {report['memory']}" if report.get("memory") else line


def _open(context: Context, experiment: str, round_number: int | None = None) -> Site:
    node: dict[str, Any] = dict(context.node_config)
    check_policy(node, experiment)
    check_approval(node, experiment, context.run_id, round_number)
    return set_aside(open_site(node, str(context.run_config.get("description", ""))), read_experiment(experiment))


def _worker_at(context: Context, experiment: str, device: str) -> Worker:
    worker = _worker(experiment, device)
    check_method(context.node_config, worker.method)
    return worker


@lru_cache(maxsize=2)
def _worker(experiment: str, device: str) -> Worker:
    return Worker(read_experiment(experiment, device))


def _answer(message: Message, context: Context, work: Callable[[], RecordDict]) -> Message:
    """What the work makes, or the problem that it met: the server then knows why, and goes on without this site."""
    return _explained(message, context, lambda: Message(work(), reply_to=message))


def _explained(message: Message, context: Context, work: Callable[[], Message]) -> Message:
    """The message that the work makes; of an error that nobody foresaw Flower would tell the server all, with paths."""
    try:
        return work()
    except FeddureError as error:
        problem = public_text(error)
        log(f"problem: {error}")
    except Exception as error:
        problem = public_text(error)
        log(f"problem: {type(error).__name__}: {error}; this log has the details")
        traceback.print_exc()
    report = {"problem": problem, "site": context.node_config.get("site")}
    return Message(RecordDict({ANSWER: pack(report)}), reply_to=message)
