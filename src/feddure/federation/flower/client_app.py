"""Flower's ClientApp: one client of a federation, at the site that owns its images.

A node is told who it is by its configuration, for example `site="a" data="/images" state="/var/feddure"`, and
perhaps `description="/path/federation.yaml"`, `device="cpu"`, and the options of `privacy` and of `consent`. A node of
Flower's simulation has `partition-id` and `num-partitions` instead, and takes its share of the data set that the run
names.
"""

import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from feddure.errors import FeddureError
from feddure.federation.flower.consent import check_consent
from feddure.federation.flower.memory import InContext, Memory, OnDisk
from feddure.federation.flower.messages import ANSWER, TASK, Task, pack_answer, pack_state, unpack_state
from feddure.federation.flower.privacy import protect
from feddure.federation.flower.site import Site, Worker, open_share, open_site, read_experiment
from feddure.federation.flower.words import public_text

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Who this site is and how many images it has."""

    def answer() -> RecordDict:
        site = _open(context, str(message.content.config_records[TASK]["experiment"]))
        for file in site.unreadable:
            print(f"left out: {file.file}: {file.reason}", flush=True)
        return RecordDict({ANSWER: pack_answer(site.introduce())})

    return _answer(message, context, answer)


@app.train(mods=[protect])
def train(message: Message, context: Context) -> Message:
    """One round of this site's client."""

    def answer() -> RecordDict:
        task = Task.unpack(message.content.config_records[TASK])
        site = _open(context, task.experiment)
        worker = _worker(task.experiment, str(context.node_config.get("device", "")))
        memory: Memory = (
            OnDisk(site.state, task.run_name) if site.state is not None else InContext(context.state, task.run_name)
        )
        upload, told = worker.train(site, task, unpack_state(message.content, worker.device), memory)
        content = pack_state(upload)
        content[ANSWER] = pack_answer(told)
        return content

    return _answer(message, context, answer)


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
        print(f"problem: {error}", flush=True)
    except Exception as error:
        problem = public_text(error)
        traceback.print_exc()
    told = {"problem": problem, "site": context.node_config.get("site")}
    return Message(RecordDict({ANSWER: pack_answer(told)}), reply_to=message)
