"""Flower's ServerApp: the server of a federation whose sites keep their images.

It does what the simulator's server does, by the same class, and sends one message per site and round. A site that
fails, answers too late or sends something unusable is left out of the round and named in its record.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from feddure import config, data
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureError, RunError
from feddure.flower.app import messages, run_config, site_data
from feddure.flower.app import worker as site
from feddure.flower.app.exchange import Exchange, read_reply
from feddure.flower.app.messages import TASK, TRAIN, Task
from feddure.flower.app.nodes import Roster
from feddure.flower.app.policy import shares_parameters
from feddure.flower.app.privacy import Protection
from feddure.flower.app.run_config import RunOptions
from feddure.flower.app.run_folder import RunFolder
from feddure.flower.app.sanitize import plain, say
from feddure.methods.base import State
from feddure.simulation import runs
from feddure.simulation.engine import Engine
from feddure.simulation.server import Answer, Assignment, ImageCounts, Server, resolve_unlabelled_batch

app = ServerApp()

_MOST_UNLABELLED = 4096  # in a step, where nobody said how many
_MOST_EMPTY_ROUNDS = 5
_LARGEST = 1e30  # that a site may tell; sums of such numbers stay finite
_MOST_MEANS = 32
_TESTS = ("accuracy", "loss", "images")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that the run's configuration asks for."""
    try:
        run(grid, run_config.read(context.run_config))
    except FeddureError as problem:
        say(f"problem: {problem}")
        raise


def run(grid: Grid, options: RunOptions) -> Server:
    """All rounds of a run, from the first or from the last checkpoint; returns the server after the last."""
    options = _as_resumed(options)
    protection = Protection(options.clipping_norm, options.dp_epsilon, options.dp_delta)
    folder = RunFolder(options.folder, options.experiment, options.resume)
    dataset = _about_images(options)
    roster = _gather(grid, options)
    server = _start(options, dataset, roster, folder.holdings)
    if protection.epsilon and server.state["statistics"].numel():
        raise ConfigError("dp-epsilon: batch-norm statistics cannot be made private; add norm=group to the settings")
    with folder.locked():
        names = options.description.sites if options.description is not None else ()
        folder.open(server, _introduced(roster), names)
        say(f"run folder: {options.folder.resolve()}")
        if shares_parameters(server.experiment.method):
            say(f"{server.experiment.method} sends a site's parameters to other sites as helpers")
        if server.round:
            say(f"going on after round {server.round}")
        rounds = Rounds(grid, options, server, roster, folder)
        try:
            while server.round < server.experiment.rounds:
                rounds.play()
        finally:
            folder.close()
        say(f"report: {folder.finish(server)}")
    return server


