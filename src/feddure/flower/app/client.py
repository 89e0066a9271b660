"""Flower's ClientApp: one client of a federation, at the site that owns its images.

A node is told who it is by its configuration, for example `site="a" data="/images" state="/var/feddure"`, and
perhaps `description="/path/federation.yaml"`, `device="cpu"`, and the options of `privacy` and of `consent`. A node of
Flower's simulation has `partition-id` and `num-partitions` instead, and takes its share of the data set that the run
names.
"""

import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import yaml
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from feddure.errors import FeddureError
from feddure.flower.app.memory import InContext, Memory, OnDisk
from feddure.flower.app.messages import ANSWER, TASK, Task, array_bytes, pack_answer, pack_state, unpack_state
from feddure.flower.app.policy import check_consent
from feddure.flower.app.privacy import protect
from feddure.flower.app.sanitize import plain, public_text, say
from feddure.flower.app.worker import Site, Worker, open_share, open_site, read_experiment

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Who this site is and how many images it has."""

    def answer() -> RecordDict:
        asked = message.content.config_records[TASK]
        site = _open(context, str(asked["experiment"]))
        for file in site.unreadable:
            print(f"left out: {file.file}: {file.reason}", flush=True)
        if _is_real(site):
            say(
                _refusal(str(asked["refused"])) if "refused" in asked else _introduction(site, str(asked["experiment"]))
            )
        return RecordDict({ANSWER: pack_answer(site.introduce())})

    return _answer(message, context, answer)


@app.train(mods=[protect])
def train(message: Message, context: Context) -> Message:
    """One round of this site's client."""

    def answer() -> RecordDict:
        task = Task.unpack(message.content.config_records[TASK])
        site = _open(context, task.experiment)
        if task.left_out and _is_real(site):
            say(f"warning: the server did not use this site's answer of {plain(task.left_out)}")
        worker = _worker(task.experiment, str(context.node_config.get("device", "")))
        memory: Memory = (
            OnDisk(site.state, task.run_name) if site.state is not None else InContext(context.state, task.run_name)
        )
        upload, told = worker.train(site, task, unpack_state(message.content, worker.device), memory)
        content = pack_state(upload)
        content[ANSWER] = pack_answer(told)
        if _is_real(site):
            rounds = worker.experiment.rounds
            say(_round_line(told, rounds, array_bytes(message.content), array_bytes(content)))
        return content

    return _answer(message, context, answer)


def _is_real(site: Site) -> bool:
    """Whether somebody at a site reads its log; a simulation has a line for the rounds of all clients."""
    return site.state is not None


def _introduction(site: Site, experiment: str) -> str:
    asked = yaml.safe_load(experiment) or {}
    left_out = f" ({len(site.unreadable)} unreadable files are left out)" if site.unreadable else ""
    return (
        f"a run asks for this site: {asked.get('method')}, {asked.get('rounds')} rounds; the server was told of "
        f"{len(site.labelled):,} labelled and {len(site.unlabelled):,} unlabelled images{left_out}"
    )


def _refusal(reason: str) -> str:
    return (
        f"problem: the server refuses this site: {plain(reason)}. It takes no part in the run; ask the server's "
        "operator, and start the site again once that is settled"
    )


def _round_line(told: Mapping[str, Any], rounds: int, received: int, sent: int) -> str:
    parts = []
    if "train.loss" in told:
        parts.append(f"loss {told['train.loss']:.3f}")
    if "test.accuracy" in told:
        parts.append(f"received model {100 * told['test.accuracy']:.1f} % on {told['test.images']:,} own test images")
    parts.append(f"{told['seconds']:.1f} s")
    parts.append(f"{_megabytes(received)} received, {_megabytes(sent)} to send")
    line = f"round {told['round']}/{rounds}: {', '.join(parts)}"
    return f"{line}; {told['memory']}" if told.get("memory") else line


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _open(context: Context, experiment: str) -> Site:
    node: dict[str, Any] = dict(context.node_config)
    if "partition-id" in node and "data" not in node:
        client, clients = int(node["partition-id"]), int(node["num-partitions"])
        return open_share(client, clients, read_experiment(experiment), str(context.run_config.get("data-dir", "")))
    check_consent(node, experiment)
    return open_site(node, str(context.run_config.get("description", "")))


@lru_cache(maxsize=2)
def _worker(experiment: str, device: str) -> Worker:
    return Worker(read_experiment(experiment, device))


def _answer(message: Message, context: Context, work: Callable[[], RecordDict]) -> Message:
    """What the work makes, or the problem that it met: the server then knows why, and goes on without this site."""
    try:
        return Message(work(), reply_to=message)
    except FeddureError as error:
        problem = public_text(error)
        say(f"problem: {error}")
    except Exception as error:
        problem = public_text(error)
        say(f"problem: {type(error).__name__}: {error}; this log has the details")
        traceback.print_exc()
    told = {"problem": problem, "site": context.node_config.get("site")}
    return Message(RecordDict({ANSWER: pack_answer(told)}), reply_to=message)