class Rounds:
    """The rounds of a run, one after the other."""

    def __init__(self, grid: Grid, options: RunOptions, server: Server, roster: Roster, folder: RunFolder):
        self._exchange = Exchange(grid)
        self._options = options
        self._server = server
        self._roster = roster
        self._folder = folder
        self._shapes = messages.upload_shapes(server.program)
        self._experiment = server.experiment.to_yaml()
        self._checkpointed = _remembered(server)
        self._left_out: dict[int, str] = {}  # client → what it has not been told yet
        self._empty_rounds = 0  # without a single usable update, up to now

    def play(self) -> None:
        """The next round: ask its sites, make the next model of their answers, test it, write it down."""
        began = time.perf_counter()
        server, roster = self._server, self._roster
        roster.wait(max(self._options.minimum_sites, 1), self._options.wait_seconds)
        for client, member in roster.members.items():
            server.image_counts[client] = member.holding
        self._folder.write_sites(_introduced(roster))
        assignments = server.assignments()
        answers, told, wire = self._ask(assignments)
        record, problems = server.finish_round(answers)
        for client, problem in problems.items():
            say(f"round {server.round}: site '{roster.name(client)}' is left out: {problem}")
            self._left_out[client] = f"round {server.round}: {problem}"
        if server.method.memory:
            for answer in answers:
                if answer.client not in problems:
                    server.memories[answer.client] = {"round": torch.tensor(server.round)}
        told_by = [(a.steps, told[a.client]) for a in answers if a.client not in problems]
        record["train"] = _combine(told_by, messages.means_of(server.method))
        record["federation"] = self._describe(assignments, told, wire, problems)
        if server.due() and len(server.dataset.test_images):
            record |= server.test()
        seconds = time.perf_counter() - began
        sites = {roster.name(client): _number(answer.get("seconds")) for client, answer in told.items()}
        self._folder.write_round(server, record, seconds, sites)
        if server.round % server.experiment.checkpoint_every == 0 or server.round == server.experiment.rounds:
            self._folder.write_checkpoint(server)
            self._checkpointed = _remembered(server)
        say(_line(record, seconds, server.experiment.rounds))
        self._expect_updates(len(answers) - len(problems), problems)

    def _expect_updates(self, used: int, problems: Mapping[int, str]) -> None:
        """End a run that goes on without learning."""
        self._empty_rounds = 0 if used else self._empty_rounds + 1
        if self._empty_rounds >= _MOST_EMPTY_ROUNDS:
            reasons = [f"site '{self._roster.name(client)}': {problem}" for client, problem in problems.items()]
            raise RunError(
                f"{self._empty_rounds} rounds in a row without a usable update "
                f"({'; '.join(reasons) or 'no site that was drawn can learn'}); the checkpoint of round "
                f"{self._server.round} stays: go on from it with resume=true"
            )

    def _ask(
        self, assignments: list[Assignment]
    ) -> tuple[list[Answer], dict[int, dict[str, Any]], dict[int, dict[str, int]]]:
        """Answers in drawing order, what each client told beside its update, and bytes both ways."""
        received = {assignment.client: self._server.broadcast(assignment) for assignment in assignments}
        contents, wire = {}, {}
        for assignment in assignments:
            client = assignment.client
            if client in self._roster.members:
                content = messages.pack_state(received[client])
                content[TASK] = self._task(assignment).pack()
                contents[client] = self._roster.members[client].node, content
                wire[client] = {"down": messages.array_bytes(content), "up": 0}
        failed = self._exchange.send(contents, TRAIN, self._options.timeout_seconds)
        replies = self._exchange.collect_all()
        answers, told = [], {}
        for assignment in assignments:
            client = assignment.client
            upload: State = {}
            if client not in contents:
                problem = "drawn, but not connected"
            elif client in failed:
                problem = "the message could not be sent"
            else:
                reply = replies.get(client)
                told[client], upload, problem = self._read(assignment, reply)
                if reply is not None and reply.has_content():
                    wire[client]["up"] = messages.array_bytes(reply.content)
            sent = received[client] if client in contents else {}
            answers.append(Answer(client, assignment.steps, sent, upload, problem))
        return answers, told, wire

    def _task(self, assignment: Assignment) -> Task:
        client, options = assignment.client, self._options
        return Task(
            assignment=assignment,
            experiment=self._experiment,
            run_name=self._folder.run_name,
            remembered_round=_remembered(self._server).get(client, 0),
            checkpointed_round=self._checkpointed.get(client, 0),
            evaluate=(assignment.round - 1) % self._server.experiment.evaluate_every == 0,
            clipping_norm=options.clipping_norm,
            dp_epsilon=options.dp_epsilon,
            dp_delta=options.dp_delta,
            left_out=self._left_out.pop(client, ""),
        )

    def _read(self, assignment: Assignment, reply: Message | None) -> tuple[dict[str, Any], State, str]:
        answer, problem = read_reply(reply)
        if problem or reply is None:
            return answer, {}, problem
        if (answer.get("client"), answer.get("round")) != (assignment.client, assignment.round):
            return answer, {}, "answered for another client or round"
        try:
            upload = messages.unpack_state(reply.content, self._server.program.network.device)
        except Exception as error:  # whatever a site sends as an array must not end the run
            return answer, {}, f"sent arrays that cannot be read ({type(error).__name__})"
        problem = messages.find_problem(upload, self._shapes)
        return answer, {} if problem else upload, problem

    def _describe(
        self,
        assignments: list[Assignment],
        told: Mapping[int, Mapping[str, Any]],
        wire: Mapping[int, Mapping[str, int]],
        problems: Mapping[int, str],
    ) -> dict[str, Any]:
        """Who took part, on which node and in which process, and what travelled."""
        members, name = self._roster.members, self._roster.name
        sites = []
        for client in (assignment.client for assignment in assignments):
            answer = told.get(client, {})
            tests = {key: value for key in _TESTS if (value := _number(answer.get(f"test.{key}"))) is not None}
            found = {
                "site": name(client),
                "client": client,
                "node": str(members[client].node) if client in members else None,
                "pid": _number(answer.get("pid")),
                "bytes": dict(wire.get(client, {"down": 0, "up": 0})),
                "problem": problems.get(client),
                "memory": plain(answer["memory"]) if "memory" in answer else None,
                "test_of_received_model": tests or None,
            }
            sites.append({key: value for key, value in found.items() if value is not None})
        return {
            "sites": sites,
            "connected": [name(client) for client in sorted(members)],
            # Drawing does not look at who is connected, so that it is the simulator's and that of a resumed run.
            "drawn_but_away": [name(a.client) for a in assignments if a.client not in members],
            "refused": sorted(self._roster.refused.values()),
        }


def _as_resumed(options: RunOptions) -> RunOptions:
    """What was settled when the run began stays so when it goes on."""
    present = runs.read_config(options.folder) if options.resume else None
    if present is None:
        return options
    tree = options.experiment.model_dump()
    if options.experiment.unlabelled_batch == "auto":
        tree["unlabelled_batch"] = present.unlabelled_batch
    if options.description is None and not options.clients_given:
        tree["partition"]["clients"] = present.partition.clients
        tree["clients_per_round"] = min(tree["clients_per_round"], present.partition.clients)
    return replace(options, experiment=config.build(tree))


def _about_images(options: RunOptions) -> Dataset:
    """What images look like and what classes there are, with the images that the server tests on."""
    if options.description is None:
        return data.load(options.experiment.dataset, site.data_folder(options.data_dir))
    if options.tests is None:
        return site_data.without_images(options.description)
    tests = options.tests
    dataset, unreadable = site_data.load_tests(tests.folder, options.description, depth=tests.depth)
    for file in unreadable:
        say(f"left out: {tests.folder / file.file}: {file.reason}")
    return dataset


def _gather(grid: Grid, options: RunOptions) -> Roster:
    description = options.description
    sites, fingerprint = (description.sites, description.fingerprint()) if description else ((), "")
    experiment = options.experiment.to_yaml()
    roster = Roster(grid, sites, fingerprint, experiment, options.timeout_seconds, say)
    if description is None:
        roster.wait_for_simulation(options.wait_seconds)
    else:
        roster.wait(options.minimum_sites or len(sites), options.wait_seconds)
    return roster


def _start(options: RunOptions, dataset: Dataset, roster: Roster, earlier: Mapping[int, ImageCounts]) -> Server:
    """The server before its first round; `earlier` is what sites had that took part in the run before."""
    experiment, description = options.experiment, options.description
    if description is None:
        clients = max(member.clients for member in roster.members.values())
        if options.clients_given and experiment.partition.clients != clients:
            raise ConfigError(
                f"partition.clients is {experiment.partition.clients}, but Flower simulates {clients} nodes: "
                "leave the setting away, or simulate as many"
            )
        experiment = site.with_clients(experiment, clients)
        identity = site.share_identity(experiment)
    else:
        clients, identity = len(description.sites), description.fingerprint()
    known = {**earlier, **{client: member.holding for client, member in roster.members.items()}}
    holdings = [known.get(client, ImageCounts(0, 0)) for client in range(clients)]
    # A real site has images; one without any here has not been heard of yet.
    heard = [holding for holding in holdings if holding.total] if description is not None else holdings
    experiment = _settle_batch(experiment, heard or holdings)
    server = Server(experiment, dataset, holdings, Engine(experiment.engine), identity)
    unlabelled = sum(holding.unlabelled for holding in holdings)
    if description is not None and server.method.needs.every_label and unlabelled:
        raise ConfigError(
            f"method '{experiment.method}' learns from the labels of all images, but the sites have {unlabelled} "
            "images without a label; use another method"
        )
    return server


def _settle_batch(experiment: Experiment, holdings: list[ImageCounts]) -> Experiment:
    """`auto` becomes a number, which stays when sites come or go and when the run is resumed."""
    settled = resolve_unlabelled_batch(experiment, holdings)
    if experiment.unlabelled_batch == "auto" and settled > _MOST_UNLABELLED:
        raise ConfigError(
            f"unlabelled_batch: auto, a fifth of a mean site's unlabelled images, would be {settled} in each step, "
            f"more than {_MOST_UNLABELLED}; add unlabelled_batch=N to the settings"
        )
    return config.build(experiment.model_dump() | {"unlabelled_batch": settled})


def _introduced(roster: Roster) -> list[dict[str, Any]]:
    return [
        {
            "site": member.site,
            "client": client,
            "node": str(member.node),
            "labelled": member.holding.labelled,
            "unlabelled": member.holding.unlabelled,
            "unreadable": member.unreadable,
        }
        for client, member in sorted(roster.members.items())
    ]


def _remembered(server: Server) -> dict[int, int]:
    """For each client with a memory, the round whose memory counts."""
    return {client: int(memory["round"]) for client, memory in server.memories.items()}


def _combine(told: Sequence[tuple[int, Mapping[str, Any]]], known: Callable[[str], bool]) -> dict[str, float]:
    """Means over all steps of the round, from those of each client; unknown names are not heard."""
    found = {}
    names = dict.fromkeys(key for _, answer in told for key in answer if key.startswith("train.") and known(key[6:]))
    for name in list(names)[:_MOST_MEANS]:
        parts = [(steps, value) for steps, answer in told if (value := _number(answer.get(name))) is not None]
        if parts:
            total = sum(steps for steps, _ in parts)
            found[name.partition(".")[2]] = sum(steps * value for steps, value in parts) / total
    return found


def _number(value: Any) -> int | float | None:
    """A number that a site told, or None for anything else."""
    return value if isinstance(value, int | float) and abs(value) <= _LARGEST else None


def _line(record: dict[str, Any], seconds: float, rounds: int) -> str:
    used = len(record["clients"]) - len(record["left_out"])
    parts = [f"round {record['round']}/{rounds}", f"{used} of {len(record['clients'])} drawn sites"]
    if "loss" in record["train"]:
        parts.append(f"loss {record['train']['loss']:.3f}")
    if "test" in record:
        parts.append(f"accuracy {100 * record['test']['accuracy']:.1f} %")
    return ", ".join([*parts, f"{seconds:.1f} s"])
